#!lua flags=allow-oom
-- forget: the caller's key of a notification that has ended ends with its record.
--
-- KEYS  [1] n:<id>, [2] key:<bot> <key>
-- ARGV  id
-- Reply 1, or 0 if the key is free or of another notification, or this one has not ended
-- Cost  up to 4 commands
assert(#KEYS == 2 and #ARGV == 1, 'forget: wrong number of arguments')
local left = redis.call('PTTL', KEYS[1])
if left == -1 or redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
-- No TTL: the record is gone.
if left < 0 then
  return redis.call('DEL', KEYS[2])
end
return redis.call('PEXPIRE', KEYS[2], left, 'LT')
