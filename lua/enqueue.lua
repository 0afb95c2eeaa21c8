#!lua
-- enqueue: copies a batch of one bus stream into the queues of a shard, exactly once.
--
-- The batch covers the offsets (prev, last] of the stream. It is accepted only if the shard is at
-- `prev`. So a repeated batch changes nothing, and a shard that lost its last writes returns its
-- position, because queues and offset roll back together. A batch without bots advances an idle
-- shard.
--
-- KEYS  the eight of shared.lua, [9] hwm (hash: stream -> last offset copied), [10] dlq,
--       [11..] q:<bot> per bot, then with views per bot the ledger of ledger.lua
-- ARGV  stream, prev, last, slice µs, linger ms, max queue, overflow, max dead letters, length of
--       the views or 0, the views: cached ads (maximum of a generation), then per bot a count and that
--       many ads and numbers; then per bot: id, count, events as MessagePack (at most 500 events)
-- Reply {'OK', offset, appended, dead, dropped, dead letters removed} | {'DUP', offset} | {'GAP', offset}
-- Cost  about 11 commands + 1 a bot (2 with max queue) + 3 an ad
local views = tonumber(ARGV[9]) or 0
local bots = views > 0 and (#KEYS - 10) / 5 or #KEYS - 10
assert(#KEYS >= 10 and counts(10 + views, bots), 'enqueue: wrong number of arguments')

local HWM, stream, prev, last = KEYS[9], ARGV[1], ARGV[2], ARGV[3]
local offset = call('HGET', HWM, stream) or '0-0'
if not after(last, offset) then
  return {'DUP', offset}
end
if offset ~= prev then
  return {'GAP', offset}
end
local appended, died, dropped, removed = 0, 0, 0, 0
if #ARGV > 9 then
  appended, died, dropped, removed = append(11, 10 + views, {
    slice = tonumber(ARGV[4]), linger = tonumber(ARGV[5]), max = tonumber(ARGV[6]),
    overflow = ARGV[7], dead = KEYS[10], dead_max = tonumber(ARGV[8]),
  })
end
if views > 0 then
  local at = 11
  for bot = 1, bots do
    local ads, book = tonumber(ARGV[at]), book_at(7 + bots + 4 * bot)
    for i = at + 1, at + 2 * ads, 2 do
      count(book, ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[10]))
    end
    at = at + 1 + 2 * ads
  end
end
call('HSET', HWM, stream, last)
return {'OK', last, appended, died, dropped, removed}
