#!lua flags=allow-oom
-- revoke: breaks the lease or park of a bot. Its holder cannot commit any more. The bot is ready
-- again immediately, unless it is paused or has no events. Its lanes that are set aside are due now.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>
-- ARGV  bot, slice µs
-- Reply 1 if there was a lease or park, or a lane that was set aside, otherwise 0
-- Cost  about 10 commands, 2 more with lanes
assert(#KEYS == 9 and #ARGV == 2, 'revoke: wrong number of arguments')
local bot = ARGV[1]
local is_busy = call('ZSCORE', BUSY, bot)
local meta = call('HMGET', META, 'v', 'lanes')
local v, lanes = tonumber(meta[1] or 0), ''
if tonumber(meta[2] or 0) > 0 then
  local text = call('HGET', ATT, bot) or ''
  lanes = lanes_of(text)
  if lanes ~= '' then
    local due = string.gsub(lanes, '(%d+):%d+:(%d+:%d+)', '%1:0:%2')
    call('HSET', ATT, bot, string.sub(text, 1, #text - #lanes) .. due)
  end
end
if not is_busy then
  return lanes == '' and 0 or 1
end
revoke({bot}, v)
if lanes ~= '' or call('LLEN', KEYS[9]) > 0 then
  join(at_rest({bot}), v, tonumber(ARGV[2]))
end
return 1
