#!lua flags=no-writes
-- due: the delayed events of a shard that are due, oldest first, with the bot of each.
-- For promote. It sends no event: a tenant may have many large ones that are due at the same time.
--
-- KEYS  due, later
-- ARGV  [1] most events; [2] most bytes of these events, but at least one event
-- Reply now (ms); due time (ms) of the next event that is not due, or ''; then per event: id, bot. An id
--       without a readable event is left out.
-- Cost  2 commands + 1 an event
assert(#KEYS == 2 and #ARGV == 2, 'due: wrong number of arguments')
local DUE, LATER = KEYS[1], KEYS[2]
local most, bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local first = call('ZRANGE', DUE, 0, most - 1, 'WITHSCORES')
local reply, read = { now_ms(), '' }, 0
for i = 1, #first, 2 do
  if tonumber(first[i + 1]) > now_ms() then
    reply[2] = first[i + 1]
    break
  end
  -- The bot's id is behind its length: see promote.
  local stored = call('HGET', LATER, first[i]) or ''
  local colon = string.find(stored, ':', 1, true)
  read = read + #stored
  if read > bytes and #reply > 2 then
    break
  end
  local length = colon and tonumber(string.sub(stored, 1, colon - 1))
  if length then
    reply[#reply + 1] = first[i]
    reply[#reply + 1] = string.sub(stored, colon + 1, colon + length)
  end
end
return reply
