#!lua
-- replace: queues a replacement of the counters of an ad, and caches its new total if there is room.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua
-- ARGV  ad, total, slice µs, linger ms, cached ads (maximum of a generation), bot, its quotas (see
--       quota_of), 1, event as MessagePack
-- Reply {'OK', the sequence} | {'QUOTA', name, held, limit}: nothing was changed
-- Cost  10 to 14 commands, about 6 more if the bot had no events
assert(#KEYS == 13 and #ARGV == 9, 'replace: wrong number of arguments')
local books = books()
local book, ad = books.at(10), ARGV[1]
local refused = refusal(KEYS[9], 6)
if refused then
  return refused
end
local _, _, _, _, sequence = append(9, 6, {
  slice = tonumber(ARGV[3]), linger = tonumber(ARGV[4]),
})
books.count_replacement(book, ad)
local _, is_young = books.cached(book, ad)
books.cache(book, ad, tonumber(ARGV[2]), is_young, tonumber(ARGV[5]))
return {'OK', digits(sequence)}
