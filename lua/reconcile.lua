#!lua flags=allow-oom
-- reconcile: compares the `depth` of a shard with the sum of the lengths of its queues, and
-- corrects it. Every other script changes both together, so a difference is a permanent error:
-- Redis lost a part of a script with its last writes, or a person changed keys.
--
-- The events in lanes that are set aside are taken from their count, which the audit leaves alone.
--
-- A bot with events is ready, busy or paused. The caller names the bots whose queues it declares as
-- keys. If bots are missing, nothing is compared, and the reply names them: the caller repeats the
-- call with them. So the comparison sees one consistent state, also during traffic.
--
-- KEYS  the eight of shared.lua, [9..] q:<bot> per bot
-- ARGV  maximum number of bots, number of named bots, each bot
-- Reply {'SET', depth before as text, depth} | {'MORE', bot...} | {'MANY', bots in the shard}
-- Cost  7 commands + 1 a bot; 10,000 bots take some 20 ms
assert(#KEYS >= 8 and #ARGV >= 2 and #ARGV == #KEYS - 6 and tonumber(ARGV[2]) == #KEYS - 8,
  'reconcile: wrong number of arguments')
local count = call('ZCARD', CTL) + call('ZCARD', BUSY) + call('SCARD', PAUSED)
if count > tonumber(ARGV[1]) then
  return {'MANY', count}
end
local named = {}
for i = 3, #ARGV do
  named[ARGV[i]] = true
end
local missing = {'MORE'}
for _, bots in ipairs({call('ZRANGE', CTL, 0, -1), call('ZRANGE', BUSY, 0, -1), call('SMEMBERS', PAUSED)}) do
  for _, bot in ipairs(bots) do
    if not named[bot] then
      named[bot] = true
      missing[#missing + 1] = bot
    end
  end
end
if #missing > 1 then
  return missing
end
local depth = 0
for i = 9, #KEYS do
  depth = depth + call('LLEN', KEYS[i])
end
local before, lanes = unpack(call('HMGET', META, 'depth', 'lanes'))
before = before or '0'
if tonumber(lanes or 0) > 0 then
  for bot in pairs(named) do
    depth = depth + held('a' .. bot)
  end
end
if before ~= digits(depth) then
  call('HSET', META, 'depth', depth)
end
return {'SET', before, depth}
