#!lua flags=allow-oom
-- complete: ends or continues the leases of several bots of one shard, and removes settled events.
--
-- `bytes` are those of the `n` events in the queue: their holder read them under its fence, and knows.
--
-- Per bot, `run` and `fence` name the lease (a server that lost its last writes and whose clock was
-- set back may issue a fence twice, but never in the same run), `before` is the number of events
-- that the caller knows to be removed under it, and `n` the number of further events to remove.
-- Another fence returns STALE. A repeated call (removed = before + n) removes nothing again, but
-- continues or ends the lease as requested. Any other difference returns BAD.
--   keep     the lease continues and is confirmed, its deadline now + ms (n = 0: renew)
--   hand     keep, never with an earlier deadline, and the lease is handed over: from now on a
--            receiver completes it. With `bound` open ones in the shard it is kept, but not
--            handed over, and the reply is FULL
--   release  the lease ends; with events left the bot is ready again at its virtual finish
--   park     the lease ends; the bot is parked for ms, its events stay queued (retry in order). A bot
--            with none is parked for at most REST: the next one must show what it waits for
--   fail     like park, and counts one failure
-- A repeated release, park or fail returns STALE: unknown, not lost. Progress (n > 0) resets lost
-- leases and failures, and lowers isolate by the events that are not dead letters after an attempt.
-- Exceptions are events among the n that are not done but leave the queue: to
-- the dead letters, or to the delayed events. An exception outside the n makes the whole item BAD.
--
-- A pipeline with order_by has lanes. An exception of the kind 'lane' moves an event to the end of a
-- list of its lane: it stays queued. The kind 'lanes' is no event: it sets which lanes of the bot are set
-- aside, and with a list of a lane, the n events are those of that list. A bot whose lease ends with an
-- empty queue, but with lanes that are set aside, is parked until the first of them is due.
--
-- For counted views, events that leave the queue are noted in the book of their bot.
--
-- KEYS  the eight of shared.lua, [9] dlq, [10] due, [11] later, [12..] q:<bot> per item, each with
--       books followed by the ledger of ledger.lua; then the lists a:<lane>:<bot> that exceptions name
-- ARGV  max dead letters, keys per item (1, with books 5), quotas of a bot (see quota_of), then per
--       item: bot, run, fence, before, n, bytes, mode, ms, cost µs, bound (fail: isolate, at least;
--       hand: maximum of open leases), its own quotas or '', number of exceptions, per exception: index from 0, 'dead' reason attempts | 'later' time (ms since
--       1970) '' | 'lane' index of its list in KEYS '', or index -1, 'lanes', time until the next one
--       is due (ms) and index of the list of the n events in KEYS or 0 as ms|index, the text of the lanes
--       or ''; with books also: last sequence that leaves or '', number of ads, per ad: id, views,
--       replacements
-- Reply {clock, lowest score if bots became ready or '', next deadline if leases continue or bots are
--       parked or '', dead letters removed, those of them above a quota, then per item 'OK' | 'STALE' | 'BAD' | 'FULL'}
-- Cost  7 to 13 commands + 1 a bot, and 1 more for each of: events left, handed over, a failure; 3 a dead
--       letter; 3 an event that moves to a lane, and 4 to 6 a bot with lanes that are set aside; with books 1 + 2 a bot, or with views left 1 a bot + 2 an ad
assert(#KEYS >= 12 and #ARGV >= 15, 'complete: wrong number of arguments')
local DLQ, DUE, LATER, dead_max = KEYS[9], KEYS[10], KEYS[11], tonumber(ARGV[1])
local keys_each, quota = tonumber(ARGV[2]), quota_of(ARGV[3])
local items, bots, at, delays, none = {}, {}, 4, false, {}
while at <= #ARGV do
  local item = {
    bot = ARGV[at], run = ARGV[at + 1], fence = ARGV[at + 2], before = tonumber(ARGV[at + 3]),
    n = tonumber(ARGV[at + 4]), bytes = tonumber(ARGV[at + 5]), mode = ARGV[at + 6],
    ms = tonumber(ARGV[at + 7]), cost = tonumber(ARGV[at + 8]), bound = tonumber(ARGV[at + 9]),
    own = ARGV[at + 10], exceptions = none, at = 12 + keys_each * #items,
  }
  item.key = KEYS[item.at]
  local count, last = tonumber(ARGV[at + 11]), -1
  assert(item.key and count and at + 11 + 4 * count <= #ARGV, 'complete: wrong number of arguments')
  at = at + 12
  if count > 0 then
    item.exceptions = {}
  end
  for i = 1, count do
    if ARGV[at + 1] == 'lanes' then
      local ms, list = string.match(ARGV[at + 2], '^(%d+)|(%d+)$')
      item.lanes, item.lanes_ms, item.list = ARGV[at + 3], tonumber(ms), KEYS[tonumber(list)]
    else
      item.exceptions[#item.exceptions + 1] = {
        index = tonumber(ARGV[at]), kind = ARGV[at + 1], what = ARGV[at + 2], attempts = ARGV[at + 3],
      }
      last = math.max(last, tonumber(ARGV[at]))
      delays = delays or ARGV[at + 1] == 'later'
    end
    at = at + 4
  end
  item.fits = last < item.n
  if keys_each > 1 then
    item.last, item.ads, item.first_ad = ARGV[at], tonumber(ARGV[at + 1]), at + 2
    at = at + 2 + 3 * item.ads
  end
  items[#items + 1] = item
  bots[#bots + 1] = item.bot
end

-- Notes in the book of an item's bot that the first n of `length` events leave the queue.
local function close(item, n, length)
  local books = books()
  local book = books.at(item.at + 1)
  if n > 0 and item.last ~= '' then
    books.acknowledge(book, item.last)
  end
  if n == length then
    call('UNLINK', book.unflushed)
    return
  end
  if n > 0 then
    local replacements = 0
    for i = item.first_ad, item.first_ad + 3 * item.ads - 1, 3 do
      books.lower(book, 'v' .. ARGV[i], tonumber(ARGV[i + 1]))
      books.lower(book, 'r' .. ARGV[i], tonumber(ARGV[i + 2]))
      replacements = replacements + tonumber(ARGV[i + 2])
    end
    books.lower(book, 'r', replacements)
  end
end

-- A finish that is less than this ahead of the clock is noted at random, as this far ahead, with the
-- probability that keeps the mean. The fence is as good as a random number. So most short slices
-- leave no finish to remember and to forget.
local BRIEF = 1000 -- µs
local function noted(finish, v, fence)
  local ahead = finish - v
  if ahead >= BRIEF then
    return finish
  elseif tonumber(fence) % BRIEF < ahead then
    return v + BRIEF
  end
end

local REST = 1000 -- ms

local meta = call('HMGET', META, 'v', 'depth', 'run', 'open')
local v, depth, run = tonumber(meta[1] or 0), tonumber(meta[2] or 0), short_run(meta[3])
local open_before = tonumber(meta[4] or 0)
local open = open_before
local owners = call('HMGET', OWN, unpack(bots))
local attempts, stopped = {}, {}
local counts_any = false
if call('EXISTS', ATT, PAUSED, HELD) > 0 then -- few shards have one of them
  attempts = call('HMGET', ATT, unpack(bots))
  stopped = call('SMISMEMBER', PAUSED, unpack(bots))
  counts_any = call('EXISTS', HELD) == 1
end
if counts_any then
  local queues = {}
  for i, bot in ipairs(bots) do
    queues[i] = 'q' .. bot
  end
  learn(queues)
end
local due_before = delays and lowest(DUE) or nil
local lanes_before, lanes_now = 0, 0
local ready, busy, kept, ended, unparked, finished, empty, unheld = {}, {}, {}, {}, {}, {}, {}, {}
local removed_letters, lost_letters, removed_events, first_ready, first_due = 0, 0, 0, nil, nil
local reply = {0, '', '', 0, 0}

for i, item in ipairs(items) do
  local fence, acked, start, confirmed = string.match(owners[i] or '', '^(%d+)|(%d+)|(%d+)|(%d+)$')
  acked, start = tonumber(acked), tonumber(start)
  local repeated = acked == item.before + item.n and item.n > 0
  if fence ~= item.fence or run ~= item.run then
    reply[#reply + 1] = 'STALE'
  elseif acked ~= item.before and not repeated then
    reply[#reply + 1] = 'BAD'
  else
    local list = item.list or item.key
    local length, n = call('LLEN', list), item.n
    if repeated then
      n = 0
    else
      start = start + item.cost
    end
    if n > length or not item.fits then
      reply[#reply + 1] = 'BAD'
    else
      reply[#reply + 1] = 'OK'
      local moved, moved_bytes, failed_for_good = 0, 0, 0
      if n > 0 then
        for _, exception in ipairs(item.exceptions) do
          local entry = call('LINDEX', list, exception.index)
          if exception.kind == 'lane' then
            if moved == 0 and not is_counted('q' .. item.bot) then
              begin_count('q' .. item.bot, list, length)
            end
            local lane = KEYS[tonumber(exception.what)]
            local last = call('LINDEX', lane, -1)
            if last and string.sub(last, 4, 11) > string.sub(entry, 4, 11) then
              put_in_order(lane, entry) -- it was redriven
            else
              call('RPUSH', lane, entry)
            end
            moved, moved_bytes = moved + 1, moved_bytes + #entry
          elseif exception.kind == 'dead' then
            local gone, own_gone = dead_letters().bury(DLQ, dead_max, item.bot, entry, exception.what,
              exception.attempts, item.own == '' and quota or quota_of(item.own))
            removed_letters, lost_letters = removed_letters + gone, lost_letters + own_gone
            if exception.attempts ~= '0' then failed_for_good = failed_for_good + 1 end
          else
            local id, time = digits((struct.unpack('>I8', entry, 4))), tonumber(exception.what)
            local event = string.sub(entry, HEAD + 1)
            call('ZADD', DUE, time, id)
            if call('HSET', LATER, id, #item.bot .. ':' .. item.bot .. event) == 1 then
              hold('l' .. item.bot, 1)
              hold('L' .. item.bot, #event)
            end
            first_due = math.min(first_due or time, time)
          end
        end
        if n == length then
          empty[#empty + 1] = list
          if item.lanes then
            hold('q' .. item.bot, moved_bytes - item.bytes)
          elseif counts_any then
            unheld[#unheld + 1] = 'q' .. item.bot
          end
        else
          call('LTRIM', list, n, -1)
          if (counts_any or item.lanes) and is_counted('q' .. item.bot) then
            hold('q' .. item.bot, moved_bytes - item.bytes)
          end
        end
        removed_events = removed_events + n - moved
        if item.lanes then
          hold('a' .. item.bot, moved - (item.list and n or 0))
        end
      end
      local lanes = attempts[i] and lanes_of(attempts[i]) or ''
      if item.lanes then
        lanes_before = lanes_before + (lanes == '' and 0 or 1)
        lanes_now = lanes_now + (item.lanes == '' and 0 or 1)
        lanes = item.lanes
      end
      local left = length - n
      if item.list then left = call('LLEN', item.key) end
      if item.lanes == '' and left == 0 and n > 0 then
        hold_nothing('q' .. item.bot) -- nothing is queued any more
        hold_nothing('a' .. item.bot)
      end
      if keys_each > 1 then
        close(item, n, length)
      end
      if attempts[i] or item.mode == 'fail' or item.lanes then
        local suspect, lost, failed, isolate = parts(attempts[i] or '0|0|0|0')
        if n > 0 or item.list and item.mode ~= 'keep' then
          -- The queue is empty, so every event that failed before is settled. What counted for the
          -- first event of a lane is in the text of the lanes now.
          local settled = left == 0 and lanes == ''
          suspect, lost, failed, isolate = 0, 0, 0,
            settled and 0 or math.max(0, isolate - n + failed_for_good)
        end
        if item.mode == 'fail' then
          failed, isolate = failed + 1, math.max(isolate, item.bound)
        end
        if suspect + lost + failed + isolate == 0 and lanes == '' then
          call('HDEL', ATT, item.bot)
        else
          call('HSET', ATT, item.bot, suspect .. '|' .. lost .. '|' .. failed .. '|' .. isolate
            .. (lanes == '' and '' or '|' .. lanes))
        end
      end
      if item.mode == 'keep' or item.mode == 'hand' then
        local handed, until_ms = confirmed == '2', now_ms() + item.ms
        if item.mode == 'hand' then
          until_ms = math.max(until_ms, tonumber(call('ZSCORE', BUSY, item.bot)))
          if not handed and open < item.bound then
            handed, open = true, open + 1
          elseif not handed then
            reply[#reply] = 'FULL'
          end
        end
        kept[#kept + 1] = item.bot
        kept[#kept + 1] = fence .. '|' .. digits(item.before + item.n) .. '|' .. digits(start)
          .. (handed and '|2' or '|1')
        busy[#busy + 1] = until_ms
        busy[#busy + 1] = item.bot
      else
        ended[#ended + 1] = item.bot
        if confirmed == '2' then open = open - 1 end
        -- Lanes without a time are due, or a consumer that knows their times must look.
        local waits = lanes ~= '' and left == 0 and (item.lanes_ms or 0) > 0
        local again = left > 0 or lanes ~= '' and not waits
        if item.mode == 'release' and waits then
          busy[#busy + 1] = now_ms() + item.lanes_ms
          busy[#busy + 1] = item.bot
        elseif item.mode == 'release' then
          unparked[#unparked + 1] = item.bot
        else
          local has_events = left > 0 or lanes ~= ''
          busy[#busy + 1] = now_ms() + (has_events and item.ms or math.min(item.ms, REST))
          busy[#busy + 1] = item.bot
        end
        if item.mode == 'release' and again and stopped[i] ~= 1 then
          ready[#ready + 1] = start
          ready[#ready + 1] = item.bot
          first_ready = math.min(first_ready or start, start)
        elseif start > v then
          local finish = noted(start, v, fence)
          if finish then
            finished[#finished + 1] = finish
            finished[#finished + 1] = item.bot
          end
        end
      end
    end
  end
end

if #empty > 0 then call('DEL', unpack(empty)) end
if #unheld > 0 then call('HDEL', HELD, unpack(unheld)) end -- nothing else of this call changes them
settle()
if removed_events > 0 then call('HSET', META, 'depth', depth - removed_events) end
if lanes_before ~= lanes_now then call('HINCRBY', META, 'lanes', lanes_now - lanes_before) end
if open ~= open_before then call('HSET', META, 'open', open) end
if #kept > 0 then call('HSET', OWN, unpack(kept)) end
if #ended > 0 then call('HDEL', OWN, unpack(ended)) end
if #unparked > 0 then call('ZREM', BUSY, unpack(unparked)) end
if #busy > 0 then call('ZADD', BUSY, unpack(busy)) end
if #finished > 0 then call('ZADD', FIN, unpack(finished)) end
if #ready > 0 then
  local before = lowest(CTL)
  call('ZADD', CTL, unpack(ready))
  wake('ready', before, first_ready)
  reply[2] = digits(math.min(before or first_ready, first_ready))
end
if #busy > 0 then reply[3] = lowest(BUSY) end
if first_due then wake('due', due_before, first_due) end
reply[1] = v
reply[4] = removed_letters
reply[5] = lost_letters
return reply
