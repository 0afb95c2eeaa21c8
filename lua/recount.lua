#!lua
-- recount: puts a dead letter of the pipeline `counters` back, at the tail and with a new sequence:
-- with the old one it would be below what its ad has already. It is counted now, if it can be.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua, [14] dlq
-- ARGV  id of the dead letter, cached ads (most of a generation), slice µs, linger ms, ad or '', n,
--       bot, 1, event as MessagePack
-- Reply 1, or 0 when there is no such dead letter
-- Cost  about 13 commands
assert(#KEYS == 14 and #ARGV == 9, 'recount: wrong number of arguments')
if call('XDEL', KEYS[14], ARGV[1]) == 0 then
  return 0
end
append(9, 7, {slice = tonumber(ARGV[3]), linger = tonumber(ARGV[4]), max = 0})
if ARGV[5] ~= '' then
  count(book_at(10), ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[2]))
end
return 1
