#!lua flags=allow-oom
-- begin: decides about notifications whose events are handled, and starts those that may be sent.
--
-- A started notification becomes due again after `hold`, as a safety net. Its sender then has
-- another `patience` to report the result: Redis may have been unavailable, even for hours, while
-- the process was running. Only after that is the notification started again. Until then no other
-- notification is sent to its user. Only finish.lua with its token (the sequence of the event) ends
-- the send.
--
-- Also runs on a full Redis: notifications.lua explains why it cannot fill it further.
--
-- KEYS  the thirteen of notifications.lua, [14] results:<bot>, then per event: n:<id>, user:<bot> <uid>,
--       online:<bot> <uid>
-- ARGV  hold ms, patience ms, max dead letters, quotas of the bot (see quotas_of), throttled ones ('drop' | 'defer'), threshold ms,
--       number of types with another, per such type: name, threshold ms; number of caps, per cap: n,
--       window ms; number of caps of types, each: type, n, window ms (n = 0: the type has no cap, nor
--       those of all types); then per event: id, sequence
-- Reply {dead letters removed, those of them above a quota, per event: 0, or 1 if its notification has no record,
--       or the end: {outcome, label, id, key}, or the send:
--       {id, token, bot, uid, type, label, url, method, body, recheck, due, expires,
--       attempts, when it could be sent, 1 if its lateness counts, headers, key, 1 if it was
--       postponed, the context of its trace}}
-- Cost  5 commands + 10 an event whose send starts
assert(#KEYS > 14 and (#KEYS - 14) % 3 == 0, 'begin: wrong number of arguments')
local pause, patience, dead_max, quota, defers =
  tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), quotas_of(ARGV[4]), ARGV[5] == 'defer'
local at, thresholds, caps, caps_of, METER = 7, {}, {}, {}, KEYS[14]

-- Reads a list in ARGV: its length, then entries of `width` values each.
local function each(width, take)
  local first = at + 1
  at = first + width * tonumber(ARGV[at])
  for entry = first, at - 1, width do
    take(ARGV[entry], ARGV[entry + 1], ARGV[entry + 2])
  end
end

