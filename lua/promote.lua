#!lua flags=allow-oom
-- promote: moves delayed events that are due into their bots' queues, with fresh sequences.
--
-- The caller has read ids and bots before; the script checks each again, so any number of callers
-- may run.
--
-- Also runs on a full Redis: an accepted event moves from `due` and `later` to a queue that workers
-- drain. It needs no more memory there, except for the first event of a bot: its list and its entry
-- in the control set, one per bot.
--
-- KEYS  the eight of shared.lua, [9] due, [10] later, [11..] q:<bot> per event
-- ARGV  slice µs, then per event, oldest first: id, bot (at most 100 events a call)
-- Reply {moved, next due time (ms) or ''}
-- Cost  about 17 commands + 1 an event
assert(#KEYS >= 11 and #ARGV == 1 + 2 * (#KEYS - 10), 'promote: wrong number of arguments')
local DUE, LATER = KEYS[9], KEYS[10]
local ids = {}
for at = 2, #ARGV, 2 do
  ids[#ids + 1] = ARGV[at]
end
-- Other callers may have moved some since, or the clock was set back: such events are not read.
local times, due, places, queues = call('ZMSCORE', DUE, unpack(ids)), {}, {}, {}
for i, id in ipairs(ids) do
  if times[i] and tonumber(times[i]) <= now_ms() then
    local at = #due + 1
    due[at], places[at], queues[at] = id, i, 'q' .. ARGV[1 + 2 * i]
  end
end
if #due == 0 then
  return {0, lowest(DUE) or ''}
end
local stored = call('HMGET', LATER, unpack(due))
local meta = call('HMGET', META, 'seq', 'v', 'depth', 'lanes')
any_lanes = tonumber(meta[4] or 0) > 0
local sequence = math.max(tonumber(meta[1] or 0), now_us() - 1)
local moved, fresh = {}, {}
learn(queues)
for at, i in ipairs(places) do
  local bot = ARGV[1 + 2 * i]
  local head = #bot .. ':' .. bot
  if stored[at] and string.sub(stored[at], 1, #head) == head then
    sequence = sequence + 1
    local event = string.sub(stored[at], #head + 1)
    local length, size = call('RPUSH', KEYS[10 + i], record(sequence, event)), HEAD + #event
    if length == 1 then
      fresh[#fresh + 1] = bot
    end
    grew('q' .. bot, KEYS[10 + i], length, length - 1, size, size >= LARGE)
    hold('l' .. bot, -1)
    hold('L' .. bot, -#event)
    moved[#moved + 1] = due[at]
  end
end
if #moved > 0 then
  call('ZREM', DUE, unpack(moved))
  call('HDEL', LATER, unpack(moved))
  settle()
  call('HSET', META, 'seq', sequence, 'depth', tonumber(meta[3] or 0) + #moved)
  if any_lanes then
    unpark(fresh)
  end
  join(at_rest(fresh), tonumber(meta[2] or 0), tonumber(ARGV[1]))
end
return {#moved, lowest(DUE) or ''}
