#!lua flags=no-writes
-- heads: how many events some queues of one shard hold, and the sequence of the first of each.
-- For lists of bots: the events themselves stay where they are.
--
-- KEYS  q:<bot> per bot, at most 500
-- ARGV  how many queues
-- Reply per queue: length, sequence (0 when it is empty)
-- Cost  2 commands a queue
assert(#ARGV == 1 and #KEYS == tonumber(ARGV[1]) and #KEYS <= 500, 'heads: wrong number of arguments')
local reply = {}
for _, queue in ipairs(KEYS) do
  local length, sequence = redis.call('LLEN', queue), 0
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
