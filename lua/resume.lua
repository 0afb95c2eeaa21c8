#!lua flags=allow-oom
-- resume: undoes pause.
--
-- KEYS  the eight of shared.lua, [9] q:<bot> (with a bot)
-- ARGV  bot or '' for the whole shard, slice µs
-- Reply 1 if that changed something, otherwise 0
-- Cost  about 8 commands
assert(#KEYS >= 8 and #ARGV == 2, 'resume: wrong number of arguments')
local bot = ARGV[1]
if bot == '' then
  local changed = call('HDEL', META, 'paused')
  wake('ready', nil, lowest(CTL))
  return changed
end
local changed = call('SREM', PAUSED, bot)
if changed == 1 and (call('LLEN', KEYS[9]) > 0 or lanes_of(call('HGET', ATT, bot)) ~= '') then
  join(at_rest({bot}), tonumber(call('HGET', META, 'v') or 0), tonumber(ARGV[2]))
end
return changed
