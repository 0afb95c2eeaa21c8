#!lua flags=allow-oom
-- act: adds an operator's action to the audit trail, which keeps the last ones. It is bounded, so it
-- may be written while Redis is full: that is when operators act.
--
-- KEYS  [1] audit or audit-often (stream: e, an action as JSON)
-- ARGV  action, how many are kept
-- Reply 1
-- Cost  1 command
assert(#KEYS == 1 and #ARGV == 2, 'act: wrong number of arguments')
redis.call('XADD', KEYS[1], 'MAXLEN', '=', ARGV[2], '*', 'e', ARGV[1])
return 1
