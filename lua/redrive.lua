#!lua
-- redrive: moves one dead letter back into its bot's queue, in order: before the first event with a
-- higher sequence; or at the end with a new sequence, if its handler skips events up to the last
-- sequence, or if more than 100,000 events would be before it. Revokes a running lease, because its holder counted from another head.
--
-- The letter of a notification is moved only while the notification has a record, which then stays until
-- the event is handled: its pipeline may be paused for long. The key of the record cannot be declared,
-- because only the letter names it. It carries the tag of the shard.
--
-- KEYS  the eight of shared.lua, [9] dlq, [10] q:<bot>
-- ARGV  id of the dead letter, bot, slice µs, renew (1 or 0)
-- Reply 1, or 0 if this bot has no such dead letter that can be handled again
-- Cost  about 18 commands, twice log2 of the events that were redriven before more, 2 more for a notification
assert(#KEYS == 10 and #ARGV == 4, 'redrive: wrong number of arguments')
local DLQ, QUEUE, id, bot = KEYS[9], KEYS[10], ARGV[1], ARGV[2]
local letter = call('XRANGE', DLQ, id, id)[1]
if not letter then
  return 0
end
local fields = dead_letters().fields_of(letter)
if fields.bot ~= bot then
  return 0
end
if fields.more then
  local event = cmsgpack.unpack(string.sub(fields.record, HEAD + 1))
  local note = string.sub(META, 1, -5) .. 'n:' .. event[1]
  if call('EXISTS', note) == 0 then
    return 0
  end
  call('PERSIST', note)
end
local length = put_in_order(QUEUE, fields.record, ARGV[4] == '1')
call('XDEL', DLQ, id)
dead_letters().unbury({letter})
local meta = call('HMGET', META, 'v', 'lanes')
local v = tonumber(meta[1] or 0)
any_lanes = tonumber(meta[2] or 0) > 0
local lanes = any_lanes and lanes_of(call('HGET', ATT, bot)) or ''
grew('q' .. bot, QUEUE, length, length - 1, #fields.record, #fields.record >= LARGE)
settle()
if lanes == '' then
  call('HDEL', ATT, bot)
else
  -- The queue goes first: the event may belong before those of a lane that is due.
  lanes = string.gsub(lanes, '^(%x+);[^;]*;', '%1;q;')
  call('HSET', ATT, bot, '0|0|0|0|' .. lanes)
  if length == 1 then
    unpark({bot})
  end
end
call('HINCRBY', META, 'depth', 1)
if call('HEXISTS', OWN, bot) == 1 then
  revoke({bot}, v)
end
join(at_rest({bot}), v, tonumber(ARGV[3]))
return 1
