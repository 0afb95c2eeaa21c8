#!lua flags=allow-oom
-- budget: gives a process its part of what a pipeline may do over all processes and shards: slices
-- under way at once, and tokens for events. One shard of the pipeline keeps both.
--
-- Slices: the process names how many it wants to hold from now on, so a repeated call changes nothing.
-- It gets what the others leave, and holds it for `ttl`, unless it renews. After that it must not have
-- a slice under way.
-- Tokens: those of one bucket. Tokens that the process did not use return if nobody took any since:
-- otherwise they are lost, because the bucket may have been full meanwhile.
--
-- Also runs on a full Redis, which must empty.
--
-- KEYS  [1] slots (hash: process -> slices|until ms), [2] tokens (string: when the bucket is full, µs)
-- ARGV  process, slices wanted, maximum of slices (0: no limit), ttl ms, tokens wanted, time per
--       token (µs, a fraction), burst, tokens to return, the stamp of their grant
-- Reply {slices held, tokens granted, ms until the next token or 0, stamp of this grant}
-- Cost  up to 8 commands + 1 a process that vanished
assert(#KEYS == 2 and #ARGV == 9, 'budget: wrong number of arguments')
local SLOTS, TOKENS, process = KEYS[1], KEYS[2], ARGV[1]
local slices, most, ttl = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local want, interval, burst = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local held, granted, wait, at = 0, 0, 0, 0
if most > 0 then
  local others, all = 0, call('HGETALL', SLOTS)
  for i = 1, #all, 2 do
    local count, until_ms = string.match(all[i + 1], '^(%d+)|(%d+)$')
    if all[i] ~= process then
      if tonumber(until_ms) <= now_ms() then
        call('HDEL', SLOTS, all[i])
      else
        others = others + tonumber(count)
      end
    end
  end
  held = math.max(0, math.min(slices, most - others))
  if held > 0 then
    call('HSET', SLOTS, process, digits(held) .. '|' .. digits(now_ms() + ttl))
    call('PEXPIRE', SLOTS, 2 * ttl)
  else
    call('HDEL', SLOTS, process)
  end
end
if interval > 0 then
  at = tonumber(call('GET', TOKENS) or 0)
  local before, unused = at, tonumber(ARGV[8])
  if unused > 0 and digits(at) == ARGV[9] then
    at = at - math.floor(unused * interval)
  end
  granted, at, wait = take_tokens(at, want, interval, burst)
  if at ~= before then
    call('SET', TOKENS, digits(at), 'PX', math.ceil((at - now_us()) / 1000) + 1000)
  end
end
return {held, granted, math.ceil(wait / 1000), at}
