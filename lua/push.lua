#!lua
-- push: queues events of one bot now, or one event later; once per idempotency key.
--
-- KEYS  the eight of shared.lua, [9] dlq, [10] due, [11] later, [12] q:<bot>,
--       [13] idem:<key>, [14] keys:<bot> (only with an idempotency key)
-- ARGV  slice µs, linger ms, max queue, overflow, max dead letters, due (ms since 1970, 0: now, negative:
--       so many ms from now), idempotency window ms, quotas of the bytes of idempotency keys, of delayed
--       events and of their bytes (0: none), bot, its quotas (see quota_of), count, events as MessagePack
--       (with a due time exactly one)
-- Reply {'OK', appended, dead, dropped, dead letters removed, events and dead letters above a quota,
--       last sequence}; with a due time the sequence is the id of the delayed event; {'DUP', sequence
--       of the first time}; {'QUOTA', name, held, limit}: nothing was changed
-- Cost  about 11 commands, 4 more with a key; 10 if delayed
assert(#KEYS >= 12 and #ARGV >= 14 and counts(11, 1), 'push: wrong number of arguments')
local idem, due, spent = KEYS[13], tonumber(ARGV[6]), nil
if idem then
  local first = call('GET', idem)
  if first then
    return {'DUP', first}
  end
  local refused
  refused, spent = key_refusal(KEYS[14], KEY_BYTES + #idem, tonumber(ARGV[8]), tonumber(ARGV[7]))
  if refused then
    return refused
  end
end
assert(due == 0 or ARGV[13] == '1', 'push: a delayed call takes exactly one event')
-- No quota stops a delayed event once it is due, so the queue must have room for it now.
local refused = refusal(KEYS[12], 11)
if refused then
  return refused
end
if due < 0 then
  due = now_ms() - due
end
local appended, died, dropped, removed, sequence, over, lost = 1, 0, 0, 0, nil, 0, 0
if due > 0 then
  local bot, events, bytes = ARGV[11], tonumber(ARGV[9]), tonumber(ARGV[10])
  if events > 0 and held('l' .. bot) >= events then
    return {'QUOTA', 'delayed_events', held('l' .. bot), events}
  end
  if bytes > 0 and held('L' .. bot) + #ARGV[14] > bytes then
    return {'QUOTA', 'delayed_bytes', held('L' .. bot), bytes}
  end
  sequence = math.max(tonumber(call('HGET', META, 'seq') or 0) + 1, now_us())
  call('HSET', META, 'seq', sequence)
  local before = lowest(KEYS[10])
  call('ZADD', KEYS[10], due, digits(sequence))
  if call('HSET', KEYS[11], digits(sequence), #bot .. ':' .. bot .. ARGV[14]) == 1 then
    hold('l' .. bot, 1)
    hold('L' .. bot, #ARGV[14])
  end
  settle()
  wake('due', before, due)
else
  appended, died, dropped, removed, sequence, over, lost = append(12, 11, {
    slice = tonumber(ARGV[1]), linger = tonumber(ARGV[2]), max = tonumber(ARGV[3]),
    overflow = ARGV[4], dead = KEYS[9], dead_max = tonumber(ARGV[5]),
  })
end
if idem then
  call('SET', idem, digits(sequence), 'PX', ARGV[7])
  charge(KEYS[14], spent)
end
return {'OK', appended, died, dropped, removed, over, lost, digits(sequence)}
