#!lua flags=allow-oom
-- pause: stops handing out one bot, or every bot of the shard. A running lease or park ends
-- normally, then the bot stays paused. Its events stay queued, and new ones are queued after them.
--
-- KEYS  the eight of shared.lua
-- ARGV  bot, or '' for the whole shard
-- Reply 1 if that changed something, otherwise 0
-- Cost  5 commands
assert(#KEYS == 8 and #ARGV == 1, 'pause: wrong number of arguments')
local bot = ARGV[1]
if bot == '' then
  return call('HSET', META, 'paused', 1)
end
withdraw(bot)
return call('SADD', PAUSED, bot)
