#!lua flags=allow-oom
-- finish: ends sends that begin.lua began.
--
-- A send is named by its notification and token. Another token, or one that has ended, answers
-- STALE and changes nothing: the send was taken for lost, or this call was made before. Where Redis
-- lost its tail and the begin with it, the token is above everything that it knows: it is believed.
--   sent      the receiver has it; the user has got one now
--   refused   the receiver of the recheck does not want it sent
--   retry     it falls due again after `ms`, or is given up if that is too late
--   postpone  the same, and this was no attempt
--   dead      it is given up
--
-- Runs on a full Redis: notifications.lua says why it cannot make it fuller for long.
--
-- KEYS  the thirteen of notifications.lua, then per send: n:<id>, user:<bot> <uid>
-- ARGV  max dead letters, then per send: id, token, outcome, ms, reason, how late it was ('late<at
--       most so many ms>') or '', how long its user's hash is kept (ms), how many sends the user's log
--       holds, and the log of the type (0: there is none)
-- Reply {dead letters removed, per send: 'STALE', or how it is now: 'sent', 'refused', 'retry',
--       'postpone', 'dead'}
-- Cost  2 commands + up to 22 a send
assert(#KEYS > 13 and (#KEYS - 13) % 2 == 0 and #ARGV == 1 + 9 * (#KEYS - 13) / 2,
  'finish: wrong number of arguments')
local dead_max = tonumber(ARGV[1])
local reply = {0}
for i = 1, (#KEYS - 13) / 2 do
  local at, arg = 12 + 2 * i, 9 * i - 7
  local id, token, outcome, ms, reason =
    ARGV[arg], tonumber(ARGV[arg + 1]), ARGV[arg + 2], tonumber(ARGV[arg + 3]), ARGV[arg + 4]
  local note, user = note_at(at, id), KEYS[at + 1]
  local forgotten = note and note.s < token and not ENDED[note.state] and note.state ~= 'waiting'
  if not note or not forgotten and (note.state ~= 'sending' or note.s ~= token) then
    reply[i + 1] = 'STALE'
  else
    if note.uid ~= '' then
      if call('HGET', user, 'by') == id then call('HDEL', user, 'by', 'until', 'late') end
      if outcome == 'sent' then
        call('HSET', user, 'sent', NOW_MS)
        note_sent(user, 'log', tonumber(ARGV[arg + 7]))
        note_sent(user, 'log|' .. note.type, tonumber(ARGV[arg + 8]))
        local kept = tonumber(ARGV[arg + 6])
        if call('PTTL', user) < kept then call('PEXPIRE', user, math.max(1, kept)) end
      end
    end
    if outcome == 'retry' and NOW_MS + ms >= note.expires then
      outcome, reason = 'dead', reason .. '; it would expire before the next attempt'
    end
    if outcome == 'dead' then
      reply[1] = reply[1] + give_up(note, reason, dead_max)
    elseif outcome == 'retry' or outcome == 'postpone' then
      if not call('ZSCORE', DUE, id) then
        call('HSET', note.key, 's', next_sequence()) -- it fell due: the event that is queued means nothing
      end
      arm(note, NOW_MS + ms)
      call('HSET', note.key, 'state', 'scheduled', 'reason', reason)
      if outcome == 'retry' then
        tally(note, 'retried')
      elseif not forgotten then
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
