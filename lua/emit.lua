#!lua
-- emit: publishes events of rules to the bus, each once, regardless of retries of a slice.
--
-- KEYS  [1] the stream, [2..] fl:{<stream>}:seen:<id> per event
-- ARGV  how long the ids are remembered (ms), then the events as JSON
-- Reply {how many were published now, the offset of the last of them or ''}
-- Cost  1 to 3 commands an event
assert(#KEYS >= 2 and #ARGV == #KEYS, 'emit: wrong number of arguments')
local added, last = 0, ''
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    last = redis.call('XADD', KEYS[1], '*', 'event', ARGV[i])
    redis.call('SET', KEYS[i], '', 'PX', ARGV[1])
    added = added + 1
  end
end
return {added, last}
