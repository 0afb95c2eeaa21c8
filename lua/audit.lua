#!lua flags=allow-oom
-- audit: compares what bots hold with their queues, or with the delayed events and the dead letters of
-- the shard, and corrects it. Every other script changes both together, so a difference is an error
-- that stays: the data is of a version that did not count, or Redis lost a part of its last writes.
-- It sees one consistent state, also during traffic.
--
-- KEYS  the eight of shared.lua, [9] dlq, [10] later, [11..] q:<bot> per bot
-- ARGV  maximum number of entries to read, maximum of their bytes, each bot (none: the delayed events and
--       dead letters)
-- Reply {'SET', number of corrected fields} | {'MANY'}: there are more, and nothing was changed
-- Cost  reads all entries, 16 with a command; 50,000 small ones take some 50 ms. Up to 16 entries above the
--       maximum of bytes are read
assert(#KEYS >= 10 and #ARGV == #KEYS - 8, 'audit: wrong number of arguments')
local DLQ, LATER, bytes_max = KEYS[9], KEYS[10], tonumber(ARGV[2])
local PORTION = 16 -- entries per command: they may be large
local truth, fields, corrected, entries, read = {}, {}, 0, 0, 0

local function add(field, by)
  if not truth[field] then
    truth[field] = 0
    fields[#fields + 1] = field
  end
  truth[field] = truth[field] + by
end

if #KEYS > 10 then
  for i = 11, #KEYS do
    entries = entries + call('LLEN', KEYS[i])
  end
else
  entries = call('XLEN', DLQ) + call('HLEN', LATER) + call('HLEN', HELD)
end
if entries > tonumber(ARGV[1]) then
  return {'MANY'}
end

if #KEYS > 10 then
  for i = 11, #KEYS do
    local bot, length, before, large = ARGV[i - 8], call('LLEN', KEYS[i]), read, false
    local field = 'q' .. bot
    for from = 0, length - 1, PORTION do
      for _, entry in ipairs(call('LRANGE', KEYS[i], from, from + PORTION - 1)) do
        read = read + #entry
        large = large or #entry >= LARGE
      end
      if read > bytes_max then
        return {'MANY'}
      end
    end
    -- Events in lanes that are set aside count too. Their lists are not read here.
    learn({'a' .. bot, 'l' .. bot})
    local lanes = held('a' .. bot) > 0
    if not lanes and (large or length >= FEW or is_counted(field)) then
      add(field, read - before)
    end
    -- Each pending record of a product has a delayed event, or one in the queue.
    local most = held('l' .. bot) + call('LLEN', KEYS[i]) + held('a' .. bot)
    if held('n' .. bot) > most then
      add('n' .. bot, most)
      if most == 0 then
        add('N' .. bot, 0)
      end
    end
  end
else
  for _, field in ipairs(call('HKEYS', HELD)) do
    if string.find(field, '^[lLdD]') then
      add(field, 0)
    end
  end
  local from = '-'
  repeat
    local letters = call('XRANGE', DLQ, from, '+', 'COUNT', PORTION)
    for _, letter in ipairs(letters) do
      local of = dead_letters().fields_of(letter)
      add('d' .. of.bot, 1)
      add('D' .. of.bot, #of.record + tonumber(of.more or 0))
      from, read = '(' .. letter[1], read + #of.record
    end
    if read > bytes_max then
      return {'MANY'}
    end
  until #letters < PORTION
  local ids = call('HKEYS', LATER)
  for first = 1, #ids, PORTION do
    local last = math.min(first + PORTION - 1, #ids)
    for _, entry in ipairs(call('HMGET', LATER, unpack(ids, first, last))) do
      local length = string.match(entry, '^(%d+):')
      local at = #length + 2 + tonumber(length)
      local bot = string.sub(entry, #length + 2, at - 1)
      add('l' .. bot, 1)
      add('L' .. bot, #entry - at + 1)
      read = read + #entry
    end
    if read > bytes_max then
      return {'MANY'}
    end
  end
end

for first = 1, #fields, PAGE do
  local some = {unpack(fields, first, math.min(first + PAGE - 1, #fields))}
  learn(some)
  for _, field in ipairs(some) do
    if known[field] ~= truth[field] then
      hold(field, truth[field] - known[field])
      corrected = corrected + 1
    end
  end
  settle()
end
return {'SET', corrected}
