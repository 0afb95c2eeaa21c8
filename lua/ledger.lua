-- Shared by the scripts that count views: inserted after shared.lua when a script is loaded.
--
-- The queue of a bot in the pipeline `counters` has a book of four keys:
--   [1] unflushed:<bot>  hash         'v' .. ad -> views queued, 'r' .. ad -> replacements queued,
--                                     'r' -> replacements of all ads; absent if the queue is empty
--   [2] total:0:<bot>    hash         ad -> run|total: the cached totals, in two generations of a
--   [3] total:1:<bot>                 day: the parity of the server's day tells the young one
--   [4] acked:<bot>      string, 1 h  the highest completed sequence
--
-- An ad is in at most one generation. A generation expires when the day after the next one begins, whose
-- young generation has the same key. A total is valid only in the run of the server that it names: after
-- Redis lost its last writes, it may be lower than the total in MongoDB.
--
-- The functions are made on first use, because most calls of `enqueue` and `complete` are for queues
-- without books.
local made_for_books
local function books()
  if not made_for_books then
    local DAY_MS, ACKED_SECONDS = 86400000, 3600
    local TODAY = math.floor(now_ms() / DAY_MS)

    local run_now -- read once, by scripts that need it

    -- The book whose keys start at KEYS[at].
    local function book_at(at)
      run_now = run_now or short_run(call('HGET', META, 'run'))
      return {
        unflushed = KEYS[at], young = KEYS[at + 1 + TODAY % 2], old = KEYS[at + 2 - TODAY % 2],
        acked = KEYS[at + 3],
      }
    end

    -- The total in `text`, if it belongs to this run of the server.
    local function valid(text)
      local run, total = string.match(text or '', '^(.*)|(%d+)$')
      return run == run_now and tonumber(total) or nil
    end

    -- The cached total of an ad, or nil, and whether the young generation has it.
    local function cached(book, ad)
      local total = valid(call('HGET', book.young, ad))
      if total then
        return total, true
      end
      return valid(call('HGET', book.old, ad)), false
    end

    -- Caches a total in the young generation. A generation with `room` ads is full, and accepts only
    -- ads that it has: so no bot can fill Redis with totals.
    local function cache(book, ad, total, is_young, room)
      local text = run_now .. '|' .. digits(total)
      if is_young then
        call('HSET', book.young, ad, text)
      elseif call('HLEN', book.young) < room or call('HEXISTS', book.young, ad) == 1 then
        call('HSET', book.young, ad, text)
        call('HDEL', book.old, ad)
        call('PEXPIREAT', book.young, (TODAY + 2) * DAY_MS)
      elseif call('HEXISTS', book.old, ad) == 1 then
        call('HSET', book.old, ad, text)
      end
    end

    -- Adds `n` queued views of an ad, to its cached total too.
    local function count(book, ad, n, room)
      call('HINCRBY', book.unflushed, 'v' .. ad, n)
      local total, is_young = cached(book, ad)
      if total then
        cache(book, ad, total + n, is_young, room)
      end
    end

    -- Adds a queued replacement of an ad.
    local function count_replacement(book, ad)
      call('HINCRBY', book.unflushed, 'r' .. ad, 1)
      call('HINCRBY', book.unflushed, 'r', 1)
    end

    -- Lowers a count of queued views or replacements after events left the queue.
    local function lower(book, field, by)
      if by > 0 and call('HINCRBY', book.unflushed, field, -by) <= 0 then
        call('HDEL', book.unflushed, field)
      end
    end

    -- Notes the highest completed sequence.
    local function acknowledge(book, sequence)
      call('SET', book.acked, sequence, 'EX', ACKED_SECONDS)
    end

    made_for_books = {
      at = book_at, cached = cached, cache = cache, count = count,
      count_replacement = count_replacement, lower = lower, acknowledge = acknowledge,
    }
  end
  return made_for_books
end
