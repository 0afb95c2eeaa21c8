#!lua
-- upsert: counts views of an ad whose total was not cached, and caches it.
--
-- The total is the one stored in MongoDB plus the queued views. A document that was read during a
-- flush may already contain some of the queued views. It is refused if something was completed
-- since the miss, or if the head of the queue is not above the last sequence of the document.
-- Without a stored total, or with a queued replacement, the views are counted and the total is
-- unknown. If another call cached it meanwhile, that total is used.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua, [14] idem:<key> (only
--       with an idempotency key)
-- ARGV  ad, n, cached ads (maximum of a generation), slice µs, linger ms, idempotency window ms, bot,
--       its quotas (see quota_of), 1, event as MessagePack, acked as the miss answered it, stored total or '', stored sequence
-- Reply {'OK', new total or ''} | {'AGAIN', acked or ''} | {'DUP', reply of the first call} |
--       {'QUOTA', name, held, limit}: nothing was changed
-- Cost  21 commands, about 6 less if the bot had events
assert(#KEYS >= 13 and #ARGV == 13, 'upsert: wrong number of arguments')
local idem, ad, n, room = KEYS[14], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local first = idem and call('GET', idem)
if first then
  return {'DUP', first}
end
local books = books()
local book = books.at(10)
local total, is_young = books.cached(book, ad)
if not total and ARGV[12] ~= '' then
  local queued = call('HMGET', book.unflushed, 'v' .. ad, 'r' .. ad)
  if not queued[2] then
    local acked = call('GET', book.acked) or ''
    local head = queued[1] and call('LINDEX', KEYS[9], 0)
    if acked ~= ARGV[11] or (head and struct.unpack('>I8', head, 4) <= tonumber(ARGV[13])) then
      return {'AGAIN', acked}
    end
    total = tonumber(ARGV[12]) + tonumber(queued[1] or 0)
  end
end
local refused = refusal(KEYS[9], 7)
if refused then
  return refused
end
append(9, 7, {slice = tonumber(ARGV[4]), linger = tonumber(ARGV[5])}, 10)
call('HINCRBY', book.unflushed, 'v' .. ad, n)
local answer = ''
if total then
  books.cache(book, ad, total + n, is_young, room)
  answer = digits(total + n)
end
if idem then
  call('SET', idem, answer, 'PX', ARGV[6])
end
return {'OK', answer}
