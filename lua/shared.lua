-- Shared by every script: inserted between a script's first line and its body when it is loaded.
--
-- Every script declares the same eight keys of one pipeline and shard first:
--   KEYS[1] meta    hash       v virtual clock (µs), f last fence, seq last sequence, depth, run, paused,
--                           open (leases that were handed over), told (last published deadline
--                           of a lease that a copy took), lanes (bots with lanes that are set
--                           aside)
--   KEYS[2] ctl     sorted set ready bots -> score (see join)
--   KEYS[3] busy    sorted set bots leased or parked -> deadline (ms since 1970)
--   KEYS[4] own     hash       bot -> fence|acked|start|confirmed of the current lease; confirmed is
--                           0, 1, or 2: handed over to a receiver
--   KEYS[5] att     hash       bot -> suspect|lost|failed|isolate since the last progress; behind
--                           a further | the lanes of the bot that are set aside (see lanes_of)
--   KEYS[6] fin     sorted set bot -> last virtual finish (µs), only while ahead of the clock
--   KEYS[7] paused  set        bots that an operator paused
--   KEYS[8] held    hash       what bots hold: a letter and the bot -> a number. q: bytes queued (see FEW); l, L:
--                           delayed events, their bytes; d, D: dead letters, their bytes; n, N:
--                           pending notifications, their bytes; a: events in lanes that are
--                           set aside. No field: nothing
-- The channel `wake` of the shard gets 'ready <score>', 'deadline <ms>' or 'due <ms>' whenever one
-- becomes lower, and 'rules <bot>' when the rules of a bot change.
--
-- Numbers: all values stay below 2^53. Numbers passed to redis.call keep all digits; numbers joined
-- into a text do not, hence digits(). Redis also needs twice as long to format a number as digits()
-- does, so calls on hot paths pass text.
local META, CTL, BUSY, OWN, ATT, FIN, PAUSED, HELD =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local WAKE = string.sub(META or '', 1, -5) .. 'wake'
local call = redis.call
local QUIET = 4503599627370496 -- 2^52: puts the quiet class before every busy score

-- The time of the server in µs since 1970, the same in a whole call. Asked for only when needed.
local clock
local function now_us()
  if not clock then
    local time = call('TIME')
    clock = time[1] * 1000000 + time[2]
  end
  return clock
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

-- The digits of a whole number.
local function digits(number)
  return string.format('%d', number)
end

-- A prefix of the server's run id that is long enough to distinguish runs.
local function short_run(run)
  return string.sub(run or '', 1, 8)
end

-- The lowest score of a sorted set as a number, or nil.
local function lowest(key)
  return tonumber(call('ZRANGE', key, '0', '0', 'WITHSCORES')[2])
end

-- The scores of members. To ask whether the set exists costs less than to ask for many members of none.
local function scores_of(key, members)
  if #members > 8 and call('EXISTS', key) == 0 then
    return {}
  end
  return call('ZMSCORE', key, unpack(members))
end

-- Wakes every process after a score, deadline or due time became lower than they know.
local function wake(what, before, now)
  if now and (not before or now < before) then
    call('PUBLISH', WAKE, what .. ' ' .. digits(now))
  end
end

-- What bots hold. Each script collects its changes and stores them once, with settle(). An empty
-- queue holds nothing, so a wrong number (of an older version that did not count) ends with it.
-- A queue of less than FEW events, all smaller than LARGE bytes, holds so little that it is not
-- counted, unless its quota is small: counting costs as much as some events.
local FEW, LARGE = 32, 65536
local PAGE = 500 -- fields per command: unpack has a limit
local known, counted, changes, changed = {}, {}, {}, {}

