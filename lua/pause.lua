#!lua flags=allow-oom
-- pause: stops handing out one bot, or every bot of the shard. A running lease or park ends
-- normally, then the bot stays paused. Its events stay queued, and new ones are queued after them.
-- The note says who paused it and why; it is stored with the time. What is paused already keeps its
-- note, unless the new one has a reason.
--
-- KEYS  the eight of shared.lua, [9] paused-why (hash: bot -> time ms, a blank, note)
-- ARGV  bot, or '' for the whole shard; note as JSON, or ''; 1 if the note has a reason
-- Reply 1 if that changed something, otherwise 0
-- Cost  up to 7 commands
assert(#KEYS == 9 and #ARGV == 3, 'pause: wrong number of arguments')
local bot, note, replaces = ARGV[1], ARGV[2], ARGV[3] == '1'
local told = note ~= '' and digits(now_ms()) .. ' ' .. note or '1'
if bot == '' then
  local changed = call('HSETNX', META, 'paused', told)
  if changed == 0 and replaces then
    call('HSET', META, 'paused', told)
  end
  return changed
end
withdraw(bot)
local changed = call('SADD', PAUSED, bot)
if note ~= '' and (changed == 1 or replaces) then
  call('HSET', KEYS[9], bot, told)
end
return changed
