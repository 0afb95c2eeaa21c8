#!lua flags=allow-oom
-- resume: undoes pause.
--
-- KEYS  the eight of shared.lua, [9] paused-why, [10] q:<bot> (with a bot)
-- ARGV  bot or '' for the whole shard, slice µs
-- Reply 1 if that changed something, otherwise 0
-- Cost  about 9 commands
assert(#KEYS >= 9 and #ARGV == 2, 'resume: wrong number of arguments')
local bot = ARGV[1]
if bot == '' then
  local changed = call('HDEL', META, 'paused')
  wake('ready', nil, lowest(CTL))
  return changed
end
local changed = call('SREM', PAUSED, bot)
call('HDEL', KEYS[9], bot)
if changed == 1 and (call('LLEN', KEYS[10]) > 0 or lanes_of(call('HGET', ATT, bot)) ~= '') then
  join(at_rest({bot}), tonumber(call('HGET', META, 'v') or 0), tonumber(ARGV[2]))
end
return changed
