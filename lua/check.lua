#!lua
-- check: writes a key that soon vanishes and reads it again: whether scripts may run at all.
--
-- KEYS  fl:{check-<number>}:<id>
-- ARGV  a text
-- Reply the text
-- Cost  2 commands
assert(#KEYS == 1 and #ARGV == 1, 'check: wrong number of arguments')
redis.call('SET', KEYS[1], ARGV[1], 'PX', 10000)
return redis.call('GET', KEYS[1])
