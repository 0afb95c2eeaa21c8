#!lua
-- record: keeps what was noted of attempts in a shard, within bounds of bytes. Completed slices of all
-- bots share a stream, the oldest go first. Failures have a part per bot, so that no bot can push out
-- those of another: a bot loses its own oldest first, then the bots whose last failure is oldest.
-- Best effort: what is lost here changes nothing else.
--
-- KEYS  [1] history (stream: b, a portion), [2] history-failed (hash: bot -> its failures, each after
--       its length in two bytes), [3] history-bots (sorted set: bot -> time of its last failure, ms),
--       [4] history-bytes (hash: bytes of done, of failed)
-- ARGV  [1] now ms, [2] how long, ms, [3] most bytes of the stream, [4] of the failures, [5] of the
--       failures of one bot, [6] number of portions for the stream, these, then per bot: bot, failures
-- Reply 1
-- Cost  8 commands, 1 per portion, 4 per bot, 2 per bot and 1 per 16 portions that go
local call = redis.call
assert(#KEYS == 4 and #ARGV >= 6 and (#ARGV - 6 - tonumber(ARGV[6])) % 2 == 0 and #ARGV > 6,
  'record: wrong number of arguments')
local HISTORY, FAILED, BOTS, BYTES = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now, keep, portions = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[6])
local most, most_failed, most_bot = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- What Redis needs for an entry of the stream, and for a bot, besides their bytes.
local ENTRY, BOT = 64, 160

local kept = call('HMGET', BYTES, 'done', 'failed')
local done, failed = tonumber(kept[1] or 0), tonumber(kept[2] or 0)
-- Keys that have expired count nothing.
if call('EXISTS', HISTORY) == 0 then
  done = 0
end
if call('EXISTS', FAILED) == 0 then
  failed = 0
end

for i = 7, 6 + portions do
  call('XADD', HISTORY, '*', 'b', ARGV[i])
  done = done + #ARGV[i] + ENTRY
end
local function shorten(last)
  local entries = call('XRANGE', HISTORY, '-', last, 'COUNT', 16)
  local ids = {}
  for i, entry in ipairs(entries) do
    if last == '+' and done <= most then
      break
    end
    ids[i] = entry[1]
    done = done - #entry[2][2] - ENTRY
  end
  if #ids > 0 then
    call('XDEL', HISTORY, unpack(ids))
  end
  return #ids
end
while done > most and shorten('+') > 0 do end
if portions > 0 then
  shorten(string.format('%d', math.max(now - keep, 0)))
end

for i = 7 + portions, #ARGV, 2 do
  local bot, before = ARGV[i], call('HGET', FAILED, ARGV[i])
  local all, first = (before or '') .. ARGV[i + 1], 1
  while #all - first + 1 > most_bot do
    local following = first + 2 + string.byte(all, first) * 256 + string.byte(all, first + 1)
    -- The last failure is kept, however long it is.
    if following > #all then
      break
    end
    first = following
  end
  all = string.sub(all, first)
  call('HSET', FAILED, bot, all)
  call('ZADD', BOTS, now, bot)
  failed = failed + #all - (before and #before or -BOT - 2 * #bot)
end
local function forget(bot)
  local bytes = call('HGET', FAILED, bot)
  call('HDEL', FAILED, bot)
  call('ZREM', BOTS, bot)
  failed = failed - (bytes and #bytes + BOT + 2 * #bot or 0)
end
while failed > most_failed do
  local bot = call('ZRANGE', BOTS, 0, 0)[1]
  if not bot then
    break
  end
  forget(bot)
end
for _, bot in ipairs(call('ZRANGE', BOTS, '-inf', '(' .. string.format('%d', now - keep), 'BYSCORE',
  'LIMIT', 0, 16)) do
  forget(bot)
end

call('HSET', BYTES, 'done', string.format('%d', done), 'failed', string.format('%d', failed))
for _, key in ipairs(KEYS) do
  call('PEXPIRE', key, keep)
end
return 1
