#!lua
-- enqueue: copies a batch of one bus stream into the queues of a shard, exactly once.
--
-- The batch covers the offsets (prev, last] of the stream. It is accepted only if the shard is at
-- `prev`. So a repeated batch changes nothing, and a shard that lost its last writes returns its
-- position, because queues and offset roll back together. A batch without bots advances an idle
-- shard.
--
-- A copier with free workers leases quiet bots in the same call. It knows their events already.
--
-- KEYS  the eight of shared.lua, [9] hwm (hash: stream -> last offset copied), [10] dlq,
--       [11] weight (hash: bots with limits of their own; see set), [12..] q:<bot> per bot, then with views per
--       bot the ledger of ledger.lua
-- ARGV  stream, prev, last, slice µs, linger ms, max queue, overflow, max dead letters, quotas
--       of a bot (see quota_of), bots to lease at most, their ttl ms, seen (highest clock the copier
--       saw on any shard), length of the views or 0, the views: cached ads (maximum of a
--       generation), then per bot a count and that many ads and numbers; then per bot: id, its own
--       quotas or '', count, events as MessagePack (at most 500 events)
-- Reply {'OK', offset, appended, dead, dropped, dead letters removed, events above a quota, dead
--       letters above a quota, then if bots are leased: run id of the server (shortened), and per
--       leased bot: place in the call from 0, sequence before its first event, number of its events
--       in the queue, fence, start, att or '', what is set for it or 1} | {'DUP', offset} | {'GAP', offset}
-- Cost  11 commands + 1 a bot (2 with max queue) + 2 a dead letter, with views 1 + 3 an ad; with leases
--       10 + 1 a bot if nobody is ready and few keys exist, otherwise up to 14 + 1 a bot
local views = tonumber(ARGV[13]) or 0
local bots = views > 0 and (#KEYS - 11) / 5 or #KEYS - 11
assert(#KEYS >= 11 and counts(14 + views, bots), 'enqueue: wrong number of arguments')

local HWM, stream, prev, last = KEYS[9], ARGV[1], ARGV[2], ARGV[3]
local offset = call('HGET', HWM, stream) or '0-0'
if not after(last, offset) then
  return {'DUP', offset}
end
if offset ~= prev then
  return {'GAP', offset}
end
local appended, died, dropped, removed, over, lost, leases, _ = 0, 0, 0, 0, 0, 0, {}, nil
if #ARGV > 13 then
  local take = tonumber(ARGV[10])
  appended, died, dropped, removed, _, over, lost, leases = append(12, 14 + views, {
    slice = tonumber(ARGV[4]), linger = tonumber(ARGV[5]), max = tonumber(ARGV[6]),
    overflow = ARGV[7], dead = KEYS[10], dead_max = tonumber(ARGV[8]),
    quota = quota_of(ARGV[9]),
    take = take > 0 and {
      max = take, ttl = tonumber(ARGV[11]), seen = tonumber(ARGV[12]), weight = KEYS[11],
    } or nil,
  })
end
if views > 0 then
  local books, at = books(), 15
  for bot = 1, bots do
    local ads, book = tonumber(ARGV[at]), books.at(8 + bots + 4 * bot)
    for i = at + 1, at + 2 * ads, 2 do
      books.count(book, ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[14]))
    end
    at = at + 1 + 2 * ads
  end
end
call('HSET', HWM, stream, last)
return {'OK', last, appended, died, dropped, removed, over, lost, unpack(leases)}
