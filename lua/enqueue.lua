#!lua
-- enqueue: copies a batch of logs of the bus into the queues of a shard, exactly once.
--
-- The batch covers the offsets (prev, last] of each log. It is accepted only if the shard is at
-- `prev` in every log. So a repeated batch changes nothing, and a shard that lost its last writes
-- returns its positions, because queues and offsets roll back together. A batch without bots
-- advances an idle shard.
--
-- With a window, an event whose name was copied within it is not copied again: the call changes
-- nothing and returns the places of such events, and the caller sends the others. The names of the
-- window are in two hashes: when `now` is older than the window, it becomes `before`. The others are
-- accepted only while the names of those that were left out are noted. If the copies to which they
-- refer are lost meanwhile, the caller must read the bus again.
--
-- A copier with free workers leases quiet bots in the same call. It knows their events already.
--
-- KEYS  the eight of shared.lua, [9] hwm (hash: log -> last offset copied), [10] dlq,
--       [11] weight (hash: bots with limits of their own; see set), with a window [12] now,
--       [13] before (hashes: name -> ''), then q:<bot> per bot, then with views per bot the ledger of
--       ledger.lua
-- ARGV  number of logs (at least 1), per log: its name, prev, last; then the window ms or 0, slice µs,
--       linger ms, max queue, overflow, max dead letters, quotas of a bot (see quota_of), bots to
--       lease at most, their ttl ms, seen (highest clock the copier saw on any shard), length of
--       the views or 0, the views: cached ads (maximum of a generation), then per bot a count, that
--       many ads, and of each event the place of its ad from 1 and a number, as '1:5 0:0' (0: none);
--       then per bot: id, its own quotas or '', count, events as
--       MessagePack (at most 500 events); with a window the names of all events, 16 bytes each, in
--       their order, and those of the repetitions that the caller has left out
-- Reply {'OK', appended, dead, dropped, dead letters removed, events above a quota, dead letters above
--       a quota, views counted, then if bots are leased: run id of the server (shortened), and per leased bot:
--       place in the call from 0, sequence before its first event, number of its events in the
--       queue, fence, start, att or '', what is set for it or 1}
--       | {'DUP', offset of each log} | {'GAP', offset of each log} | {'SEEN', places from 0}
-- Cost  11 commands + 1 a bot (2 with max queue) + 2 a dead letter, with views 1 + 3 an ad, with a
--       window 5 + 2 an event left out; with leases 10 + 1 a bot if nobody is ready and few keys
--       exist, otherwise up to 14 + 1 a bot
local logs = tonumber(ARGV[1]) or 0
local o = 3 * logs - 2 -- What follows the logs begins at ARGV[o + 4].
local window = tonumber(ARGV[o + 4]) or 0
local views = tonumber(ARGV[o + 14]) or 0
local left_out = window > 0 and table.remove(ARGV) or ''
local names = window > 0 and table.remove(ARGV) or ''
local queues = window > 0 and 14 or 12
local bots = #KEYS - queues + 1
bots = views > 0 and bots / 5 or bots
assert(#KEYS >= 11 and logs > 0 and counts(o + 15 + views, bots), 'enqueue: wrong number of arguments')

local HWM = KEYS[9]
local stands, fit, behind = chain(HWM, logs)
if fit < logs then
  return {behind == logs and 'DUP' or 'GAP', unpack(stands)}
end
local left
if window > 0 then
  if forgotten(KEYS[12], KEYS[13], left_out) then
    return {'GAP', unpack(stands)}
  end
  local seen
  seen, left = repeated(KEYS[12], KEYS[13], names, window)
  if #seen > 0 then
    return {'SEEN', unpack(seen)}
  end
end
local appended, died, dropped, removed, over, lost, leases, _ = 0, 0, 0, 0, 0, 0, {}, nil
local counted = 0
local rooms = {}
if bots > 0 then
  local take = tonumber(ARGV[o + 11])
  appended, died, dropped, removed, _, over, lost, leases = append(queues, o + 15 + views, {
    slice = tonumber(ARGV[o + 5]), linger = tonumber(ARGV[o + 6]), max = tonumber(ARGV[o + 7]),
    overflow = ARGV[o + 8], dead = KEYS[10], dead_max = tonumber(ARGV[o + 9]),
    quota = quota_of(ARGV[o + 10]), rooms = rooms,
    take = take > 0 and {
      max = take, ttl = tonumber(ARGV[o + 12]), seen = tonumber(ARGV[o + 13]), weight = KEYS[11],
    } or nil,
  })
end
if window > 0 then
  if dropped > 0 then
    -- An event that was dropped may be published again.
    local queued, at, name = {}, o + 15 + views, 0
    for bot = 1, bots do
      queued[bot] = string.sub(names, 16 * name + 1, 16 * (name + rooms[bot]))
      name, at = name + tonumber(ARGV[at + 2]), at + 3 + tonumber(ARGV[at + 2])
    end
    names = table.concat(queued)
  end
  remember(KEYS[12], names, window, left)
end
if views > 0 then
  local books, at = books(), o + 16
  for bot = 1, bots do
    local ads, book = tonumber(ARGV[at]), books.at(queues - 4 + bots + 4 * bot)
    local sums, left = {}, rooms[bot]
    for place, n in string.gmatch(ARGV[at + ads + 1], '(%d+):(%d+)') do
      -- Events that the queue refused count nothing.
      if left == 0 then
        break
      end
      left, place = left - 1, tonumber(place)
      sums[place] = (sums[place] or 0) + tonumber(n)
    end
    for place = 1, ads do
      if sums[place] then
        books.count(book, ARGV[at + place], sums[place], tonumber(ARGV[o + 15]))
        counted = counted + sums[place]
      end
    end
    at = at + ads + 2
  end
end
local moved = {}
for log = 1, logs do
  moved[2 * log - 1], moved[2 * log] = ARGV[3 * log - 1], ARGV[3 * log + 1]
end
call('HSET', HWM, unpack(moved))
return {'OK', appended, died, dropped, removed, over, lost, counted, unpack(leases)}
