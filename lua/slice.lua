#!lua flags=no-writes
-- slice: the first events of a queue that may hold large ones, bounded in number and bytes. Claimers
-- use it where one slice of LRANGE might take too much memory.
--
-- KEYS  q:<bot>
-- ARGV  [1] most events; [2] most bytes, but at least one event
-- Reply the records
-- Cost  1 command per 16 events
assert(#KEYS == 1 and #ARGV == 2, 'slice: wrong number of arguments')
local most, bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local reply, read, portion = {}, 0, 16
while #reply < most do
  local first = #reply
  local last = math.min(most, first + portion) - 1
  local records = redis.call('LRANGE', KEYS[1], first, last)
  for _, record in ipairs(records) do
    read = read + #record
    if read > bytes and #reply > 0 then
      return reply
    end
    reply[#reply + 1] = record
  end
  if #records < portion then
    break
  end
end
return reply
