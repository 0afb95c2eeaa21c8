#!lua
-- set: changes what is set for one bot: its weight, its rate, its burst. The number of such bots is
-- bounded, because the settings stay although a bot never comes back. A bot that is parked is ready
-- again, so that a raised rate applies at once.
--
-- KEYS  the eight of shared.lua, [9] weight (hash: bot -> weight|rate|burst, each may be empty; a
--       number alone is a weight), [10] q:<bot>
-- ARGV  bot, slice µs, maximum number of bots, then weight, rate and burst: '=' as it is, '' none
-- Reply 1, or 0: the shard has its maximum, and nothing was changed
-- Cost  2 to 15 commands
assert(#KEYS == 10 and #ARGV == 6, 'set: wrong number of arguments')
local SET, bot, old = KEYS[9], ARGV[1], {}
local before = call('HGET', SET, bot)
for part in string.gmatch((before or '') .. '|', '([^|]*)|') do
  old[#old + 1] = part
end
for i = 1, 3 do
  if ARGV[3 + i] ~= '=' then
    old[i] = ARGV[3 + i]
  end
end
local weight, rate, burst = old[1] or '', old[2] or '', old[3] or ''
if weight == '1' then
  weight = ''
end
if weight .. rate .. burst == '' then
  call('HDEL', SET, bot)
else
  if not before and call('HLEN', SET) >= tonumber(ARGV[3]) then
    return 0
  end
  -- A weight alone is stored as older versions read it.
  call('HSET', SET, bot, rate .. burst == '' and weight or weight .. '|' .. rate .. '|' .. burst)
end
if ARGV[5] .. ARGV[6] ~= '==' and call('ZSCORE', BUSY, bot) and call('HEXISTS', OWN, bot) == 0 then
  local v = tonumber(call('HGET', META, 'v') or 0)
  revoke({bot}, v)
  if call('LLEN', KEYS[10]) > 0 or lanes_of(call('HGET', ATT, bot)) ~= '' then
    join(at_rest({bot}), v, tonumber(ARGV[2]))
  end
end
return 1
