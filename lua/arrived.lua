#!lua flags=no-writes
-- arrived: how many events of a queue have a sequence up to each of some bounds. The sequences of a queue
-- mostly grow, so the bounds are searched for, all of them side by side: each step halves the places where
-- they may be. A search reads whole records, which may be large: none twice, and no more of them once
-- enough bytes were read. Then the middle of those places is the answer.
--
-- KEYS  q:<bot>
-- ARGV  [1] number of bounds; [2] most bytes of records, of which the last one may exceed them; [3..] the bounds
-- Reply per bound: the number of events
-- Cost  1 command + up to log2(length) a bound
assert(#KEYS == 1 and #ARGV == tonumber(ARGV[1]) + 2, 'arrived: wrong number of arguments')
local QUEUE, most = KEYS[1], tonumber(ARGV[2])
local length, read, sequences = redis.call('LLEN', QUEUE), 0, {}

-- nil: it is not read any more.
local function sequence_at(index)
  if not sequences[index] and read < most then
    local record = redis.call('LINDEX', QUEUE, index)
    read = read + #record
    sequences[index] = #record >= 11 and struct.unpack('>I8', record, 4) or 0
  end
  return sequences[index]
end

local low, high = {}, {}
for i = 3, #ARGV do
  low[i], high[i] = 0, length
end
local searches = true
while searches do
  searches = false
  for i = 3, #ARGV do
    local middle = math.floor((low[i] + high[i]) / 2)
    local sequence = low[i] < high[i] and sequence_at(middle)
    if sequence then
      searches = true
      if sequence <= tonumber(ARGV[i]) then
        low[i] = middle + 1
      else
        high[i] = middle
      end
    end
  end
end

local reply = {}
for i = 3, #ARGV do
  reply[#reply + 1] = math.floor((low[i] + high[i]) / 2)
end
return reply
