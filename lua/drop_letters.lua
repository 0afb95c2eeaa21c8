#!lua flags=allow-oom
-- drop_letters: deletes dead letters, and what their bots hold with them, a portion per call.
--
-- KEYS  the eight of shared.lua, [9] dlq
-- ARGV  [1] most bytes of records that are read, but at least one letter; [2] 'ids' and ids, or 'older'
--       and the age (ms) of the oldest letters to keep; at most 100 a call
-- Reply number of deleted letters; 1 if there may be more: the same call goes on with them
-- Cost  about 5 commands + 1 a letter
assert(#KEYS == 9 and #ARGV >= 3 and (ARGV[2] == 'ids' or #ARGV == 3),
  'drop_letters: wrong number of arguments')
local DLQ, bytes, letters, ids, read, more = KEYS[9], tonumber(ARGV[1]), {}, {}, 0, false

-- Takes the first letter of a range. Whether there was one. Letters may be large, so each is read alone.
local function take(from, last)
  local letter = call('XRANGE', DLQ, from, last, 'COUNT', 1)[1]
  if letter then
    letters[#letters + 1], ids[#ids + 1] = letter, letter[1]
    read = read + #(dead_letters().fields_of(letter).record or '')
  end
  return letter ~= nil
end

if ARGV[2] == 'older' then
  -- Ids have the time of the server, so the age is one by its clock.
  local from, last = '-', digits(math.max(0, now_ms() - tonumber(ARGV[3]) - 1))
  repeat
    more = take(from, last)
    from = more and '(' .. ids[#ids]
  until not more or #ids == 100 or read >= bytes
else
  local at = 3
  repeat
    take(ARGV[at], ARGV[at])
    at = at + 1
    more = at <= #ARGV
  until not more or read >= bytes
end
if #ids > 0 then
  call('XDEL', DLQ, unpack(ids))
  dead_letters().unbury(letters)
  settle()
end
return {#ids, more and 1 or 0}
