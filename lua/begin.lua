#!lua
-- begin: judges notifications whose events are handled, and begins to send those that may be sent.
--
-- One that is begun falls due again after `hold`, as a safety net, and has its user for itself
-- until then. Only finish.lua with its token (the sequence of the event) ends the send.
--
-- KEYS  the thirteen of notifications.lua, then per event: n:<id>, user:<bot> <uid>,
--       online:<bot> <uid>
-- ARGV  hold ms, max dead letters, throttled ones ('drop' | 'defer'), threshold ms, number of types
--       with another, per such type: name, threshold ms; then per event: id, sequence
-- Reply {dead letters removed, per event: 0, or how it ended: {outcome, label}, or what is to be
--       sent: {id, token, bot, uid, type, label, url, method, body, recheck, due, expires,
--       attempts, when it could be sent, 1 if its lateness counts}}
-- Cost  3 commands + up to 9 an event
assert(#KEYS > 13 and (#KEYS - 13) % 3 == 0, 'begin: wrong number of arguments')
local hold, dead_max, defers = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == 'defer'
local thresholds, first = {}, 6 + 2 * tonumber(ARGV[5])
for at = 6, first - 2, 2 do
  thresholds[ARGV[at]] = tonumber(ARGV[at + 1])
end
assert(#ARGV == first - 1 + 2 * (#KEYS - 13) / 3, 'begin: wrong number of arguments')
local reply = {0}

-- Whether it may be sent now; else it falls due later, or how it ended.
local function may_send(note, user, online, waits)
  if note.due > NOW_MS and not waits then
    arm(note, note.due) -- it was moved while its event was queued
    return false
  end
  if NOW_MS >= note.expires then
    call('ZREM', online, note.id)
    if note.attempts > 0 or (note.reason or '') ~= '' then
      local reason = 'not sent before it expired'
      if (note.reason or '') ~= '' then reason = reason .. '; last: ' .. note.reason end
      reply[1] = reply[1] + give_up(note, reason, dead_max)
      return false, 'dead'
    end
    finish(note, 'expired', 'its time passed before it could be sent')
    return false, 'expired'
  end
  if waits then
    arm(note, note.expires) -- it was moved, and its expiry with it
    return false
  end
  if note.uid == '' then
    return true
  end
  local known = call('HMGET', user, 'sent', 'by', 'until')
  if known[2] and known[2] ~= note.id and tonumber(known[3]) > NOW_MS then
    arm(note, NOW_MS + 1000)
    return false
  end
  local threshold = thresholds[note.type] or tonumber(ARGV[4])
  local free = known[1] and tonumber(known[1]) + threshold or 0
  if note.online == '1' or free <= NOW_MS then
    return true
  end
  if defers and free < note.expires then
    call('HSET', note.key, 'ready', free)
    arm(note, free)
    return false
  end
  finish(note, 'throttled', 'the user got another one less than '
    .. digits(threshold / 1000) .. ' s before')
  return false, 'throttled'
end

for i = 1, (#KEYS - 13) / 3 do
  local at, id, sequence = 11 + 3 * i, ARGV[first + 2 * i - 2], tonumber(ARGV[first + 2 * i - 1])
  local note, user = note_at(at, id), KEYS[at + 1]
  reply[i + 1] = 0
  if note and sequence > note.s and (not ENDED[note.state] or note.state == 'dead') then
    if note.state == 'dead' then -- somebody redrove it
      note.attempts, note.expires = 0, NOW_MS + math.max(0, note.expires - note.due)
      note.due, note.reason, note.ready, note.told = NOW_MS, nil, nil, nil
      call('HSET', note.key, 'attempts', 0, 'due', note.due, 'expires', note.expires)
      call('HDEL', note.key, 'ended', 'reason', 'ready', 'told')
      call('PERSIST', note.key)
    end
    local waits = note.state == 'waiting' and call('ZSCORE', KEYS[at + 2], id)
    call('HSET', note.key, 's', sequence, 'state', waits and 'waiting' or 'scheduled')
    local may, outcome = may_send(note, user, KEYS[at + 2], waits)
    if outcome then
      reply[i + 1] = {outcome, note.label}
    elseif may then
      arm(note, NOW_MS + hold)
      call('HSET', note.key, 'state', 'sending', 'attempts', note.attempts + 1)
      if note.uid ~= '' then
        call('HSET', user, 'by', id, 'until', NOW_MS + hold)
        if call('PTTL', user) < hold then call('PEXPIRE', user, hold) end
      end
      local what = call('HMGET', note.key, 'url', 'method', 'body', 'recheck')
      reply[i + 1] = {
        id, ARGV[first + 2 * i - 1], note.bot, note.uid, note.type, note.label, what[1] or '',
        what[2] or '', what[3] or '', what[4] or '', digits(note.due), digits(note.expires),
        digits(note.attempts + 1), note.ready or digits(note.due),
        (note.told or note.online == '1') and 0 or 1,
      }
    end
  end
end
armed()
return reply
