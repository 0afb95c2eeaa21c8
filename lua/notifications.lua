-- Shared by the scripts of notifications: inserted after shared.lua when a script is loaded.
--
-- These scripts declare first, after the eight keys of shared.lua:
--   KEYS[9]  due    sorted set  id -> due time (ms); `promote` queues due ones
--   KEYS[10] later  hash        id -> bot and event
--   KEYS[11] dlq    stream      dead letters
--   KEYS[12] stats  hash        of this day: type|outcome -> count, type|late<ms> -> number of
--                               first attempts with at most this delay, above the step before
--   KEYS[13] stats  hash        of this hour
--
-- A notification is a record, n:<id>, a hash of
--   state     scheduled, waiting (for its user), sending; or the end: sent, refused, throttled,
--             expired, dead, cancelled
--   bot, uid (may be empty), type, label (of the statistics), url, method, body, recheck,
--             headers (the name of a set of them)
--   due, expires, created, ended (ms)    online (1: it waits for its user)
--   attempts  started sends      s  the sequence of the last handled event
--   asked     the sequence (above s) of the event that found a send without a result
--   reason    why it ended, or why the last attempt failed or was postponed
--   ready     when it could be sent, if later than due    told  its lateness is counted
--   key       the caller's key    held  what its bot holds with it, in bytes, while it is pending, or
--             dead and kept
-- and, until it has ended, an entry in `due`, or an event in the queue of its bot, or both. The
-- event contains only the id. An event whose sequence is not above `s` was handled before and is
-- ignored. So events may be repeated, late, or concern a notification that has ended.
--
-- A full Redis still sends: begin, finish, amend and release run there, as promote does. They only
-- write data of a notification that schedule.lua accepted, and a full Redis refuses schedule.lua:
-- some numbers in its record, its entry in `due` or `online`, one small hash of its user, which
-- expires. A notification that ends frees its entries, its body and its recheck URL. Dead letters
-- are bounded by their maximum, statistics by their labels, and a bot has one meter.
--
-- The record of an ended notification stays for a week, as long as the records of its bot are within
-- their quota; then for ten minutes; and above twice the quota for a second. So old results never
-- refuse a new notification. One with a key stays for at least an hour after it was accepted, unless
-- it was cancelled: its key must stay known, and the quota of keys bounds its number. A dead one with a
-- letter may take the quota once more, because an operator may redrive it. It stays longer than its
-- letter, and without room for it there is no letter. results:<bot> is the meter.
--
-- user:<bot> <uid> is a hash: sent, online (ms, the last time of each), by and until (the
-- notification in flight to the user, and until when no other one is sent to the user), late (the
-- same notification, after that time had to be prolonged because it had no result), turn (when the last
-- one that waits for it is looked at again), log and log|<type> (the times of the last sends, 6 bytes
-- each: as many as the largest cap that reads them).
--
-- A cap is exact, in any window. A user gets one notification at a time, so a send can check the
-- caps when it starts, and it counts once, when it ends as sent. A cap of n only needs the time of
-- the n-th last send, so a log contains no more entries. It expires with the hash of its user, one
-- window after the last send.
local DUE, LATER, DLQ, DAY, HOUR = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local KEPT_MS, SHORT_MS, LEAST_MS, KEY_MS = 604800000, 600000, 1000, 3600000
local DAY_SECONDS, HOUR_SECONDS = 34560000, 691200
local RECORD_BYTES = 1024 -- what Redis needs for an ended record and its key, besides the URL
local USER_KEPT_MS = 3600000 -- at least, while a send to the user is in flight: longer than usual outages
local ENDED = {
  sent = true, refused = true, throttled = true, expired = true, dead = true, cancelled = true,
}
local due_before, due_first -- the lowest due time before, and the lowest one set since

-- A record, or nil. `at` is the number of its key.
local function note_at(at, id)
  local names = {
    'state', 'bot', 'uid', 'type', 'label', 'due', 'expires', 'created', 'online', 'attempts', 's',
    'reason', 'ready', 'told', 'asked', 'held', 'key',
  }
  local note = {id = id}
  for i, value in ipairs(call('HMGET', KEYS[at], unpack(names))) do
    note[names[i]] = value
  end
  note.named, note.key = note.key, KEYS[at]
  if not note.state then
    return nil
  end
  for _, name in ipairs({'due', 'expires', 'created', 'attempts', 's', 'asked'}) do
    note[name] = tonumber(note[name] or 0)
  end
  return note
end

-- Its event as MessagePack: id, source, type, subject, and four absent attributes.
local function event_of(note)
  local pack = cmsgpack.pack
  return '\152' .. pack(note.id) .. '\168fairlane\176notification.due'
    .. (note.uid == '' and '\192' or pack(note.uid)) .. '\192\192\192\192'
end

-- A time of a user's last notification, if the clock was not set back behind it since; or 0.
local function past(ms)
  return ms <= now_ms() and ms or 0
end

-- When a log of sends has room for another one, with at most n in a window.
local STAMP = 6
local function room_at(log, n, window)
  local at = #log - STAMP * n + 1
  return at < 1 and 0 or past(struct.unpack('>I6', log, at)) + window
end

