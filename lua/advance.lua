#!lua flags=allow-oom
-- advance: moves a shard for which a batch of a bus stream holds nothing behind that batch, so that
-- it does not keep the stream from being trimmed. The chain of offsets is that of enqueue. Runs on
-- a full Redis too: the new offset takes the place of the old one, and trimming makes room.
--
-- KEYS  [1] hwm (hash: stream -> last offset copied)
-- ARGV  stream, prev, last
-- Reply {'OK', offset} | {'DUP', offset} | {'GAP', offset}
-- Cost  2 commands
assert(#KEYS == 1 and #ARGV == 3, 'advance: wrong number of arguments')
local HWM, stream, prev, last = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local offset = redis.call('HGET', HWM, stream) or '0-0'
if not after(last, offset) then
  return {'DUP', offset}
end
if offset ~= prev then
  return {'GAP', offset}
end
redis.call('HSET', HWM, stream, last)
return {'OK', last}
