-- The yardstick of `fairlane-bench plan`: work of the kind that the scripts of Fairlane do.
--
-- KEYS[1]  prefix of the keys
-- ARGV[1]  the first number
-- ARGV[2]  how many numbers
-- ARGV[3]  how many lists
-- ARGV[4]  the value
--
-- Each number is one step: it appends the value to its list and counts it in the hash of its list.
-- The numbers of a call are far apart, as bots are.
local first, count, lists, value = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
for number = first, first + count - 1 do
  local list = KEYS[1] .. number * 7919 % lists
  redis.call('RPUSH', list .. ':l', value)
  redis.call('HINCRBY', list .. ':h', 'n', 1)
end
return count
