#!lua
-- replace: queues a replacement of the counters of an ad, and caches its new total, which stays
-- cached until the replacement is applied.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua
-- ARGV  ad, total, slice µs, linger ms, bot, 1, event as MessagePack
-- Reply the sequence
-- Cost  about 12 commands
assert(#KEYS == 13 and #ARGV == 7, 'replace: wrong number of arguments')
local book, ad = book_at(10), ARGV[1]
local _, _, _, _, sequence = append(9, 5, {
  slice = tonumber(ARGV[3]), linger = tonumber(ARGV[4]), max = 0,
})
call('HINCRBY', book.unflushed, 'r' .. ad, 1)
cache(book, ad, tonumber(ARGV[2]), false)
return digits(sequence)
