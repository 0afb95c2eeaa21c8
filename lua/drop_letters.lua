#!lua flags=allow-oom
-- drop_letters: deletes dead letters, and what their bots hold with them.
--
-- KEYS  the eight of shared.lua, [9] dlq
-- ARGV  'ids' and ids, or 'older' and the age (ms) of the oldest letters to keep (at most 100 a call)
-- Reply number of deleted letters
-- Cost  about 5 commands, 1 more for each id
assert(#KEYS == 9 and #ARGV >= 2 and (ARGV[1] == 'ids' or #ARGV == 2),
  'drop_letters: wrong number of arguments')
local DLQ, letters, ids = KEYS[9], {}, {}
if ARGV[1] == 'older' then
  -- Ids have the time of the server, so the age is one by its clock.
  local newest = math.max(0, now_ms() - tonumber(ARGV[2]) - 1)
  letters = call('XRANGE', DLQ, '-', digits(newest), 'COUNT', 100)
else
  for i = 2, #ARGV do
    letters[#letters + 1] = call('XRANGE', DLQ, ARGV[i], ARGV[i])[1]
  end
end
if #letters == 0 then
  return 0
end
for i, letter in ipairs(letters) do
  ids[i] = letter[1]
end
call('XDEL', DLQ, unpack(ids))
dead_letters().unbury(letters)
settle()
return #ids
