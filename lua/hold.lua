#!lua flags=allow-oom
-- hold: takes, renews or releases a lock with a time to live.
--
-- KEYS  [1] the lock
-- ARGV  token of the caller, ttl ms (0: release)
-- Reply 1 if the caller holds the lock (or released it), otherwise 0
-- Cost  2 commands
assert(#KEYS == 1 and #ARGV == 2, 'hold: wrong number of arguments')
local holder, ttl = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
if holder and holder ~= ARGV[1] then
  return 0
end
if ttl > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ttl)
else
  redis.call('DEL', KEYS[1])
end
return 1
