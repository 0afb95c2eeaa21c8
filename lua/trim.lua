#!lua flags=allow-oom
-- trim: deletes entries of a bus stream that every reader has: older than the given offset, and
-- never one that a consumer group of the stream has not read and acknowledged.
--
-- KEYS  [1] the stream
-- ARGV  the lowest offset to keep
-- Reply number of deleted entries
-- Cost  3 commands + 1 a consumer group
assert(#KEYS == 1 and #ARGV == 1, 'trim: wrong number of arguments')
local STREAM, keep = KEYS[1], ARGV[1]
if redis.call('EXISTS', STREAM) == 0 then
  return 0
end
for _, group in ipairs(redis.call('XINFO', 'GROUPS', STREAM)) do
  local fields = {}
  for i = 1, #group, 2 do
    fields[group[i]] = group[i + 1]
  end
  local needed = fields['last-delivered-id']
  if fields.pending > 0 then
    needed = redis.call('XPENDING', STREAM, fields.name)[2]
  end
  if after(keep, needed) then
    keep = needed
  end
end
return redis.call('XTRIM', STREAM, 'MINID', keep)
