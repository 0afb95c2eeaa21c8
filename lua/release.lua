#!lua flags=allow-oom
-- release: a user is online. The notification that has waited longest for the user becomes due now,
-- unless another one was released less than the threshold before.
--
-- Also runs on a full Redis: notifications.lua explains why it cannot fill it further.
--
-- KEYS  the thirteen of notifications.lua, [14] online:<bot> <uid>, [15] user:<bot> <uid>
-- ARGV  bot, uid, threshold ms
-- Reply 1, or 0 if no due one waits, or it is too soon
-- Cost  up to 11 commands
assert(#KEYS == 15 and #ARGV == 3, 'release: wrong number of arguments')
local threshold = tonumber(ARGV[3])
local last = past(tonumber(call('HGET', KEYS[15], 'online') or 0))
local id = call('ZRANGE', KEYS[14], '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, 1)[1]
if not id or now_ms() - last < threshold then
  return 0
end
call('ZREM', KEYS[14], id)
call('HSET', KEYS[15], 'online', now_ms())
if call('PTTL', KEYS[15]) < threshold then
  call('PEXPIRE', KEYS[15], math.max(1, threshold))
end
arm({id = id, bot = ARGV[1], uid = ARGV[2]}, now_ms())
armed()
return 1
