#!lua flags=no-writes
-- letters: dead letters of a shard, a portion per call, without their records or with the start of
-- each.
--
-- KEYS  the dead letters
-- ARGV  [1] 'newest' or 'oldest' first; [2] from; [3] until; [4] most letters; [5] most bytes that are
--       read, but at least one letter; [6] bytes per record, -1 for all
-- Reply 1 if there may be more; per letter: id, bytes of the record, bot, reason, attempts, time,
--       start of the record
-- Cost  1 command a letter
assert(#KEYS == 1 and #ARGV == 6, 'letters: wrong number of arguments')
local DEAD, order, from, last = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local most, bytes, cut = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
assert(order == 'newest' or order == 'oldest', 'letters: unknown order')
local command = order == 'newest' and 'XREVRANGE' or 'XRANGE'

local reply, found, read = { 1 }, 0, 0
while found < most and read < bytes do
  local entry = redis.call(command, DEAD, from, last, 'COUNT', 1)[1]
  if not entry then
    reply[1] = 0
    break
  end
  local fields = {}
  for i = 1, #entry[2], 2 do
    fields[entry[2][i]] = entry[2][i + 1]
  end
  local record = fields.record or ''
  found, read, from = found + 1, read + #record, '(' .. entry[1]
  if cut >= 0 then
    record = string.sub(record, 1, cut)
  end
  for _, value in ipairs({ entry[1], fields.record and #fields.record or 0, fields.bot or '',
    fields.reason or '', fields.attempts or '0', fields.time or '0', record }) do
    reply[#reply + 1] = value
  end
end
return reply
