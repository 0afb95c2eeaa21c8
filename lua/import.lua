#!lua
-- import: queues a replacement of the counters of an ad, from one line of an import. Each line is
-- accepted once, and in order.
--
-- KEYS  the eight of shared.lua, [9] q:<bot>, [10..13] the ledger of ledger.lua, [14] idem:<import>:
--       the last accepted line, [15] imports:<bot>
-- ARGV  ad, total, slice µs, linger ms, the line before (must be accepted), line, the last line
--       that is accepted with it, ms that the import is remembered, quota of the bytes of
--       idempotency keys (0: none), cached ads (maximum of a generation), bot, its quotas (see
--       quota_of), 1, event as MessagePack
-- Reply {'OK' | 'DUP' (accepted before) | 'GAP' (the line before is missing), the last accepted line} |
--       {'QUOTA', name, held, limit}: nothing was changed
-- Cost  about 16 commands, 2 more for the first line, 1 for a line that was accepted before
assert(#KEYS == 15 and #ARGV == 14, 'import: wrong number of arguments')
local import, ad, kept, spent = KEYS[14], ARGV[1], tonumber(ARGV[8]), nil
local PAUSE_MS = 3600000
local before, line, upto = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local done, verdict = tonumber(call('GET', import) or 0), 'DUP'
if done < before then
  return {'GAP', digits(done)}
end
if done < line then
  local refused, limit = refusal(KEYS[9], 11), tonumber(ARGV[9])
  -- An import counts when it begins, and when it goes on after a pause: each line prolongs its key.
  if not refused and limit > 0 and (done == 0 or call('PTTL', import) < kept - PAUSE_MS) then
    refused, spent = key_refusal(KEYS[15], KEY_BYTES + #import, limit, kept)
  end
  if refused then
    return refused
  end
  local books = books()
  local book = books.at(10)
  append(9, 11, {slice = tonumber(ARGV[3]), linger = tonumber(ARGV[4])})
  books.count_replacement(book, ad)
  local _, is_young = books.cached(book, ad)
  books.cache(book, ad, tonumber(ARGV[2]), is_young, tonumber(ARGV[10]))
  verdict = 'OK'
end
if done < upto then
  call('SET', import, digits(upto), 'PX', kept)
  charge(KEYS[15], spent)
  done = upto
end
return {verdict, digits(done)}
