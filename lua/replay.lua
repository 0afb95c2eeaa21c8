#!lua
-- replay: appends events of the bus to the queue of one bot again, each at most once per replay.
--
-- The position of the bot in the replay is stored with the events. So a repeated call puts nothing
-- twice, and a Redis that lost its last writes lost both. What does not fit is refused, never dropped.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10] replay:<id> (hash: stream and bot -> the offset of
--       the last event that was put)
-- ARGV  slice µs, linger ms, max queue, how long the positions are kept, ms, the field of the bot, the
--       number of events, their offsets in order, then bot, its quotas (see quota_of), the same number
--       again, the events as MessagePack
-- Reply {events put earlier, events put now, '', or the limit that refuses the others: 'max_queue' or
--       'queued_bytes'}
-- Cost  about 10 to 15 commands, however many events
assert(#KEYS == 10 and #ARGV >= 11, 'replay: wrong number of arguments')
local POSITION, field, count = KEYS[10], ARGV[5], tonumber(ARGV[6])
local at = 7 + count
assert(counts(at, 1) and tonumber(ARGV[at + 2]) == count, 'replay: wrong number of arguments')
local bot, earlier, room, why = ARGV[at], 0, count, ''
local stands = call('HGET', POSITION, field)
while stands and earlier < count and not after(ARGV[7 + earlier], stands) do
  earlier = earlier + 1
end
room = count - earlier
if room == 0 then
  return {earlier, 0, ''}
end
local max = tonumber(ARGV[3])
if max > 0 then
  local aside = tonumber(call('HGET', META, 'lanes') or 0) > 0 and held('a' .. bot) or 0
  local free = math.max(0, max - call('LLEN', KEYS[9]) - aside)
  if free < room then
    room, why = free, 'max_queue'
  end
end
local bytes, limit = 0, quota_of(ARGV[at + 1]).bytes
for i = 1, room do
  bytes = bytes + HEAD + #ARGV[at + 2 + earlier + i]
end
if room > 0 and not may_queue(bot, KEYS[9], bytes, limit) then
  local now = held('q' .. bot)
  while room > 0 and now + bytes > limit do
    bytes, room = bytes - HEAD - #ARGV[at + 2 + earlier + room], room - 1
  end
  why = 'queued_bytes'
end
if room == 0 then
  settle() -- the next refusal need not count again
  return {earlier, 0, why}
end
for i = 1, room do
  ARGV[at + 2 + i] = ARGV[at + 2 + earlier + i]
end
ARGV[at + 2] = room
-- Everything fits: nothing is dropped.
append(9, at, {
  slice = tonumber(ARGV[1]), linger = tonumber(ARGV[2]), max = 0, overflow = 'drop_new',
}, at + 2 + room)
call('HSET', POSITION, field, ARGV[6 + earlier + room])
call('PEXPIRE', POSITION, ARGV[4])
return {earlier, room, why}
