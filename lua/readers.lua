#!lua flags=allow-oom
-- readers: divides the logs of a bus among the processes that read it. Each keeps an equal share; what
-- it has beyond that becomes free, and free logs go to the readers with too few. A reader that does
-- not come again within its time to live loses its logs. Only for efficiency: two readers of one
-- log do no harm.
--
-- KEYS  [1] hash: r<token> -> when the reader expires (ms since 1970), l<log> -> token of its reader
-- ARGV  token of the caller, ttl ms (0: the caller reads nothing any more), then the names of all logs
-- Reply places from 0 of the logs that the caller reads
-- Cost  4 commands
assert(#KEYS == 1 and #ARGV >= 3, 'readers: wrong number of arguments')
local KEY, token, ttl, logs = KEYS[1], ARGV[1], tonumber(ARGV[2]), #ARGV - 2
local time, all = redis.call('TIME'), redis.call('HGETALL', KEY)
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Per reader the number of its logs; per log its reader; the fields that are outdated.
local has, reader, readers, gone = {}, {}, 0, {}
if ttl > 0 then
  has[token], readers = 0, 1
end
for i = 1, #all, 2 do
  local kind, name = string.sub(all[i], 1, 1), string.sub(all[i], 2)
  if kind == 'l' then
    reader[name] = all[i + 1]
  elseif name ~= token and tonumber(all[i + 1]) > now then
    has[name], readers = 0, readers + 1
  elseif name ~= token or ttl == 0 then
    gone[#gone + 1] = all[i]
  end
end
for i = 3, #ARGV do
  local whose = reader[ARGV[i]]
  if has[whose] then
    has[whose] = has[whose] + 1
  end
end
for log, whose in pairs(reader) do
  if not has[whose] then
    reader[log] = nil
    gone[#gone + 1] = 'l' .. log
  end
end
if ttl == 0 then
  if #gone > 0 then
    redis.call('HDEL', KEY, unpack(gone))
  end
  return {}
end
-- Of 16 logs and three readers, one may have six and the others five.
local share, larger = math.floor(logs / readers), 0
for other, count in pairs(has) do
  if other ~= token and count > share then
    larger = larger + 1
  end
end
if larger < logs % readers then
  share = share + 1
end
local mine, set = {}, {'r' .. token, string.format('%d', now + ttl)}
for i = 3, #ARGV do
  if reader[ARGV[i]] == token then
    if #mine < share then
      mine[#mine + 1] = i - 3
    else
      reader[ARGV[i]] = false -- Not taken again below.
      gone[#gone + 1] = 'l' .. ARGV[i]
    end
  end
end
for i = 3, #ARGV do
  if #mine < share and reader[ARGV[i]] == nil then
    mine[#mine + 1] = i - 3
    set[#set + 1], set[#set + 2] = 'l' .. ARGV[i], token
  end
end
for i = 1, #gone, 1000 do
  redis.call('HDEL', KEY, unpack(gone, i, math.min(i + 999, #gone)))
end
for i = 1, #set, 1000 do
  redis.call('HSET', KEY, unpack(set, i, math.min(i + 999, #set)))
end
redis.call('PEXPIRE', KEY, ttl)
return mine
