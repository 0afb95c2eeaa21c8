#!lua
-- check: writes a key with a short time to live and reads it again, to test whether scripts may
-- run.
--
-- KEYS  fl:{check-<number>}:<id>
-- ARGV  a text
-- Reply the text
-- Cost  2 commands
assert(#KEYS == 1 and #ARGV == 1, 'check: wrong number of arguments')
redis.call('SET', KEYS[1], ARGV[1], 'PX', 10000)
return redis.call('GET', KEYS[1])
