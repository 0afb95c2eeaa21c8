#!lua
-- upsert: counts views of an ad whose total was not cached, and caches it.
--
-- The total is the one stored in MongoDB plus the queued views. A document that was read during a
-- flush may already contain some of the queued views. It is refused if something was completed
-- since the miss, or if the head of the queue is not above the last sequence of the document.
-- Without a stored total, or with a queued replacement, the views are counted and the total is
-- unknown. If another call cached it meanwhile, that total is used.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua, [14] idem:<key>, [15]
--       keys:<bot> (only with an idempotency key)
-- ARGV  ad, n, cached ads (maximum of a generation), slice µs, linger ms, idempotency window ms,
--       quota of the bytes of idempotency keys (0: none), bot, its quotas (see quota_of), 1, event as
--       MessagePack, acked as the miss answered it, stored total or '', stored sequence
-- Reply {'OK', new total or ''} | {'AGAIN', acked or ''} | {'DUP', reply of the first call} |
--       {'QUOTA', name, held, limit}: nothing was changed
-- Cost  21 commands, about 6 less if the bot had events, 4 more with a key
assert(#KEYS >= 13 and #ARGV == 14, 'upsert: wrong number of arguments')
local idem, ad, n, room = KEYS[14], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local first = idem and call('GET', idem)
if first then
  return {'DUP', first}
end
local books = books()
local book = books.at(10)
local total, is_young = books.cached(book, ad)
if not total and ARGV[13] ~= '' then
  local queued = call('HMGET', book.unflushed, 'v' .. ad, 'r' .. ad)
  if not queued[2] then
    local acked = call('GET', book.acked) or ''
    local head = queued[1] and call('LINDEX', KEYS[9], 0)
    if acked ~= ARGV[12] or (head and struct.unpack('>I8', head, 4) <= tonumber(ARGV[14])) then
      return {'AGAIN', acked}
    end
    total = tonumber(ARGV[13]) + tonumber(queued[1] or 0)
  end
end
local refused, spent = refusal(KEYS[9], 8), nil
if not refused and idem then
  refused, spent = key_refusal(KEYS[15], KEY_BYTES + #idem, tonumber(ARGV[7]), tonumber(ARGV[6]))
end
if refused then
  return refused
end
append(9, 8, {slice = tonumber(ARGV[4]), linger = tonumber(ARGV[5])}, 11)
call('HINCRBY', book.unflushed, 'v' .. ad, n)
local answer = ''
if total then
  books.cache(book, ad, total + n, is_young, room)
  answer = digits(total + n)
end
if idem then
  call('SET', idem, answer, 'PX', ARGV[6])
  charge(KEYS[15], spent)
end
return {'OK', answer}
