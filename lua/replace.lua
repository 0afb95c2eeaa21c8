#!lua
-- replace: queues a replacement of the counters of an ad, and caches its new total, which stays
-- cached until the replacement is applied.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua
-- ARGV  ad, total, slice µs, linger ms, bot, its quotas (see quota_of), 1,
--       event as MessagePack
-- Reply {'OK', the sequence} | {'QUOTA', name, held, limit}: nothing was changed
-- Cost  10 commands, about 6 more if the bot had no events
assert(#KEYS == 13 and #ARGV == 8, 'replace: wrong number of arguments')
local books = books()
local book, ad = books.at(10), ARGV[1]
local refused = refusal(KEYS[9], 5)
if refused then
  return refused
end
local _, _, _, _, sequence = append(9, 5, {
  slice = tonumber(ARGV[3]), linger = tonumber(ARGV[4]),
})
call('HINCRBY', book.unflushed, 'r' .. ad, 1)
books.cache(book, ad, tonumber(ARGV[2]), false)
return {'OK', digits(sequence)}
