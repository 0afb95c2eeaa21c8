#!lua flags=allow-oom
-- purge: deletes the queue of a bot, with its lanes that are set aside. Revokes its lease: the holder
-- cannot remove events any more. Keeps delayed events, dead letters, weight and pause of the bot.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..73] a:<lane>:<bot> for lane 0 to 63
-- ARGV  bot
-- Reply number of deleted events
-- Cost  about 12 commands
assert(#KEYS == 73 and #ARGV == 1, 'purge: wrong number of arguments')
local bot = ARGV[1]
local count = call('LLEN', KEYS[9])
local meta = call('HMGET', META, 'v', 'lanes')
if tonumber(meta[2] or 0) > 0 and lanes_of(call('HGET', ATT, bot)) ~= '' then
  call('HINCRBY', META, 'lanes', -1)
  count = count + held('a' .. bot)
  call('HDEL', HELD, 'a' .. bot)
  call('UNLINK', unpack(KEYS, 10))
end
revoke({bot}, tonumber(meta[1] or 0))
withdraw(bot)
call('UNLINK', KEYS[9])
call('HDEL', HELD, 'q' .. bot)
call('HDEL', ATT, bot)
if count > 0 then
  call('HINCRBY', META, 'depth', -count)
end
return count
