#!lua flags=no-writes
-- heads: the length of some queues of one shard, and the sequence of the first event of each. For
-- lists of bots and ages: it does not send the events. A key that is not a list counts as empty.
--
-- KEYS  q:<bot> per bot, at most 500
-- ARGV  number of queues
-- Reply per queue: length, sequence (0 if it is empty)
-- Cost  2 commands a queue
assert(#ARGV == 1 and #KEYS == tonumber(ARGV[1]) and #KEYS <= 500, 'heads: wrong number of arguments')
local reply = {}
for _, queue in ipairs(KEYS) do
  local length, sequence = redis.pcall('LLEN', queue), 0
  if type(length) ~= 'number' then
    length = 0
  end
  if length > 0 then
    local head = redis.call('LINDEX', queue, 0)
    if #head >= 11 then
      sequence = struct.unpack('>I8', head, 4)
    end
  end
  reply[#reply + 1] = length
  reply[#reply + 1] = sequence
end
return reply
