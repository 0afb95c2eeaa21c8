#!lua
-- import: queues a replacement of the counters of an ad, from one line of an import. Each line is
-- accepted once, and in order.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua, [14] idem:<import>:
--       the last accepted line
-- ARGV  ad, total, slice µs, linger ms, the line before (must be accepted), line, the last line
--       that is accepted with it, ms that the import is remembered, bot, its quotas (see quota_of),
--       1, event as MessagePack
-- Reply {'OK' | 'DUP' (accepted before) | 'GAP' (the line before is missing), the last accepted line} |
--       {'QUOTA', name, held, limit}: nothing was changed
-- Cost  about 14 commands, 1 for a line that was accepted before
assert(#KEYS == 14 and #ARGV == 12, 'import: wrong number of arguments')
local import, ad = KEYS[14], ARGV[1]
local before, line, upto = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local done, verdict = tonumber(call('GET', import) or 0), 'DUP'
if done < before then
  return {'GAP', digits(done)}
end
if done < line then
  local refused = refusal(KEYS[9], 9)
  if refused then
    return refused
  end
  local books = books()
  local book = books.at(10)
  append(9, 9, {slice = tonumber(ARGV[3]), linger = tonumber(ARGV[4])})
  call('HINCRBY', book.unflushed, 'r' .. ad, 1)
  books.cache(book, ad, tonumber(ARGV[2]), false)
  verdict = 'OK'
end
if done < upto then
  call('SET', import, digits(upto), 'PX', ARGV[8])
  done = upto
end
return {verdict, digits(done)}
