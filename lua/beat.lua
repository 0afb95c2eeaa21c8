#!lua flags=allow-oom
-- beat: stores the state of a process, and removes silent processes.
--
-- KEYS  [1] hash: process id -> '<ms since 1970, this server's clock> <state>'
-- ARGV  process id, its state ('': remove it), ttl ms
-- Reply 1
-- Cost  3 commands, 1 more if processes are removed
assert(#KEYS == 1 and #ARGV == 3, 'beat: wrong number of arguments')
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local id, says, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
if says == '' then
  redis.call('HDEL', KEYS[1], id)
else
  redis.call('HSET', KEYS[1], id, string.format('%.0f', now) .. ' ' .. says)
end
local all, silent = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local at = string.match(all[i + 1], '^(%d+) ')
  if not at or tonumber(at) + ttl < now then
    silent[#silent + 1] = all[i]
  end
end
if #silent > 0 then
  redis.call('HDEL', KEYS[1], unpack(silent))
end
return 1
