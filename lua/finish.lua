#!lua flags=allow-oom
-- finish: stores the results of sends that begin.lua started.
--
-- A notification and a token name a send. Another token, or a send that has ended, returns STALE
-- and changes nothing: the send was considered lost, or this call is a repetition. If Redis lost
-- the start of the send with its last writes, the token is above every known sequence, and the
-- result is accepted.
--   sent      the receiver has it; it counts for the user
--   refused   the recheck refused
--   retry     it becomes due again after `ms`, or expires if that is too late
--   postpone  becomes due again after `ms`, or when it expires; no attempt is counted
--   dead      it becomes a dead letter
--
-- Also runs on a full Redis: notifications.lua explains why it cannot fill it further.
--
-- KEYS  the thirteen of notifications.lua, then per send: n:<id>, user:<bot> <uid>, results:<bot>
-- ARGV  max dead letters, quotas of a bot (see quotas_of), then per send: id, token, outcome, ms, reason, its delay ('late<at
--       most so many ms>') or '', how long its user's hash is kept (ms), how many sends the user's log
--       holds, and the log of the type (0: there is none), the quotas of its bot or ''
-- Reply {dead letters removed, those of them above a quota, per send: 'STALE', or its new state: 'sent', 'refused', 'retry',
--       'postpone', 'dead'}
-- Cost  8 commands + up to 21 a send
assert(#KEYS > 13 and (#KEYS - 13) % 3 == 0 and #ARGV == 2 + 10 * (#KEYS - 13) / 3,
  'finish: wrong number of arguments')
local dead_max, quota = tonumber(ARGV[1]), quotas_of(ARGV[2])
local reply = {0, 0}
for i = 1, (#KEYS - 13) / 3 do
  local at, arg = 11 + 3 * i, 10 * i - 7
  local id, token, outcome, ms, reason =
    ARGV[arg], tonumber(ARGV[arg + 1]), ARGV[arg + 2], tonumber(ARGV[arg + 3]), ARGV[arg + 4]
  local note, user, meter = note_at(at, id), KEYS[at + 1], KEYS[at + 2]
  local forgotten = note and note.s < token and not ENDED[note.state] and note.state ~= 'waiting'
  if not note or not forgotten and (note.state ~= 'sending' or note.s ~= token) then
    reply[i + 2] = 'STALE'
  else
    if note.uid ~= '' then
      if call('HGET', user, 'by') == id then call('HDEL', user, 'by', 'until', 'late') end
      if outcome == 'sent' then
        call('HSET', user, 'sent', now_ms())
        note_sent(user, 'log', tonumber(ARGV[arg + 7]))
        note_sent(user, 'log|' .. note.type, tonumber(ARGV[arg + 8]))
        local kept = tonumber(ARGV[arg + 6])
        if call('PTTL', user) < kept then call('PEXPIRE', user, math.max(1, kept)) end
      end
    end
    if outcome == 'retry' and now_ms() + ms >= note.expires then
      outcome, reason = 'dead', reason .. '; it would expire before the next attempt'
    end
    local own = ARGV[arg + 9] == '' and quota or quotas_of(ARGV[arg + 9])
    if outcome == 'dead' then
      local removed, lost = give_up(note, reason, dead_max, own, meter)
      reply[1], reply[2] = reply[1] + removed, reply[2] + lost
    elseif outcome == 'retry' or outcome == 'postpone' then
      if not call('ZSCORE', DUE, id) then
        call('HSET', note.key, 's', next_sequence()) -- it fell due: the event that is queued means nothing
      end
      arm(note, math.min(now_ms() + ms, note.expires))
      call('HSET', note.key, 'state', 'scheduled', 'reason', reason,
        'postponed', outcome == 'postpone' and 1 or 0)
      if outcome == 'retry' then
        tally(note, 'retried')
      elseif not forgotten then
        call('HINCRBY', note.key, 'attempts', -1)
      end
    else
      finish(note, outcome, reason, own.results, meter)
    end
    if ARGV[arg + 5] ~= '' and not note.told then
      call('HSET', note.key, 'told', 1)
      tally(note, ARGV[arg + 5])
    end
    reply[i + 2] = outcome
  end
end
armed()
return reply
