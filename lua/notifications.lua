-- Shared by the scripts of notifications: placed behind shared.lua when it is loaded.
--
-- These scripts declare first, behind the eight of shared.lua:
--   KEYS[9]  due    sorted set  id -> when it falls due (ms); `promote` queues what does
--   KEYS[10] later  hash        id -> bot and event
--   KEYS[11] dlq    stream      dead letters
--   KEYS[12] stats  hash        of this day: type|outcome -> how many, type|late<ms> -> how many
--                               were first sent at most so late, and later than the step before
--   KEYS[13] stats  hash        of this hour
--
-- A notification is a record, n:<id>, a hash of
--   state     scheduled, waiting (for its user), sending; or how it ended: sent, refused, throttled,
--             expired, dead, cancelled
--   bot, uid (may be empty), type, label (of the statistics), url, method, body, recheck,
--             headers (the name of a set of them)
--   due, expires, created, ended (ms)    online (1: it waits for its user)
--   attempts  sends that were begun      s  the event that was acted on last: its sequence
--   asked     the event by which a send was found that nobody had ended: its sequence, above s
--   reason    why it ended, or why the last attempt failed or was put off
--   ready     when it could be sent, where that is later than due    told  its lateness is counted
--   key       of the caller's
-- and, until it has ended, an entry in `due`, or an event in the queue of its bot, or both. The
-- event holds no more than the id. One whose sequence is not above `s` was acted on before and
-- means nothing; so events may come twice, late, and for what has ended.
--
-- A full Redis still sends: begin, finish, amend and release run there, as promote does. Whatever
-- they write belongs to a notification that schedule.lua accepted, and schedule.lua is refused
-- while Redis is full: some numbers in its record, its entry in `due` or `online`, one small hash of
-- its user, which expires. One that ends gives back its entries, its body and its recheck. Dead
-- letters are bounded by their maximum, statistics by their labels.
--
-- user:<bot> <uid> is a hash: sent, online (ms, the last of each), by and until (the notification
-- that is being sent to the user, and until when it has the user for itself), late (the same one, once
-- that time was over and had to be prolonged: nobody had said how it ended), log and log|<type>
-- (when the last ones were sent, 6 bytes each: as many as the largest cap that looks there).
--
-- A cap is exact, in any window: a user gets one at a time, so whether there is room is known when a
-- send begins, and it is counted once, when it ends as sent. A cap of n asks only when the n-th last
-- one was sent, so a log holds no more; it expires with its user's hash, a window after the last one.
local DUE, LATER, DLQ, DAY, HOUR = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local KEPT_MS, DAY_SECONDS, HOUR_SECONDS = 604800000, 34560000, 691200
local USER_KEPT_MS = 3600000 -- at least, while one is sent to the user: longer than most outages
local ENDED = {
  sent = true, refused = true, throttled = true, expired = true, dead = true, cancelled = true,
}
local due_before, due_first -- the lowest due time before, and what was armed since

-- A record, or nil. `at` is the number of its key.
local function note_at(at, id)
  local names = {
    'state', 'bot', 'uid', 'type', 'label', 'due', 'expires', 'created', 'online', 'attempts', 's',
    'reason', 'ready', 'told', 'asked',
  }
  local note = {key = KEYS[at], id = id}
  for i, value in ipairs(call('HMGET', KEYS[at], unpack(names))) do
    note[names[i]] = value
  end
  if not note.state then
    return nil
  end
  for _, name in ipairs({'due', 'expires', 'created', 'attempts', 's', 'asked'}) do
    note[name] = tonumber(note[name] or 0)
  end
  return note
end

-- Its event as MessagePack: id, source, type, subject, and four that it has not.
local function event_of(note)
  local pack = cmsgpack.pack
  return '\152' .. pack(note.id) .. pack('fairlane') .. pack('notification.due')
    .. (note.uid == '' and '\192' or pack(note.uid)) .. '\192\192\192\192'
end

-- When a log of sends has room for another one, by at most n in a window.
local STAMP = 6
local function room_at(log, n, window)
  local at = #log - STAMP * n + 1
  return at < 1 and 0 or struct.unpack('>I6', log, at) + window
end

-- Notes a send at the end of a log of a user that keeps the last `n`.
local function note_sent(user, field, n)
  if n > 0 then
    local log = (call('HGET', user, field) or '') .. struct.pack('>I6', NOW_MS)
    call('HSET', user, field, string.sub(log, -STAMP * n))
  end
end

-- When something falls due: at `at` (ms), or now where that has passed, or, where it is 0, so long
-- after now. Never early: the millisecond that has begun counts as none.
local function due_at(at, delay)
  if at > 0 then return math.max(at, NOW_MS) end
  return NOW_MS + delay + (delay > 0 and 1 or 0)
end

-- Has it fall due at `time` (ms), instead of when it did.
local function arm(note, time)
  if not due_first then due_before = lowest(DUE) end
  call('ZADD', DUE, time, note.id)
  call('HSET', LATER, note.id, #note.bot .. ':' .. note.bot .. event_of(note))
  due_first = math.min(due_first or time, time)
end

-- Tells the schedulers what was armed. The last thing that a script does.
local function armed()
  wake('due', due_before, due_first)
end

local function tally(note, outcome)
  local field = note.label .. '|' .. outcome
  if call('HINCRBY', DAY, field, 1) == 1 then call('EXPIRE', DAY, DAY_SECONDS) end
  if call('HINCRBY', HOUR, field, 1) == 1 then call('EXPIRE', HOUR, HOUR_SECONDS) end
end

-- Ends it. The record stays for a week, without what only a send needs; a dead one may be redriven.
local function finish(note, state, reason)
  call('ZREM', DUE, note.id)
  call('HDEL', LATER, note.id)
  if state ~= 'dead' then call('HDEL', note.key, 'body', 'recheck', 'method') end
  call('HSET', note.key, 'state', state, 'ended', NOW_MS, 'reason', reason)
  call('PEXPIRE', note.key, KEPT_MS)
  tally(note, state)
end

-- The sequence of an event that is queued now.
local function next_sequence()
  local sequence = math.max(tonumber(call('HGET', META, 'seq') or 0) + 1, NOW_US)
  call('HSET', META, 'seq', sequence)
  return sequence
end

-- Ends it among the dead letters; answers how many of the oldest had to go. Redriven, it begins
-- anew; no event that is queued already revives it, and the record outlives the letter.
local function give_up(note, reason, dead_max)
  local sequence = next_sequence()
  finish(note, 'dead', reason)
  call('HSET', note.key, 's', sequence - 1)
  call('PEXPIRE', note.key, KEPT_MS + 3600000)
  return bury(DLQ, dead_max, note.bot, record(sequence, event_of(note)), reason, note.attempts)
end
