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
-- ARGV  stream, prev, last, slice µs, linger ms, max queue, overflow, max dead letters, quotas
--       of a bot (see quota_of), length of the views or 0, the views: cached ads (maximum of a
--       generation), then per bot a count and that many ads and numbers; then per bot: id, its own
--       quotas or '', count, events as MessagePack (at most 500 events)
-- Reply {'OK', offset, appended, dead, dropped, dead letters removed, events above a quota, dead
--       letters above a quota} | {'DUP', offset} | {'GAP', offset}
-- Cost  12 commands + 1 a bot (2 with max queue) + 2 a dead letter, with views 1 + 3 an ad
local views = tonumber(ARGV[10]) or 0
local bots = views > 0 and (#KEYS - 10) / 5 or #KEYS - 10
assert(#KEYS >= 10 and counts(11 + views, bots), 'enqueue: wrong number of arguments')

local HWM, stream, prev, last = KEYS[9], ARGV[1], ARGV[2], ARGV[3]
local offset = call('HGET', HWM, stream) or '0-0'
if not after(last, offset) then
  return {'DUP', offset}
end
if offset ~= prev then
  return {'GAP', offset}
end
local appended, died, dropped, removed, over, lost, _ = 0, 0, 0, 0, 0, 0, nil
if #ARGV > 10 then
  appended, died, dropped, removed, _, over, lost = append(11, 11 + views, {
    slice = tonumber(ARGV[4]), linger = tonumber(ARGV[5]), max = tonumber(ARGV[6]),
    overflow = ARGV[7], dead = KEYS[10], dead_max = tonumber(ARGV[8]),
    quota = quota_of(ARGV[9]),
  })
end
if views > 0 then
  local at = 12
  for bot = 1, bots do
    local ads, book = tonumber(ARGV[at]), book_at(7 + bots + 4 * bot)
    for i = at + 1, at + 2 * ads, 2 do
      count(book, ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[11]))
    end
    at = at + 1 + 2 * ads
  end
end
call('HSET', HWM, stream, last)
return {'OK', last, appended, died, dropped, removed, over, lost}
