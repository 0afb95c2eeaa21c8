#!lua
-- increment_if_exists: counts views of an ad whose total is cached; otherwise changes nothing.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua, [14] idem:<key>, [15]
--       keys:<bot> (only with an idempotency key)
-- ARGV  ad, n, cached ads (maximum of a generation), slice µs, linger ms, idempotency window ms,
--       quota of the bytes of idempotency keys (0: none), bot, its quotas (see quota_of), 1, event as
--       MessagePack
-- Reply {'OK', new total} | {'MISS', acked or ''} | {'DUP', reply of the first call} |
--       {'QUOTA', name, held, limit}: nothing was changed
-- Cost  9 commands, about 6 more if the bot had no events, 4 more with a key; 5 for a miss
assert(#KEYS >= 13 and #ARGV == 11, 'increment_if_exists: wrong number of arguments')
local idem, ad, n = KEYS[14], ARGV[1], tonumber(ARGV[2])
local first = idem and call('GET', idem)
if first then
  return {'DUP', first}
end
local books = books()
local book = books.at(10)
local total, is_young = books.cached(book, ad)
if not total then
  return {'MISS', call('GET', book.acked) or ''}
end
local refused, spent = refusal(KEYS[9], 8), nil
if not refused and idem then
  refused, spent = key_refusal(KEYS[15], KEY_BYTES + #idem, tonumber(ARGV[7]), tonumber(ARGV[6]))
end
if refused then
  return refused
end
append(9, 8, {slice = tonumber(ARGV[4]), linger = tonumber(ARGV[5])})
call('HINCRBY', book.unflushed, 'v' .. ad, n)
books.cache(book, ad, total + n, is_young, tonumber(ARGV[3]))
if idem then
  call('SET', idem, digits(total + n), 'PX', ARGV[6])
  charge(KEYS[15], spent)
end
return {'OK', digits(total + n)}
