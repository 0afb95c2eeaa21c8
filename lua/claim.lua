#!lua flags=allow-oom
-- claim: leases up to `max` bots with a score of at most `bound`, lowest scores first.
--
-- First it reaps: at most 64 bots whose lease or park has expired become ready again. An expired
-- lease counts in `att`: as `lost` if its holder had confirmed it, otherwise only as `suspect`,
-- because the holder may never have got it (a lost reply). No other script reaps. The bound makes
-- one clock of all shards: a claim that would find lower scores elsewhere is refused here, and
-- returns the true lowest score.
--
-- KEYS  the eight of shared.lua, [9] weight (hash: bots with a weight, rate or burst of their own; see set)
-- ARGV  max, bound, ttl ms, seen (highest clock the claimer saw on any shard), slice µs,
--       alone (1: the claimer knows of nothing ready or busy on any other shard), isolate (how many
--       events are handled until slices are as large as usual, after a receiver that held a lease did not end
--       it; twice as many after a process vanished)
-- Reply {clock, lowest score left or '' (a paused shard offers none), next deadline or '', now µs,
--       ready bots left, leases reaped, run id of the server (shortened), then per bot: id, fence, start,
--       att or '', what is set for it or 1, queued bytes or 0 if they are not counted}
-- Cost  7 commands if nobody is ready, otherwise 13 to 17 for any max; when reaping about 11 more + 1 an
--       expired lease
assert(#KEYS == 9 and #ARGV == 7, 'claim: wrong number of arguments')
local max, bound, ttl, seen, slice, alone, isolate = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]),
  tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1', tonumber(ARGV[7])
local meta = call('HMGET', META, 'v', 'f', 'paused', 'run')
local v, fence = math.max(tonumber(meta[1] or 0), seen), tonumber(meta[2] or 0)
local vanished = 0

local expired = call('ZRANGEBYSCORE', BUSY, '-inf', now_ms(), 'LIMIT', 0, 64)
if #expired > 0 then
  local owners = call('HMGET', OWN, unpack(expired))
  local attempts = call('HMGET', ATT, unpack(expired))
  for i, bot in ipairs(expired) do
    local _, _, _, confirmed = parts(owners[i])
    if confirmed then
      vanished = vanished + 1
      local suspect, lost, failed = parts(attempts[i] or '0|0|0|0')
      if confirmed > 0 then lost = lost + 1 else suspect = suspect + 1 end
      local lanes = lanes_of(attempts[i])
      -- A receiver that holds the lease ends no process.
      local small = confirmed == 2 and isolate or 2 * isolate
      call('HSET', ATT, bot, suspect .. '|' .. lost .. '|' .. failed .. '|' .. small
        .. (lanes == '' and '' or '|' .. lanes))
    end
  end
  revoke(expired, v)
  join(at_rest(expired), v, slice)
end

local reply = {0, '', '', now_us(), 0, vanished, short_run(meta[4])}
local taken, bots, leases, owners = {}, {}, {}, {}
if max > 0 and not meta[3] then
  taken = call('ZRANGE', CTL, '-inf', bound, 'BYSCORE', 'LIMIT', 0, max, 'WITHSCORES')
end
if #taken > 0 then
  local queues = {}
  for i = 1, #taken, 2 do
    bots[#bots + 1] = taken[i]
    queues[#queues + 1] = 'q' .. taken[i]
  end
  -- Only quiet bots, the first ones, need their finishes. Few shards have attempts, weights or long
  -- queues.
  local finishes, attempts, weights = {}, {}, {}
  if tonumber(taken[2]) < 0 then
    finishes = call('ZMSCORE', FIN, unpack(bots))
  end
  local rare = call('EXISTS', ATT, KEYS[9], HELD) > 0
  if rare then
    attempts = call('HMGET', ATT, unpack(bots))
    weights = call('HMGET', KEYS[9], unpack(bots))
    learn(queues)
  end
  local clock_before, lowest_start = v, nil
  local until_ms, known_start, start_text = digits(now_ms() + ttl), nil, nil
  fence = math.max(fence, now_us() - 1)
  for i, bot in ipairs(bots) do
    local score, start = tonumber(taken[2 * i]), nil
    if score < 0 then
      start = math.max(clock_before, tonumber(finishes[i] or 0))
    elseif score < clock_before - 50000 then
      start = clock_before -- the shard slept, or the clock was rolled back
    else
      start = score
    end
    if score >= 0 and not lowest_start then
      lowest_start = start
    end
    fence = fence + 1
    leases[2 * i - 1] = until_ms
    leases[2 * i] = bot
    if start ~= known_start then
      known_start, start_text = start, digits(start)
    end
    owners[2 * i - 1] = bot
    owners[2 * i] = digits(fence) .. '|0|' .. start_text .. '|0'
    reply[#reply + 1] = bot
    reply[#reply + 1] = fence
    reply[#reply + 1] = start
    reply[#reply + 1] = attempts[i] or ''
    reply[#reply + 1] = weights[i] or 1
    reply[#reply + 1] = rare and held(queues[i]) or 0
  end
  v = math.max(v, lowest_start or 0)
end

-- Read before anything is written: a key of another type must not end the script halfway.
local behind = call('ZCOUNT', FIN, '-inf', v)
if #taken > 0 then
  call('ZREMRANGEBYRANK', CTL, 0, #bots - 1) -- those are the lowest scores
  call('ZADD', BUSY, unpack(leases))
  call('HSET', OWN, unpack(owners))
end
if #taken > 0 or v > tonumber(meta[1] or 0) then
  call('HSET', META, 'v', v, 'f', fence)
end

-- A finish behind the clock has no meaning any more. If no bot is ready or busy anywhere, the clock
-- stands still, and all finishes are removed instead.
local ready = call('ZCARD', CTL)
local deadline = lowest(BUSY)
if alone and ready == 0 and not deadline then
  call('UNLINK', FIN)
else
  if behind > 0 then
    call('ZREMRANGEBYRANK', FIN, 0, math.min(behind, 1000) - 1)
  end
end
reply[1] = v
if not meta[3] and ready > 0 then
  reply[2] = call('ZRANGE', CTL, 0, 0, 'WITHSCORES')[2] or ''
end
reply[3] = deadline or ''
reply[5] = ready
return reply
