#!lua
-- finish: ends sends that begin.lua began.
--
-- A send is named by its notification and token. Another token, or one that has ended, answers
-- STALE and changes nothing: the send was taken for lost, or this call was made before.
--   sent      the receiver has it; the user has got one now
--   refused   the receiver of the recheck does not want it sent
--   retry     it falls due again after `ms`, or is given up if that is too late
--   postpone  the same, and this was no attempt
--   dead      it is given up
--
-- KEYS  the thirteen of notifications.lua, then per send: n:<id>, user:<bot> <uid>
-- ARGV  max dead letters, how long a user's last time is kept (ms), then per send: id, token,
--       outcome, ms, reason, how late it was ('late<at most so many ms>') or ''
-- Reply {dead letters removed, per send: 'STALE', or how it is now: 'sent', 'refused', 'retry',
--       'postpone', 'dead'}
-- Cost  2 commands + up to 15 a send
assert(#KEYS > 13 and (#KEYS - 13) % 2 == 0 and #ARGV == 2 + 6 * (#KEYS - 13) / 2,
  'finish: wrong number of arguments')
local dead_max, kept = tonumber(ARGV[1]), tonumber(ARGV[2])
local reply = {0}
for i = 1, (#KEYS - 13) / 2 do
  local at, arg = 12 + 2 * i, 6 * i - 3
  local id, token, outcome, ms, reason =
    ARGV[arg], tonumber(ARGV[arg + 1]), ARGV[arg + 2], tonumber(ARGV[arg + 3]), ARGV[arg + 4]
  local note, user = note_at(at, id), KEYS[at + 1]
  if not note or note.state ~= 'sending' or note.s ~= token then
    reply[i + 1] = 'STALE'
  else
    if note.uid ~= '' then
      if call('HGET', user, 'by') == id then call('HDEL', user, 'by', 'until') end
      if outcome == 'sent' then
        call('HSET', user, 'sent', NOW_MS)
        if call('PTTL', user) < kept then call('PEXPIRE', user, math.max(1, kept)) end
      end
    end
    if outcome == 'retry' and NOW_MS + ms >= note.expires then
      outcome, reason = 'dead', reason .. '; it would expire before the next attempt'
    end
    if outcome == 'dead' then
      reply[1] = reply[1] + give_up(note, reason, dead_max)
    elseif outcome == 'retry' or outcome == 'postpone' then
      arm(note, NOW_MS + ms)
      call('HSET', note.key, 'state', 'scheduled', 'reason', reason)
      if outcome == 'retry' then
        tally(note, 'retried')
      else
        call('HINCRBY', note.key, 'attempts', -1)
      end
    else
      finish(note, outcome, reason)
    end
    if ARGV[arg + 5] ~= '' and not note.told then
      call('HSET', note.key, 'told', 1)
      tally(note, ARGV[arg + 5])
    end
    reply[i + 1] = outcome
  end
end
armed()
return reply
