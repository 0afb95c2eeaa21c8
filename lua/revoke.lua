#!lua flags=allow-oom
-- revoke: breaks the lease or park of a bot. Its holder cannot commit any more. The bot is ready
-- again immediately, unless it is paused or has no events.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>
-- ARGV  bot, slice µs
-- Reply 1 if there was a lease or park, otherwise 0
-- Cost  about 10 commands
assert(#KEYS == 9 and #ARGV == 2, 'revoke: wrong number of arguments')
local bot = ARGV[1]
if not call('ZSCORE', BUSY, bot) then
  return 0
end
local v = tonumber(call('HGET', META, 'v') or 0)
revoke({bot}, v)
if call('LLEN', KEYS[9]) > 0 or lanes_of(call('HGET', ATT, bot)) ~= '' then
  join(at_rest({bot}), v, tonumber(ARGV[2]))
end
return 1
