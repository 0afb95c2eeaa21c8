#!lua flags=no-writes
-- present: the states of the processes that were heard of lately. It only reads, so a Redis that is full,
-- or cannot write to its disk, answers too.
--
-- KEYS  [1] hash: process id -> '<ms since 1970, this server's clock> <state>'
-- ARGV  ttl ms
-- Reply per process that was stored within the ttl: its state
-- Cost  2 commands
assert(#KEYS == 1 and #ARGV == 1, 'present: wrong number of arguments')
local clock = redis.call('TIME')
local now, reply = clock[1] * 1000 + math.floor(clock[2] / 1000), {}
local all = redis.call('HGETALL', KEYS[1])
for i = 2, #all, 2 do
  local at, words = string.match(all[i], '^(%d+) (.*)$')
  if at and tonumber(at) + tonumber(ARGV[1]) >= now then
    reply[#reply + 1] = words
  end
end
return reply
