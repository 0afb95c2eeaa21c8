#!lua flags=allow-oom
-- purge: deletes the queue of a bot. Revokes its lease: the holder cannot remove events any more.
-- Keeps delayed events, dead letters, weight and pause of the bot.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>
-- ARGV  bot
-- Reply number of deleted events
-- Cost  about 12 commands
assert(#KEYS == 9 and #ARGV == 1, 'purge: wrong number of arguments')
local bot = ARGV[1]
local count = call('LLEN', KEYS[9])
revoke({bot}, tonumber(call('HGET', META, 'v') or 0))
withdraw(bot)
call('UNLINK', KEYS[9])
call('HDEL', HELD, 'q' .. bot)
call('HDEL', ATT, bot)
if count > 0 then
  call('HINCRBY', META, 'depth', -count)
end
return count
