#!lua
-- recount: redrives a dead letter of the pipeline `counters`, at the tail and with a new sequence:
-- the old sequence would be below the one stored with its ad. It is counted now, if possible.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua, [14] dlq
-- ARGV  id of the dead letter, cached ads (maximum of a generation), slice µs, linger ms, ad or '', n,
--       bot, '', 1, event as MessagePack
-- Reply 1, or 0 if the dead letter does not exist
-- Cost  about 16 commands
assert(#KEYS == 14 and #ARGV == 10, 'recount: wrong number of arguments')
local letter = call('XRANGE', KEYS[14], ARGV[1], ARGV[1])
if #letter == 0 then
  return 0
end
call('XDEL', KEYS[14], ARGV[1])
dead_letters().unbury(letter)
append(9, 7, {slice = tonumber(ARGV[3]), linger = tonumber(ARGV[4])})
if ARGV[5] ~= '' then
  local books = books()
  books.count(books.at(10), ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[2]))
end
return 1
