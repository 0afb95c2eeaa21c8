#!lua
-- restore: reschedules a lost notification: immediately, or at its expiry if it waits for its user.
--
-- The caller saw the record, and no event of it in the queue of its bot. If an event was handled
-- since, or the notification has a due time, it was not lost.
--
-- KEYS  the thirteen of notifications.lua, [14] n:<id>, [15] online:<bot> <uid>
-- ARGV  id, its `s` as the caller saw it
-- Reply 1, or 0 if it was not lost
-- Cost  up to 12 commands
assert(#KEYS == 15 and #ARGV == 2, 'restore: wrong number of arguments')
local note = note_at(14, ARGV[1])
if not note or ENDED[note.state] or note.s ~= tonumber(ARGV[2])
  or (call('ZSCORE', DUE, note.id) and call('HEXISTS', LATER, note.id) == 1) then
  return 0
end
if note.state == 'waiting' then
  call('ZADD', KEYS[15], 'NX', note.due, note.id)
  arm(note, note.expires)
else
  call('HSET', note.key, 'state', 'scheduled')
  arm(note, math.max(note.due, now_ms()))
end
armed()
return 1