each(2, function(kind, threshold) thresholds[kind] = tonumber(threshold) end)
each(2, function(n, window) caps[#caps + 1] = {n = tonumber(n), window = tonumber(window)} end)
each(3, function(kind, n, window)
  caps_of[kind] = caps_of[kind] or {}
  if tonumber(n) > 0 then
    table.insert(caps_of[kind], {n = tonumber(n), window = tonumber(window), kind = kind})
  end
end)
local first = at
assert(#ARGV == first - 1 + 2 * (#KEYS - 14) / 3, 'begin: wrong number of arguments')
local reply = {0, 0}

-- When the user may get the notification, and why not earlier. `known` is the user's hash.
local function room_for(note, known)
  local free, why = 0, nil
  if note.online ~= '1' and known[1] then
    local threshold = thresholds[note.type] or tonumber(ARGV[6])
    free = past(tonumber(known[1])) + threshold
    why = 'the user got another one less than ' .. digits(math.floor(threshold / 1000 + 0.5)) .. ' s before'
  end
  local own = caps_of[note.type]
  local function ask(log, list)
    for _, cap in ipairs(list) do
      local room = room_at(log or '', cap.n, cap.window)
      if room > free then
        free = room
        why = 'the user got ' .. digits(cap.n) .. (cap.kind and ' of this type' or '') .. ' within '
          .. digits(math.floor(cap.window / 1000 + 0.5)) .. ' s'
      end
    end
  end
  if not own or #own > 0 then ask(known[4], caps) end
  ask(known[5], own or {})
  return free, why
end

-- When a notification that waits for the one in flight is looked at again. Those of a user take turns,
-- SPACE apart, and each waits for a quarter of its lateness: so a tenant with any number of them needs
-- few calls. One that was released waits for a second, because its user may leave. `last`: the turn of the
-- last one; far ahead, because it was cancelled or the clock was set back, it does not count.
local SPACE, FAR, SOON, LATE = 20, 60000, 1000, 30000 -- ms
local function turn_of(note, user, last)
  local late = now_ms() - math.max(note.due, tonumber(note.ready or 0))
  local turn = now_ms() + math.floor(math.max(SOON, math.min(LATE, late / 4)))
  if note.online == '1' then
    turn = now_ms() + SOON
  else
    if last < turn + FAR then
      turn = math.max(turn, last + SPACE)
    end
    call('HSET', user, 'turn', turn)
  end
  return math.min(turn, note.expires)
end

-- Whether the notification may be sent now. Otherwise it becomes due later, or ends.
local function may_send(note, user, online, waits)
  if note.due > now_ms() and not waits then
    arm(note, note.due) -- it was moved while its event was queued
    return false
  end
  if now_ms() >= note.expires then
    call('ZREM', online, note.id)
    if note.attempts > 0 or (note.reason or '') ~= '' then
      local reason = 'not sent before it expired'
      if (note.reason or '') ~= '' then reason = reason .. '; last: ' .. note.reason end
      local removed, lost = give_up(note, reason, dead_max, quota, METER)
      reply[1], reply[2] = reply[1] + removed, reply[2] + lost
      return false, 'dead'
    end
    finish(note, 'expired', 'its time passed before it could be sent', quota.results, METER)
    return false, 'expired'
  end
  if waits then
    arm(note, note.expires) -- it was moved, and its expiry with it
    return false
  end
  if note.uid == '' then
    return true
  end
  local known = call('HMGET', user, 'sent', 'by', 'until', 'log', 'log|' .. note.type, 'late', 'turn')
  if known[2] and known[2] ~= note.id then
    local ends, longest = tonumber(known[3]), now_ms() + pause + patience
    if ends > longest then -- the clock was set back
      ends = longest
      call('HSET', user, 'until', ends)
    end
    local over = ends <= now_ms()
    if over and known[6] ~= known[2] then
      -- That send has no result yet: its process may have been unable to report it.
      call('HSET', user, 'late', known[2], 'until', now_ms() + patience)
      over = false
    end
    if not over then
      arm(note, turn_of(note, user, tonumber(known[7] or 0)))
      return false
    end
  end
  local free, why = room_for(note, known)
  if free <= now_ms() then
    return true
  end
  if defers and free < note.expires then
    call('HSET', note.key, 'ready', free)
    arm(note, free)
    return false
  end
  finish(note, 'throttled', why, quota.results, METER)
  return false, 'throttled'
end

for i = 1, (#KEYS - 14) / 3 do
  local at, id, sequence = 12 + 3 * i, ARGV[first + 2 * i - 2], tonumber(ARGV[first + 2 * i - 1])
  local note, user = note_at(at, id), KEYS[at + 1]
  reply[i + 2] = note and 0 or 1
  local is_new = note and sequence > math.max(note.s, note.asked)
  if is_new and note.state == 'sending' and note.asked <= note.s then
    call('HSET', note.key, 'asked', sequence) -- and it keeps the token
    arm(note, now_ms() + patience)
  elseif is_new and (not ENDED[note.state] or note.state == 'dead') then
    if note.state == 'dead' then -- an operator redrove it
      hold_note(note, 1)
      note.attempts, note.expires = 0, now_ms() + math.max(0, note.expires - note.due)
      note.due, note.reason, note.ready, note.told = now_ms(), nil, nil, nil
      call('HSET', note.key, 'attempts', 0, 'due', note.due, 'expires', note.expires)
      call('HDEL', note.key, 'ended', 'reason', 'ready', 'told', 'postponed')
      call('PERSIST', note.key)
    end
    local waits = note.state == 'waiting' and call('ZSCORE', KEYS[at + 2], id)
    call('HSET', note.key, 's', sequence, 'state', waits and 'waiting' or 'scheduled')
    local may, outcome = may_send(note, user, KEYS[at + 2], waits)
    if outcome then
      reply[i + 2] = {outcome, note.label, id, note.named or ''}
    elseif may then
      arm(note, now_ms() + pause)
      call('HSET', note.key, 'state', 'sending', 'attempts', note.attempts + 1)
      if note.uid ~= '' then
        call('HSET', user, 'by', id, 'until', now_ms() + pause + patience, 'late', '')
        if call('PTTL', user) < USER_KEPT_MS then call('PEXPIRE', user, USER_KEPT_MS) end
      end
      local what = call('HMGET', note.key, 'url', 'method', 'body', 'recheck', 'headers',
        'postponed', 'trace')
      reply[i + 2] = {
        id, ARGV[first + 2 * i - 1], note.bot, note.uid, note.type, note.label, what[1] or '',
        what[2] or '', what[3] or '', what[4] or '', digits(note.due), digits(note.expires),
        digits(note.attempts + 1), note.ready or digits(note.due),
        (note.told or note.online == '1') and 0 or 1, what[5] or '', note.named or '',
        what[6] == '1' and 1 or 0, what[7] or '',
      }
    end
  end
end
armed()
return reply
