#!lua
-- push: queues events of one bot now, or one event later; once per idempotency key.
--
-- KEYS  the eight of shared.lua, [9] dlq, [10] due, [11] later, [12] q:<bot>,
--       [13] idem:<key> (only with an idempotency key)
-- ARGV  slice µs, linger ms, max queue, overflow, max dead letters, due (ms since 1970, 0: now),
--       idempotency window ms, bot, count, events as MessagePack (with a due time exactly one)
-- Reply {'OK', appended, dead, dropped, dead letters removed, last sequence}; with a due time the
--       sequence is the id of the delayed event; {'DUP', sequence of the first time}
-- Cost  about 13 commands
assert(#KEYS >= 12 and #ARGV >= 10 and counts(8, 1), 'push: wrong number of arguments')
local idem, due = KEYS[13], tonumber(ARGV[6])
if idem then
  local first = call('GET', idem)
  if first then
    return {'DUP', first}
  end
end
local appended, died, dropped, removed, sequence = 1, 0, 0, 0, nil
if due > 0 then
  assert(ARGV[9] == '1', 'push: a delayed call takes exactly one event')
  local bot = ARGV[8]
  sequence = math.max(tonumber(call('HGET', META, 'seq') or 0) + 1, NOW_US)
  call('HSET', META, 'seq', sequence)
  local before = lowest(KEYS[10])
  call('ZADD', KEYS[10], due, digits(sequence))
  call('HSET', KEYS[11], digits(sequence), #bot .. ':' .. bot .. ARGV[10])
  wake('due', before, due)
else
  appended, died, dropped, removed, sequence = append(12, 8, {
    slice = tonumber(ARGV[1]), linger = tonumber(ARGV[2]), max = tonumber(ARGV[3]),
    overflow = ARGV[4], dead = KEYS[9], dead_max = tonumber(ARGV[5]),
  })
end
if idem then
  call('SET', idem, digits(sequence), 'PX', ARGV[7])
end
return {'OK', appended, died, dropped, removed, digits(sequence)}
