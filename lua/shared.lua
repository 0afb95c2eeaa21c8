-- Shared by every script: inserted between a script's first line and its body when it is loaded.
--
-- Every script declares the same eight keys of one pipeline and shard first:
--   KEYS[1] meta    hash       v virtual clock (µs), f last fence, seq last sequence, depth, run, paused,
--                           open (leases that were handed over)
--   KEYS[2] ctl     sorted set ready bots -> score (see join)
--   KEYS[3] busy    sorted set bots leased or parked -> deadline (ms since 1970)
--   KEYS[4] own     hash       bot -> fence|acked|start|confirmed of the current lease; confirmed is
--                           0, 1, or 2: handed over to a receiver
--   KEYS[5] att     hash       bot -> suspect|lost|failed|isolate since the last progress
--   KEYS[6] fin     sorted set bot -> last virtual finish (µs), only while ahead of the clock
--   KEYS[7] paused  set        bots that an operator paused
--   KEYS[8] wake    channel    'ready <score>', 'deadline <ms>' or 'due <ms>' whenever one becomes lower;
--                           'rules <bot>' when its rules change
--
-- Numbers: all values stay below 2^53. Numbers passed to redis.call keep all digits; numbers joined
-- into a text do not, hence digits().
local META, CTL, BUSY, OWN, ATT, FIN, PAUSED, WAKE =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local call = redis.call
local QUIET = 4503599627370496 -- 2^52: puts the quiet class before every busy score
local clock = call('TIME')
local NOW_US = clock[1] * 1000000 + clock[2]
local NOW_MS = math.floor(NOW_US / 1000)

local function digits(number)
  return string.format('%.0f', number)
end

-- A prefix of the server's run id that is long enough to distinguish runs.
local function short_run(run)
  return string.sub(run or '', 1, 8)
end

-- The lowest score of a sorted set as a number, or nil.
local function lowest(key)
  return tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end

-- Wakes every process after a score, deadline or due time became lower than they know.
local function wake(what, before, now)
  if now and (not before or now < before) then
    call('PUBLISH', WAKE, what .. ' ' .. digits(now))
  end
end

