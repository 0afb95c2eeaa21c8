#!lua flags=allow-oom
-- permit: takes tokens for the events of a slice from the bucket of a bot, before its handler starts.
--
-- The bucket is the time (µs) at which it is full again (GCRA). The caller holds the lease of the bot,
-- and hands out at most the granted number of events. Or its lease has just ended, and it takes none: the
-- call only shows whether events wait. A call whose reply is lost costs its tokens: no
-- bot ever gets more than its bucket allows.
--
-- With ordering keys, handlers of a slice may start long after its tokens were granted, and the bucket is
-- full again by then. What the caller still holds counts as taken now, before such a handler starts.
--
-- A bucket is forgotten GRACE after it is full. A bot is `slow` while events of it wait for tokens.
-- Both keys end by themselves.
--
-- Also runs on a full Redis, which must empty: it adds at most one entry per bot with events.
--
-- KEYS  [1] rate (sorted set: bot -> when its bucket is full, µs), [2] slow (sorted set: bot -> since
--       when its events wait for tokens, ms), [3] q:<bot>
-- ARGV  bot, events that the slice has, time per token (µs, a fraction), burst, tokens of earlier calls that
--       the caller still holds
-- Reply {tokens granted, ms until the next one, 0: now}
-- Cost  about 8 commands
assert(#KEYS == 3 and #ARGV == 5, 'permit: wrong number of arguments')
local GRACE = 10000000 -- µs
local RATE, SLOW, bot = KEYS[1], KEYS[2], ARGV[1]
local want, interval, burst, held = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_us()
local full = call('ZRANGEBYSCORE', RATE, '-inf', now - GRACE, 'LIMIT', 0, 64)
if #full > 0 then
  call('ZREM', RATE, unpack(full))
  call('ZREM', SLOW, unpack(full))
end
local before = math.max(tonumber(call('ZSCORE', RATE, bot) or 0), now + math.ceil(held * interval))
local granted, at, wait = take_tokens(before, want, interval, burst)
call('ZADD', RATE, at, bot)
if held == 0 then
  if wait > 0 and call('LLEN', KEYS[3]) > granted then
    call('ZADD', SLOW, 'NX', now_ms(), bot)
  else
    call('ZREM', SLOW, bot)
  end
end
local last = tonumber(call('ZRANGE', RATE, -1, -1, 'WITHSCORES')[2])
local ttl = math.ceil((last - now + GRACE) / 1000)
call('PEXPIRE', RATE, ttl)
call('PEXPIRE', SLOW, ttl)
return {granted, math.ceil(wait / 1000)}
