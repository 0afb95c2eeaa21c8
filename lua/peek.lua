#!lua flags=no-writes
-- peek: the next events of a bot, a portion per call. A reader names the place where the last portion
-- ended and the sequence of its last event. If the queue has moved since, events are found again by
-- their sequence, which mostly grows.
--
-- KEYS  q:<bot>, or a:<lane>:<bot> for a lane that is set aside
-- ARGV  [1] place of the first event wanted, from 0; [2] sequence of the event before it, 0 for none;
--       [3] most events; [4] most bytes, but at least one event; [5] bytes per record, -1 for all
-- Reply place behind the last one, 0 if that is the end; records
-- Cost  1 command + 1 an event; log2(length) more if the queue has moved
assert(#KEYS == 1 and #ARGV == 5, 'peek: wrong number of arguments')
local QUEUE, place, before = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local most, bytes, cut = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local length = redis.call('LLEN', QUEUE)

local function sequence_at(index)
  local record = redis.call('LINDEX', QUEUE, index)
  return record and #record >= 11 and struct.unpack('>I8', record, 4) or 0
end

if place > 0 and (place > length or sequence_at(place - 1) ~= before) then
  local low, high = 0, length
  while low < high do
    local middle = math.floor((low + high) / 2)
    if sequence_at(middle) <= before then
      low = middle + 1
    else
      high = middle
    end
  end
  place = low
end

local reply, read = { 0 }, 0
while place < length and #reply <= most do
  local record = redis.call('LINDEX', QUEUE, place)
  read = read + #record
  if #reply > 1 and read > bytes then
    break
  end
  if cut >= 0 then
    record = string.sub(record, 1, cut)
  end
  reply[#reply + 1] = record
  place = place + 1
end
reply[1] = place < length and place or 0
return reply
