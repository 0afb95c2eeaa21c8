#!lua flags=no-writes
-- heads: the length of some queues of one shard, and the sequence of the first event of each. For
-- lists of bots and ages: it does not send the events, but it reads them, and they may be large. A key
-- that is not a list counts as empty.
--
-- KEYS  q:<bot>, or a:<lane>:<bot> for a lane that is set aside, at most 500
-- ARGV  [1] number of queues; [2] most bytes of events, of which the last one may exceed them; 0: no event is
--       read, and every sequence is 0
-- Reply per queue, the first ones that fit: length, sequence (0 if it is empty)
-- Cost  2 commands a queue, 1 if no event is read
assert(#ARGV == 2 and #KEYS == tonumber(ARGV[1]) and #KEYS <= 500, 'heads: wrong number of arguments')
local most, read, reply = tonumber(ARGV[2]), 0, {}
for _, queue in ipairs(KEYS) do
  if read > most then
    break
  end
  local length, sequence = redis.pcall('LLEN', queue), 0
  if type(length) ~= 'number' then
    length = 0
  end
  if length > 0 and most > 0 then
    local head = redis.call('LINDEX', queue, 0)
    read = read + #head
    if #head >= 11 then
      sequence = struct.unpack('>I8', head, 4)
    end
  end
  reply[#reply + 1] = length
  reply[#reply + 1] = sequence
end
return reply
