#!lua flags=allow-oom
-- advance: moves a shard behind a batch of a bus stream that contains nothing for it. Otherwise the
-- shard would keep the stream from being trimmed. The chain of offsets is that of enqueue. Also
-- runs on a full Redis: the new offset replaces the old one, and trimming frees memory.
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