-- Reads these fields, so that held() need not read each.
local function learn(fields)
  for first = 1, #fields, PAGE do
    local page = {unpack(fields, first, math.min(first + PAGE - 1, #fields))}
    for i, value in ipairs(call('HMGET', HELD, unpack(page))) do
      known[page[i]], counted[page[i]] = tonumber(value or 0), value ~= false
    end
  end
end

-- The number in a field, with the changes of this call.
local function held(field)
  if not known[field] then
    learn({field})
  end
  return math.max(0, known[field] + (changes[field] or 0))
end

-- Changes the number in a field.
local function hold(field, by)
  if not changes[field] then
    changes[field] = 0
    changed[#changed + 1] = field
  end
  changes[field] = changes[field] + by
end

-- Sets the number in a field to zero.
local function hold_nothing(field)
  known[field] = 0
  hold(field, -(changes[field] or 0))
end

-- Stores the changes.
local function settle()
  local unknown, set, gone = {}, {}, {}
  for _, field in ipairs(changed) do
    if not known[field] then
      unknown[#unknown + 1] = field
    end
  end
  learn(unknown)
  for _, field in ipairs(changed) do
    local now = known[field] + changes[field]
    if now > 0 then
      set[#set + 1] = field
      set[#set + 1] = digits(now)
    else
      gone[#gone + 1] = field
    end
  end
  for first = 1, #set, 2 * PAGE do
    call('HSET', HELD, unpack(set, first, math.min(first + 2 * PAGE - 1, #set)))
  end
  for first = 1, #gone, PAGE do
    call('HDEL', HELD, unpack(gone, first, math.min(first + PAGE - 1, #gone)))
  end
  known, counted, changes, changed = {}, {}, {}, {}
end

-- Whether the bytes of a queue are counted.
local function is_counted(field)
  if not known[field] then
    learn({field})
  end
  return counted[field]
end

-- Begins to count a queue with that many events. A long one is not read: an older version left it, and
-- the audit counts it.
local function begin_count(field, queue, length)
  if length > 0 and length < FEW + 500 then
    local bytes = 0
    for _, entry in ipairs(call('LRANGE', queue, 0, -1)) do
      bytes = bytes + #entry
    end
    hold(field, bytes - held(field))
  end
  counted[field] = true
end

-- Whether bots of the shard have lanes that are set aside. Scripts that append set it.
local any_lanes = false

-- Counts `bytes` that a queue got; it has `length` events now, and had `before`. `large`: one of the
-- new ones has LARGE bytes.
local function grew(field, queue, length, before, bytes, large)
  if is_counted(field) then
    -- What is counted of an empty queue is wrong, unless it is in lanes that are set aside.
    if before == 0 and not (any_lanes and held('a' .. string.sub(field, 2)) > 0) then
      hold_nothing(field)
    end
    hold(field, bytes)
  elseif large or length >= FEW then
    if before > 0 and length < FEW + 500 then
      begin_count(field, queue, length)
    else
      hold(field, bytes)
      counted[field] = true
    end
  end
end

-- A meter bounds what a bot adds that ends by itself: nobody counts when it ends. It is a string with a
-- TTL: the time (µs) at which the whole quota is free again. What takes a part of the quota moves this
-- time by the same part of how long it stays. So a bot adds at most its quota at once, and then as
-- much again in the time that one stays: it never holds more than twice its quota.
--
-- `most`: how far ahead (µs) that time can be. If it is further, the clock was set back since: the quota is used up
-- now, and becomes free as usual.
local function set_meter(meter, free)
  call('SET', meter, digits(free), 'PX', math.ceil((free - now_us()) / 1000))
end

local function free_at(meter, most)
  local free = math.max(tonumber(call('GET', meter) or 0), now_us())
  if free - now_us() > most then
    free = now_us() + most
    set_meter(meter, free)
  end
  return free
end

-- Idempotency keys. KEY_BYTES is what Redis needs for one besides its name.
local KEY_BYTES = 128

-- Whether a bot may add a key of that many bytes which stays for `ttl` ms: the refusal, or nil and what
-- charge() needs. `limit`: its quota of the bytes of keys; 0: none.
local function key_refusal(meter, bytes, limit, ttl)
  if limit == 0 then
    return nil
  end
  local window = ttl * 1000
  local free = free_at(meter, window)
  local after = free + math.ceil(window * bytes / limit)
  if after - now_us() > window then
    return {'QUOTA', 'key_bytes', math.floor((free - now_us()) / window * limit), limit}
  end
  return nil, after
end

-- Counts a key that key_refusal() let pass.
local function charge(meter, after)
  if after then
    set_meter(meter, after)
  end
end

-- Takes up to `want` tokens from a bucket (GCRA) that is full again at `at` (µs) and gets a token each
-- `interval` (µs, a fraction). A time too far ahead is lowered to an empty bucket: a raised rate applies
-- at once, and so does a clock that was set back. Returns the tokens, the new time, and the µs until
-- the next token.
local function take_tokens(at, want, interval, burst)
  local now = now_us()
  at = math.min(math.max(now, at), now + math.ceil(burst * interval))
  local granted = math.min(want, math.max(0, math.floor(burst - (at - now) / interval)))
  at = at + math.ceil(granted * interval)
  return granted, at, math.max(0, math.ceil(at - now - (burst - 1) * interval))
end

-- The quotas of a bot in the text 'queued bytes|dead letters|their bytes'; 0: none.
local function quota_of(text)
  local bytes, letters, letter_bytes = string.match(text, '^(%d+)|(%d+)|(%d+)$')
  return {bytes = tonumber(bytes), letters = tonumber(letters), letter_bytes = tonumber(letter_bytes)}
end

-- Puts bots that are neither busy nor paused into the control set; a bot that is already in it
-- keeps its position. A bot whose last finish is at most one slice ahead of the clock `v` joins the
-- quiet class, before every busy bot, and first come first served in real time over all shards. Any
-- other bot joins at its last finish, so that draining and returning gives no advantage. `still`: no bot
-- of the shard is ready or has a last finish. `before_them`: how many bots the same call put in before.
local function join(bots, v, slice, still, before_them)
  if #bots == 0 then
    return
  end
  local before = not still and lowest(CTL) or nil
  local finishes = still and {} or scores_of(FIN, bots)
  local scores, first = {}, nil
  for i, bot in ipairs(bots) do
    local finish = tonumber(finishes[i] or 0)
    local score = finish
    if finish <= v + slice then
      score = now_us() - QUIET + (before_them or 0) + i
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

-- The bots among these that are in neither `busy` nor `paused`. `none_paused`: no bot of the shard is paused.
local function at_rest(bots, none_paused)
  if #bots == 0 then
    return bots
  end
  local deadlines = scores_of(BUSY, bots)
  local stopped = {}
  if not none_paused and call('EXISTS', PAUSED) == 1 then
    stopped = call('SMISMEMBER', PAUSED, unpack(bots))
  end
  local rest = {}
  for i, bot in ipairs(bots) do
    if not deadlines[i] and stopped[i] ~= 1 then
      rest[#rest + 1] = bot
    end
  end
  return rest
end

-- A queue record: MessagePack [version 1, sequence, event]; HEAD bytes precede the event.
local HEAD = 11
local function record(sequence, event)
  return '\147\1\207' .. struct.pack('>I8', sequence) .. event
end

-- Redis looks for the place of an insertion from the head: the insertions of a call pass at most so many
-- records, which takes 3 ms.
local PASSED_MAX, passed = 100000, 0

-- Puts a record into a list, before the first one with a higher sequence. With `renews`, or if too many
-- records are before its place, it goes to the end, with a new sequence. Returns the new length.
local function put_in_order(list, entry, renews)
  -- Sequences are big-endian, so their bytes compare as the numbers do.
  local mine, before = string.sub(entry, 4, 11), nil
  -- The records before `low` are not above it, the one at `high` is. The step doubles, because most go to
  -- the head: what is not needed of a list, which may be large, is not read.
  local low, high, step = 0, nil, 1
  while not renews and low ~= high do
    local place = high and math.floor((low + high) / 2) or low + step - 1
    local head = call('LINDEX', list, place)
    if head and string.sub(head, 4, 11) <= mine then
      low, step = place + 1, 2 * step
    else
      before, high = head or before, place
    end
  end
  if before and passed + low <= PASSED_MAX then
    passed = passed + low
    return call('LINSERT', list, 'BEFORE', before, entry)
  end
  if before or renews then
    local sequence = math.max(tonumber(call('HGET', META, 'seq') or 0) + 1, now_us())
    call('HSET', META, 'seq', sequence)
    entry = record(sequence, string.sub(entry, HEAD + 1))
  end
  return call('RPUSH', list, entry)
end

-- The functions for dead letters. They are made on first use: most calls need none of them, and each
-- function that a call makes costs it time.
local made_for_letters
local function dead_letters()
  if not made_for_letters then
    -- The fields of a dead letter.
    local function fields_of(letter)
      local fields = {}
      for i = 1, #letter[2], 2 do
        fields[letter[2][i]] = letter[2][i + 1]
      end
      return fields
    end

    -- Notes that dead letters are gone.
    local function unbury(letters)
      for _, letter in ipairs(letters) do
        local fields = fields_of(letter)
        hold('d' .. fields.bot, -1)
        hold('D' .. fields.bot, -#fields.record - tonumber(fields.more or 0))
      end
    end

    -- The oldest letter of a full shard, until letters are deleted: it may be large, so it is read once.
    local oldest

    -- Whether a full shard keeps its oldest letter: its bot has fewer letters than another bot with one
    -- more. So bots with many letters displace none of a bot with few. 0 letters: an older version did
    -- not count them.
    local function keeps_oldest(dead, bot)
      oldest = oldest or call('XRANGE', dead, '-', '+', 'COUNT', 1)[1]
      local of = fields_of(oldest).bot
      local letters = held('d' .. of)
      return of ~= bot and letters > 0 and letters <= held('d' .. bot)
    end

    -- The number of letters before one of that many bytes; nil: the bot has as many as its quota permits (the
    -- first failures stay), or the shard is full and keeps_oldest().
    local function room(dead, max, bot, size, quota)
      if quota.letters > 0 and held('d' .. bot) >= quota.letters
        or quota.letter_bytes > 0 and held('D' .. bot) + size > quota.letter_bytes then
        return nil
      end
      local length = call('XLEN', dead)
      if length > 0 and length >= max and keeps_oldest(dead, bot) then
        return nil
      end
      return length
    end

    -- The bytes that a call has read of letters, to delete more than one for a new one.
    local DELETED_MAX, deleted = 4194304, 0

    -- Moves an event to the dead letters. Returns how many letters were deleted for it, the oldest of
    -- the shard, and 1 if it was deleted itself, because there is no room(). More than one are deleted
    -- if the maximum is lower than before: at most 64, until a script has read 4 MiB of them.
    -- `more` are bytes that are kept elsewhere for the letter; `length`: what room() returned, if it was
    -- asked before.
    local function bury(dead, max, bot, entry, reason, attempts, quota, more, length)
      local size = #entry + (more or 0)
      length = length or room(dead, max, bot, size, quota)
      if not length then
        return 1, 1
      end
      local fields = {
        'bot', bot, 'record', entry, 'reason', reason, 'attempts', attempts, 'time', digits(now_ms()),
      }
      if more then
        fields[#fields + 1], fields[#fields + 2] = 'more', more
      end
      call('XADD', dead, '*', unpack(fields))
      hold('d' .. bot, 1)
      hold('D' .. bot, size)
      length = length + 1
      local excess, gone = math.min(64, length - max), {}
      if excess <= 0 then
        return 0, 0
      end
      local letter = oldest or call('XRANGE', dead, '-', '+', 'COUNT', 1)[1]
      gone[1], oldest = letter, nil
      while #gone < excess and deleted < DELETED_MAX do
        letter = call('XRANGE', dead, '(' .. letter[1], '+', 'COUNT', 1)[1]
        deleted = deleted + #fields_of(letter).record
        gone[#gone + 1] = letter
      end
      unbury(gone)
      return call('XTRIM', dead, 'MAXLEN', length - #gone), 0
    end

    made_for_letters = {fields_of = fields_of, unbury = unbury, room = room, bury = bury}
  end
  return made_for_letters
end

-- The four parts of an `own` or `att` field, as numbers.
local function parts(text)
  local a, b, c, d = string.match(text or '', '^(%d+)|(%d+)|(%d+)|(%d+)')
  return tonumber(a), tonumber(b), tonumber(c), tonumber(d)
end

-- The lanes of a bot that are set aside, as the `att` field has them, or ''. A lane is set aside after
-- a failure: its events leave the queue for a list of its own, and the bot goes on with the others.
-- Only consumers read the text, and only the holder of the lease changes it, in complete.lua.
local function lanes_of(text)
  return string.match(text or '', '^%d+|%d+|%d+|%d+|(.+)$') or ''
end

-- Ends the parks of bots that wait for nothing but a lane that is set aside. `fresh` are bots whose
-- queues were empty until now: they have something to do again. A lease is not touched.
local function unpark(fresh)
  if #fresh == 0 then
    return
  end
  local waiting, parked = {}, {}
  for i, text in ipairs(call('HMGET', ATT, unpack(fresh))) do
    if lanes_of(text) ~= '' then
      waiting[#waiting + 1] = fresh[i]
    end
  end
  if #waiting == 0 then
    return
  end
  for i, owner in ipairs(call('HMGET', OWN, unpack(waiting))) do
    if not owner then
      parked[#parked + 1] = waiting[i]
    end
  end
  if #parked > 0 then
    call('ZREM', BUSY, unpack(parked))
  end
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

-- Whether ARGV[at..] is, `queues` times, a bot, its quotas, a count and that many events.
local function counts(at, queues)
  for _ = 1, queues do
    at = at + 3 + (tonumber(ARGV[at + 2]) or #ARGV)
  end
  return at == #ARGV + 1
end

-- Whether a bot may hold that many queued bytes; its queue is a key. A number without a queue is
-- wrong: another version emptied the queue.
local function may_queue(bot, queue, bytes, limit)
  local field = 'q' .. bot
  if limit == 0 then
    return true
  end
  if not is_counted(field) then
    if FEW * LARGE + bytes <= limit then
      return true
    end
    begin_count(field, queue, call('LLEN', queue))
  end
  if held(field) + bytes <= limit then
    return true
  end
  if held(field) > 0 and held('a' .. bot) == 0 and call('EXISTS', queue) == 0 then
    hold_nothing(field)
    return bytes <= limit
  end
  return false
end

-- The refusal of the events of the one bot at ARGV[at..], if they exceed its quota of queued bytes.
-- To be asked before anything is changed.
local function refusal(queue, at)
  local bot, bytes = ARGV[at], 0
  local limit = quota_of(ARGV[at + 1]).bytes
  for i = at + 3, at + 2 + tonumber(ARGV[at + 2]) do
    bytes = bytes + HEAD + #ARGV[i]
  end
  if not may_queue(bot, queue, bytes, limit) then
    local now = held('q' .. bot)
    settle() -- the next refusal need not count again
    return {'QUOTA', 'queued_bytes', now, limit}
  end
end

-- Leases quiet bots whose queues were empty to the copier itself, which has free workers: so their
-- events need no claim and no read. Bots of the quiet class that are ready already go first. All of
-- this is as if `join` and `claim` had run.
-- `fresh`: the bots; `begins`: of each, its place in the call, the sequence before its first event
-- and the number of its events; `meta`: v, f, told, paused, run; `take`: max, ttl (ms), seen (see
-- claim), weight (key), rare (whether bots of the shard have attempts or weights).
-- Returns the bots that are left, the new fields of META, and the leases for the reply.
local function lease_fresh(fresh, begins, meta, slice, take)
  local low = not take.still and lowest(CTL) or nil
  if #fresh == 0 or take.max == 0 or meta.paused or low and low < 0 then
    return fresh, {}, {}
  end
  local before, fence = tonumber(meta.v or 0), math.max(tonumber(meta.f or 0), now_us() - 1)
  local v, until_ms = math.max(before, take.seen), now_ms() + take.ttl
  local finishes, attempts, weights = take.still and {} or scores_of(FIN, fresh), {}, {}
  if take.rare then
    attempts = call('HMGET', ATT, unpack(fresh))
    weights = call('HMGET', take.weight, unpack(fresh))
  end
  -- A bot that a reaper put back with an empty queue is ready already.
  local scores = low and call('ZMSCORE', CTL, unpack(fresh)) or {}
  local left, leases, owners, busy = {}, {short_run(meta.run)}, {}, {}
  for i, bot in ipairs(fresh) do
    local finish = tonumber(finishes[i] or 0)
    if finish > v + slice or scores[i] or #busy >= 2 * take.max then
      left[#left + 1] = bot
    else
      local begin, start = begins[bot], math.max(v, finish)
      fence = fence + 1
      busy[#busy + 1] = until_ms
      busy[#busy + 1] = bot
      owners[#owners + 1] = bot
      owners[#owners + 1] = digits(fence) .. '|0|' .. digits(start) .. '|0'
      leases[#leases + 1] = begin[1]
      leases[#leases + 1] = begin[2]
      leases[#leases + 1] = begin[3]
      leases[#leases + 1] = fence
      leases[#leases + 1] = start
      leases[#leases + 1] = attempts[i] or ''
      leases[#leases + 1] = weights[i] or 1
    end
  end
  if #busy == 0 then
    return left, {}, {}
  end
  local behind = v > before and call('ZCOUNT', FIN, '-inf', v) or 0
  call('ZADD', BUSY, unpack(busy))
  call('HSET', OWN, unpack(owners))
  if behind > 0 then
    call('ZREMRANGEBYRANK', FIN, 0, math.min(behind, 1000) - 1) -- as claim does
  end
  -- Other processes look at the shard when the last published deadline passes. So one is enough.
  local fields, told = {'v', v, 'f', fence}, tonumber(meta.told or 0)
  if told < now_ms() or told > until_ms then
    wake('deadline', nil, until_ms)
    fields[#fields + 1], fields[#fields + 2] = 'told', until_ms
  end
  return left, fields, leases
end

-- Appends events with fresh sequences to queues; bots that had none become ready.
-- ARGV[at..last]: per bot its id, its quotas (see quota_of; '': those of `limits`), a count and that
-- many events; KEYS[first..]: their queues.
-- `limits`: max (events a bot, 0: no bound), overflow ('dead' or 'drop_new'; nil: neither max nor
-- the quota of queued bytes applies), dead (key), dead_max, linger (ms), slice (µs), quota, take (see
-- lease_fresh; nil: no leases), rooms (table that gets the number of accepted events of each bot).
-- Returns the numbers of events appended, dead-lettered and dropped, and of dead letters deleted,
-- the last sequence, how many events and letters exceeded a quota, and the leases for the reply.
-- Calls settle().
local function append(first, at, limits, last)
  local take = limits.take
  local meta
  if take then
    meta = call('HMGET', META, 'seq', 'v', 'depth', 'lanes', 'f', 'told', 'paused', 'run')
  else
    meta = call('HMGET', META, 'seq', 'v', 'depth', 'lanes')
  end
  any_lanes = tonumber(meta[4] or 0) > 0
  local sequence = math.max(tonumber(meta[1] or 0), now_us() - 1)
  local appended, died, dropped, removed, over, lost = 0, 0, 0, 0, 0, 0
  local fresh, begins, key = {}, {}, first
  last = last or #ARGV
  -- Few shards have one of these keys. With little to do, most shards have none of those of `still`.
  local still, rare = false, nil
  if take then
    still = call('EXISTS', CTL, FIN, HELD, PAUSED, ATT, take.weight) == 0
    rare = not still and call('EXISTS', HELD, PAUSED, ATT, take.weight) > 0
    take.still, take.rare = still, rare
  else
    rare = call('EXISTS', HELD, PAUSED) > 0
  end
  local any = rare and call('EXISTS', HELD) == 1
  if any then
    local unknown, from = {}, at
    while from <= last do
      local field = 'q' .. ARGV[from]
      if not known[field] then
        unknown[#unknown + 1] = field
      end
      from = from + 3 + tonumber(ARGV[from + 2])
    end
    learn(unknown)
  end
  while at <= last do
    local bot, own, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    local records, room, bytes, within, large, before, sure = {}, count, 0, count, false, sequence, not any
    for i = 1, count do
      sequence = sequence + 1
      records[i] = record(sequence, ARGV[at + 2 + i])
      large = large or #records[i] >= LARGE
    end
    if limits.overflow then
      local quota = own == '' and limits.quota or quota_of(own)
      local spare = quota
      if limits.max > 0 then
        local aside = any_lanes and held('a' .. bot) or 0
        room = math.min(count, math.max(0, limits.max - call('LLEN', KEYS[key]) - aside))
      end
      for i = 1, room do
        bytes = bytes + #records[i]
      end
      -- Without a count, few and small events fit.
      sure = not any and (quota.bytes == 0 or FEW * LARGE + bytes <= quota.bytes)
      if not sure and not any then
        known['q' .. bot], counted['q' .. bot] = 0, false
      end
      if room > 0 and not sure and not may_queue(bot, KEYS[key], bytes, quota.bytes) then
        local now = held('q' .. bot)
        while room > 0 and now + bytes > quota.bytes do
          bytes, room, within = bytes - #records[room], room - 1, room - 1
        end
      end
      -- Redriven events fill the queue further. They count as the letters that they were, or a bot could
      -- hold any number of bytes.
      local above = (any or known['q' .. bot]) and held('q' .. bot) - quota.bytes or 0
      if room < count and quota.bytes > 0 and quota.letter_bytes > 0 and above > 0 then
        spare = {letters = quota.letters, letter_bytes = math.max(1, quota.letter_bytes - above)}
      end
      over = over + count - within
      for i = room + 1, count do
        if limits.overflow == 'dead' then
          local reason = within < count
            and 'the quota of the bot is full (quotas.queued_bytes, now ' .. digits(quota.bytes) .. ')'
            or 'the queue of the bot is full (max_queue = ' .. digits(limits.max) .. ')'
          local gone, own_gone =
            dead_letters().bury(limits.dead, limits.dead_max, bot, records[i], reason, 0, spare)
          removed, lost, died = removed + gone, lost + own_gone, died + 1
        else
          dropped = dropped + 1
        end
      end
    else
      for i = 1, count do
        bytes = bytes + #records[i]
      end
    end
    if limits.rooms then
      limits.rooms[key - first + 1] = room
    end
    if room > 0 then
      local length = call('RPUSH', KEYS[key], unpack(records, 1, room))
      if length == room then
        fresh[#fresh + 1] = bot
        if take then
          begins[bot] = {key - first, before, room}
        end
      end
      if not sure or large or length >= FEW then
        local field = 'q' .. bot
        if sure then
          known[field], counted[field] = 0, false
        end
        grew(field, KEYS[key], length, length - room, bytes, large)
      end
      appended = appended + room
    end
    at = at + 3 + count
    key = key + 1
  end
  settle()
  if any_lanes then
    unpark(fresh)
  end
  fresh = at_rest(fresh, not rare)
  local fresh_meta, leases = {}, {}
  if take and limits.linger == 0 then
    fresh, fresh_meta, leases = lease_fresh(fresh, begins,
      {v = meta[2], f = meta[5], told = meta[6], paused = meta[7], run = meta[8]}, limits.slice, take)
  end
  call('HSET', META, 'seq', sequence, 'depth', tonumber(meta[3] or 0) + appended, unpack(fresh_meta))
  if limits.linger > 0 and #fresh > 0 then
    local before, until_ms = lowest(BUSY), now_ms() + limits.linger
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
    join(fresh, fresh_meta[2] or tonumber(meta[2] or 0), limits.slice, still)
  end
  return appended, died, dropped, removed, sequence, over, lost, leases
end
