#!lua flags=allow-oom
-- amend: cancels a notification, or moves its due time and its expiry.
--
-- A moved notification becomes due again. If its event is queued already, that event is used: begin.lua
-- looks at the due time. So any number of moves leaves one event.
--
-- Also runs on a full Redis: it adds no data, and a cancellation frees memory.
--
-- KEYS  the thirteen of notifications.lua, [14] n:<id>, [15] online:<bot> <uid>, [16] results:<bot>, and
--       where it has a key: [17] key:<bot> <key>
-- ARGV  id, 'cancel' | 'move', due (ms since 1970, 0: by the delay), delay ms, quota of the bytes of ended
--       records (0: none)
-- Reply 'OK', or the state that forbids the change; '' if the notification does not exist
-- Cost  up to 20 commands
assert((#KEYS == 16 or #KEYS == 17) and #ARGV == 5, 'amend: wrong number of arguments')
local note = note_at(14, ARGV[1])
if not note then
  return ''
end
if ENDED[note.state] or note.state == 'sending' then
  return note.state
end
local waits = call('ZSCORE', KEYS[15], note.id)
if ARGV[2] == 'cancel' then
  call('ZREM', KEYS[15], note.id)
  local kept = finish(note, 'cancelled', 'on request', tonumber(ARGV[5]), KEYS[16])
  if KEYS[17] and call('GET', KEYS[17]) == note.id then
    call('PEXPIRE', KEYS[17], kept)
  end
else
  local due = due_at(tonumber(ARGV[3]), tonumber(ARGV[4]))
  local expires = due + note.expires - note.due
  call('HSET', note.key, 'due', due, 'expires', expires)
  call('HDEL', note.key, 'ready')
  if KEYS[17] and call('GET', KEYS[17]) == note.id then
    call('PEXPIRE', KEYS[17], math.max(1, expires - now_ms()) + KEPT_MS)
  end
  if waits then call('ZADD', KEYS[15], due, note.id) end
  if call('ZSCORE', DUE, note.id) then arm(note, waits and expires or due) end
end
armed()
return 'OK'
