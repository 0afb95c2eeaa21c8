#!lua flags=allow-oom
-- advance: moves a shard behind a batch of logs of the bus that contains nothing for it. Otherwise
-- the shard would keep the logs from being trimmed. The chain of offsets is that of enqueue. Also
-- runs on a full Redis: the new offset replaces the old one, and trimming frees memory.
--
-- KEYS  [1] hwm (hash: log -> last offset copied)
-- ARGV  number of logs, then per log: its name, prev, last
-- Reply {'OK', offset of each log} | {'GAP', offset of each log}: then nothing has changed
-- Cost  2 commands
local logs = tonumber(ARGV[1]) or 0
assert(#KEYS == 1 and logs > 0 and #ARGV == 1 + 3 * logs, 'advance: wrong number of arguments')
local stands, fit, behind = chain(KEYS[1], logs)
if fit + behind < logs then
  return {'GAP', unpack(stands)}
end
local moved = {}
for log = 1, logs do
  local last = ARGV[3 * log + 1]
  if stands[log] == ARGV[3 * log] and after(last, stands[log]) then
    moved[#moved + 1], moved[#moved + 2], stands[log] = ARGV[3 * log - 1], last, last
  end
end
if #moved > 0 then
  redis.call('HSET', KEYS[1], unpack(moved))
end
return {'OK', unpack(stands)}
