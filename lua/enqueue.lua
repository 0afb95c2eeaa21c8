#!lua
-- enqueue: copies a batch of one bus stream into the queues of a shard, exactly once.
--
-- The batch covers the offsets (prev, last] of the stream. It is taken only when the shard stands
-- at `prev`: a repeated batch changes nothing, and a shard that lost its tail says where it
-- stands, because lists and offset roll back together. A batch without bots moves an idle shard
-- forward.
--
-- KEYS  the eight of shared.lua, [9] hwm (hash: stream -> last offset copied), [10] dlq,
--       [11..] q:<bot> per bot
-- ARGV  stream, prev, last, slice µs, linger ms, max queue, overflow, max dead letters,
--       then per bot: id, count, events as MessagePack (at most 500 events a call)
-- Reply {'OK', offset, appended, dead, dropped, dead letters removed} | {'DUP', offset} | {'GAP', offset}
-- Cost  about 11 commands + 1 a bot (2 with max queue)
assert(#KEYS >= 10 and #ARGV >= 8 and counts(9, #KEYS - 10), 'enqueue: wrong number of arguments')

-- Whether stream offset a comes after b. They are (ms, seq) pairs of up to 64 bits each: compared
-- as texts, since a Lua number would lose digits.
local function after(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)%-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)%-(%d+)$')
  if #a_ms ~= #b_ms then return #a_ms > #b_ms end
  if a_ms ~= b_ms then return a_ms > b_ms end
  if #a_seq ~= #b_seq then return #a_seq > #b_seq end
  return a_seq > b_seq
end

local HWM, stream, prev, last = KEYS[9], ARGV[1], ARGV[2], ARGV[3]
local offset = call('HGET', HWM, stream) or '0-0'
if not after(last, offset) then
  return {'DUP', offset}
end
if offset ~= prev then
  return {'GAP', offset}
end
local appended, died, dropped, removed = 0, 0, 0, 0
if #ARGV > 8 then
  appended, died, dropped, removed = append(11, 9, {
    slice = tonumber(ARGV[4]), linger = tonumber(ARGV[5]), max = tonumber(ARGV[6]),
    overflow = ARGV[7], dead = KEYS[10], dead_max = tonumber(ARGV[8]),
  })
end
call('HSET', HWM, stream, last)
return {'OK', last, appended, died, dropped, removed}