-- Puts bots that are neither busy nor paused into the control set; a bot that is already in it
-- keeps its position. A bot whose last finish is at most one slice ahead of the clock `v` joins the
-- quiet class, before every busy bot, and first come first served in real time over all shards. Any
-- other bot joins at its last finish, so that draining and returning gives no advantage.
local function join(bots, v, slice)
  if #bots == 0 then
    return
  end
  local before = lowest(CTL)
  local finishes = call('ZMSCORE', FIN, unpack(bots))
  local scores, first = {}, nil
  for i, bot in ipairs(bots) do
    local finish = tonumber(finishes[i] or 0)
    local score = finish
    if finish <= v + slice then
      score = NOW_US - QUIET + i
    end
    scores[#scores + 1] = score
    scores[#scores + 1] = bot
    if not first or score < first then
      first = score
    end
  end
  if call('ZADD', CTL, 'NX', unpack(scores)) < #bots then
    first = lowest(CTL)
  end
  wake('ready', before, first)
end

-- The bots among these that are in neither `busy` nor `paused`.
local function at_rest(bots)
  if #bots == 0 then
    return bots
  end
  local deadlines = call('ZMSCORE', BUSY, unpack(bots))
  local stopped = call('SMISMEMBER', PAUSED, unpack(bots))
  local rest = {}
  for i, bot in ipairs(bots) do
    if not deadlines[i] and stopped[i] == 0 then
      rest[#rest + 1] = bot
    end
  end
  return rest
end

-- A queue record: MessagePack [version 1, sequence, event].
local function record(sequence, event)
  return '\147\1\207' .. struct.pack('>I8', sequence) .. event
end

-- Moves an event to the dead letters; returns how many of the oldest were deleted for it.
local function bury(dead, max, bot, entry, reason, attempts)
  call('XADD', dead, '*', 'bot', bot, 'record', entry, 'reason', reason,
    'attempts', attempts, 'time', digits(NOW_MS))
  if call('XLEN', dead) > max then
    return call('XTRIM', dead, 'MAXLEN', max)
  end
  return 0
end

-- The four parts of an `own` or `att` field, as numbers.
local function parts(text)
  local a, b, c, d = string.match(text or '', '^(%d+)|(%d+)|(%d+)|(%d+)$')
  return tonumber(a), tonumber(b), tonumber(c), tonumber(d)
end

-- Ends the leases and parks of these bots without a completion, and counts no attempt. Their lead
-- over the clock `v` is kept, also for paused bots, so that they gain no turn.
local function revoke(bots, v)
  local finishes, handed = {}, 0
  for i, owner in ipairs(call('HMGET', OWN, unpack(bots))) do
    local _, _, start, confirmed = parts(owner)
    if confirmed == 2 then
      handed = handed + 1
    end
    if start and start > v then
      finishes[#finishes + 1] = start
      finishes[#finishes + 1] = bots[i]
    end
  end
  call('HDEL', OWN, unpack(bots))
  call('ZREM', BUSY, unpack(bots))
  if handed > 0 then
    call('HINCRBY', META, 'open', -handed)
  end
  if #finishes > 0 then
    call('ZADD', FIN, unpack(finishes))
  end
end

-- Removes a bot from the control set. Its position is kept, so that leaving and returning gives no
-- advantage.
local function withdraw(bot)
  local score = tonumber(call('ZSCORE', CTL, bot) or 0)
  if score > tonumber(call('HGET', META, 'v') or 0) then
    call('ZADD', FIN, score, bot)
  end
  call('ZREM', CTL, bot)
end

-- Whether ARGV[at..] is, `queues` times, a bot, a count and that many events.
local function counts(at, queues)
  for _ = 1, queues do
    at = at + 2 + (tonumber(ARGV[at + 1]) or #ARGV)
  end
  return at == #ARGV + 1
end

-- Appends events with fresh sequences to queues; bots that had none become ready.
-- ARGV[at..last]: per bot its id, a count and that many events; KEYS[first..]: their queues.
-- `limits`: max (events a bot, 0: no bound), overflow ('dead' or 'drop_new'), dead (key),
-- dead_max, linger (ms), slice (µs).
-- Returns the numbers of events appended, dead-lettered and dropped, and of old dead letters
-- deleted.
local function append(first, at, limits, last)
  local meta = call('HMGET', META, 'seq', 'v', 'depth')
  local sequence = math.max(tonumber(meta[1] or 0), NOW_US - 1)
  local appended, died, dropped, removed = 0, 0, 0, 0
  local fresh, key = {}, first
  while at <= (last or #ARGV) do
    local bot, count = ARGV[at], tonumber(ARGV[at + 1])
    local records = {}
    for i = 1, count do
      sequence = sequence + 1
      records[i] = record(sequence, ARGV[at + 1 + i])
    end
    local room = count
    if limits.max > 0 then
      room = math.min(count, math.max(0, limits.max - call('LLEN', KEYS[key])))
      for i = room + 1, count do
        if limits.overflow == 'dead' then
          removed = removed + bury(limits.dead, limits.dead_max, bot, records[i],
            'the queue of the bot is full (max_queue = ' .. digits(limits.max) .. ')', 0)
          died = died + 1
        else
          dropped = dropped + 1
        end
      end
    end
    if room > 0 then
      if call('RPUSH', KEYS[key], unpack(records, 1, room)) == room then
        fresh[#fresh + 1] = bot
      end
      appended = appended + room
    end
    at = at + 2 + count
    key = key + 1
  end
  call('HSET', META, 'seq', sequence, 'depth', tonumber(meta[3] or 0) + appended)
  fresh = at_rest(fresh)
  if limits.linger > 0 and #fresh > 0 then
    local before, until_ms = lowest(BUSY), NOW_MS + limits.linger
    local scores, deadlines = call('ZMSCORE', CTL, unpack(fresh)), {}
    for i, bot in ipairs(fresh) do
      if not scores[i] then -- a bot that the reaper put back with an empty queue keeps its position
        deadlines[#deadlines + 1] = until_ms
        deadlines[#deadlines + 1] = bot
      end
    end
    if #deadlines > 0 then
      call('ZADD', BUSY, unpack(deadlines))
      wake('deadline', before, until_ms)
    end
  else
    join(fresh, tonumber(meta[2] or 0), limits.slice)
  end
  return appended, died, dropped, removed, sequence
end
