#!lua
-- schedule: accepts a notification.
--
-- A notification that waits for its user is in the user's sorted set from its due time on, and
-- becomes due only when it is released (release.lua) or expires. With a key, the caller first looks
-- up the notification that has it. `ignore` keeps that one unless it has ended; `replace` cancels
-- it unless it is in flight. `ignore` also keeps a recently accepted one that has ended, unless it
-- was cancelled, because the caller may repeat a request whose answer was lost. `once` keeps it as
-- long as its record exists. A notification with a key counts for the quota of keys, unless it takes
-- the place of another one that has not ended.
--
-- KEYS  the thirteen of notifications.lua, [14] n:<id>, [15] online:<bot> <uid>, and with a key:
--       [16] key:<bot> <key> (string: id), [17] n:<id that has the key> and [18] its
--       online:<bot> <uid> (or again KEYS[14] and KEYS[15]), [19] keys:<bot>, [20] results:<bot>
-- ARGV  id, bot, uid, type, label, due (ms since 1970, 0: by the delay), delay ms, expires after
--       (ms from the due time), online (1 or 0), duplicates ('ignore' | 'replace' | 'once' | ''), the id that
--       has the key or '', quotas of pending notifications, of their bytes, of the bytes of keys and of
--       ended records (0: none), then names and values of the other fields of the record: the URL first
-- Reply {'OK', due (ms), label of the replaced one or ''} | {'DUP', due of the one that has
--       the key} | {'AGAIN'}: another notification got the key meanwhile | {'QUOTA', name, held, limit}
--       Except for the first, nothing was changed.
-- Cost  12 commands, 13 if it waits for its user, with a key up to 17 more
local REPEAT_MS = 300000
assert((#KEYS == 15 or #KEYS == 20) and #ARGV >= 17 and #ARGV % 2 == 1,
  'schedule: wrong number of arguments')
local note = {id = ARGV[1], bot = ARGV[2], uid = ARGV[3], type = ARGV[4], label = ARGV[5],
  key = KEYS[14], attempts = 0}
local due, waits, other = due_at(tonumber(ARGV[6]), tonumber(ARGV[7])), ARGV[9] == '1', ARGV[11]
local expires, replaced, gives, freed = due + tonumber(ARGV[8]), '', false, 0
local bytes = #note.uid + #note.type
for i = 16, #ARGV do
  bytes = bytes + #ARGV[i]
end
local known
if KEYS[16] then
  if (call('GET', KEYS[16]) or '') ~= other then
    return {'AGAIN'}
  end
  known = other ~= '' and note_at(17, other)
  local repeated = known and now_ms() - past(known.created) < REPEAT_MS and known.state ~= 'cancelled'
  if known and (ARGV[10] == 'once'
      or ARGV[10] == 'ignore' and (repeated or not ENDED[known.state])) then
    return {'DUP', known.due}
  end
  if known and not ENDED[known.state] and known.state ~= 'sending' then
    gives, freed = true, tonumber(known.held or 0)
  end
end
local n, N, l, L = 'n' .. note.bot, 'N' .. note.bot, 'l' .. note.bot, 'L' .. note.bot
local holds = call('HMGET', HELD, n, N, l, L, 'q' .. note.bot)
for i = 1, 5 do
  holds[i] = tonumber(holds[i] or 0)
end
local notes, note_bytes = tonumber(ARGV[12]), tonumber(ARGV[13])
if notes > 0 and holds[1] - (freed > 0 and 1 or 0) >= notes then
  return {'QUOTA', 'notifications', holds[1], notes}
end
if note_bytes > 0 and holds[2] - freed + bytes > note_bytes then
  return {'QUOTA', 'notification_bytes', holds[2], note_bytes}
end
-- A notification that is cancelled or replaced leaves its event in the queue, if that is there already.
if note_bytes > 0 and holds[5] > note_bytes then
  return {'QUOTA', 'notification_bytes', holds[5], note_bytes}
end
if KEYS[16] then
  local refused, spent
  if not gives then
    local size = RECORD_BYTES + #ARGV[17] + KEY_BYTES + #KEYS[16]
    refused, spent = key_refusal(KEYS[19], size, tonumber(ARGV[14]), KEY_MS)
    if refused then
      return refused
    end
  else
    call('ZREM', KEYS[18], other)
    finish(known, 'cancelled', 'replaced by ' .. note.id, tonumber(ARGV[15]), KEYS[20])
    replaced = known.label
  end
  charge(KEYS[19], spent)
  call('SET', KEYS[16], note.id, 'PX', math.max(1, expires - now_ms()) + KEPT_MS)
end
call('HSET', note.key, 'state', waits and 'waiting' or 'scheduled', 'bot', note.bot,
  'uid', note.uid, 'type', note.type, 'label', note.label, 'due', digits(due), 'expires', digits(expires),
  'online', ARGV[9], 'created', digits(now_ms()), 'attempts', '0', 's', '0', 'held', digits(bytes),
  unpack(ARGV, 16))
if waits then
  call('ZADD', KEYS[15], digits(due), note.id)
end
local time, before, event = waits and expires or due, lowest(DUE), event_of(note)
call('ZADD', DUE, digits(time), note.id)
call('HSET', LATER, note.id, #note.bot .. ':' .. note.bot .. event)
if gives then -- finish() changed what the bot holds
  hold(n, 1)
  hold(N, bytes)
  hold(l, 1)
  hold(L, #event)
  settle()
else
  call('HSET', HELD, n, digits(holds[1] + 1), N, digits(holds[2] + bytes), l, digits(holds[3] + 1),
    L, digits(holds[4] + #event))
end
tally(note, 'received')
wake('due', before, time)
return {'OK', due, replaced}