-- Appends a send to a log of a user that keeps the last `n`.
local function note_sent(user, field, n)
  if n > 0 then
    local log = (call('HGET', user, field) or '') .. struct.pack('>I6', now_ms())
    call('HSET', user, field, string.sub(log, -STAMP * n))
  end
end

-- The due time: `at` (ms), or now if that has passed; if `at` is 0, the delay from now. Never
-- early: the current millisecond is rounded up.
local function due_at(at, delay)
  if at > 0 then return math.max(at, now_ms()) end
  return now_ms() + delay + (delay > 0 and 1 or 0)
end

-- Moves its due time to `time` (ms).
local function arm(note, time)
  if not due_first then due_before = lowest(DUE) end
  call('ZADD', DUE, digits(time), note.id)
  local event = event_of(note)
  if call('HSET', LATER, note.id, #note.bot .. ':' .. note.bot .. event) == 1 then
    hold('l' .. note.bot, 1)
    hold('L' .. note.bot, #event)
  end
  due_first = math.min(due_first or time, time)
end

-- Stores what bots hold, and wakes the schedulers after due times changed. The last call of a script.
local function armed()
  settle()
  wake('due', due_before, due_first)
end

local function tally(note, outcome)
  local field = note.label .. '|' .. outcome
  if call('HINCRBY', DAY, field, '1') == 1 then call('EXPIRE', DAY, DAY_SECONDS) end
  if call('HINCRBY', HOUR, field, '1') == 1 then call('EXPIRE', HOUR, HOUR_SECONDS) end
end

-- Notes that its bot holds it (1), or does not hold it any more (-1). An older version did not count.
local function hold_note(note, sign)
  if note.held then
    hold('n' .. note.bot, sign)
    hold('N' .. note.bot, sign * tonumber(note.held))
  end
end

-- The quotas of a bot in the text 'those of quota_of|bytes of ended records'; 0: none.
local function quotas_of(text)
  local queue, results = string.match(text, '^(.*)|(%d+)$')
  local quota = quota_of(queue)
  quota.results = tonumber(results)
  return quota
end

-- How long the record stays after its end, in ms. `limit`: the quota of the bytes of ended records;
-- `more`: the bytes that it keeps for its letter, or nil: it has none.
local function stays(note, state, limit, meter, more)
  if limit == 0 then
    return KEPT_MS
  end
  local bytes, most = RECORD_BYTES + call('HSTRLEN', note.key, 'url'), KEPT_MS
  if more then
    bytes, most = bytes + more, 2 * KEPT_MS
  end
  local free, now, kept = free_at(meter, 2000 * KEPT_MS), now_us(), LEAST_MS
  local after = free + math.ceil(1000 * KEPT_MS * bytes / limit)
  if after <= now + 1000 * most then
    kept = KEPT_MS
  else
    after = math.max(free, now + 1000 * KEPT_MS) + math.ceil(1000 * SHORT_MS * bytes / limit)
    if after <= now + 1000 * (KEPT_MS + SHORT_MS) then
      kept = SHORT_MS
    end
  end
  if kept > LEAST_MS then
    set_meter(meter, after)
  end
  if note.named and state ~= 'cancelled' then
    kept = math.max(kept, math.min(note.created, now_ms()) + KEY_MS - now_ms())
  end
  return kept
end

-- Ends it. The record stays for a while, without the data of a send. A dead one can be redriven.
-- Returns for how long (ms). `more`: see stays().
local function finish(note, state, reason, limit, meter, more)
  call('ZREM', DUE, note.id)
  if call('HDEL', LATER, note.id) == 1 then
    hold('l' .. note.bot, -1)
    hold('L' .. note.bot, -#event_of(note))
  end
  hold_note(note, -1)
  if state ~= 'dead' then call('HDEL', note.key, 'body', 'recheck', 'method', 'held') end
  call('HSET', note.key, 'state', state, 'ended', now_ms(), 'reason', reason)
  local kept = stays(note, state, limit, meter, more)
  call('PEXPIRE', note.key, kept)
  tally(note, state)
  return kept
end

-- The sequence of an event that is queued now.
local function next_sequence()
  local sequence = math.max(tonumber(call('HGET', META, 'seq') or 0) + 1, now_us())
  call('HSET', META, 'seq', sequence)
  return sequence
end

-- Ends it as a dead letter; returns how many letters were deleted, and how many of them because of
-- a quota of the bot. A redrive starts it again. No event that is already queued does, and the record outlives the
-- letter: if it cannot stay as long, there is no letter. Without a letter it ends as others do.
local function give_up(note, reason, dead_max, quota, meter)
  local sequence, more, removed, lost = next_sequence(), tonumber(note.held or 0), 1, 1
  local entry, letters = record(sequence, event_of(note)), dead_letters()
  local room = letters.room(DLQ, dead_max, note.bot, #entry + more, quota)
  local kept = finish(note, 'dead', reason, quota.results, meter, room and more)
  call('HSET', note.key, 's', sequence - 1)
  if room and kept >= KEPT_MS then
    removed, lost = letters.bury(DLQ, dead_max, note.bot, entry, reason, note.attempts, quota, more, room)
  end
  if lost > 0 then
    call('HDEL', note.key, 'body', 'recheck', 'method', 'held')
  else
    call('PEXPIRE', note.key, kept + 3600000)
  end
  return removed, lost
end
