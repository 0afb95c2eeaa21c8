#!lua flags=allow-oom
-- recover: the first command on every new connection, per pipeline and shard. If the server's run
-- id differs from the stored one, the server may have lost its last writes: events that lease
-- holders removed may be back. So every lease of the older run is revoked, without counting an
-- attempt.
--
-- KEYS  the eight of shared.lua
-- ARGV  run id of the server, slice µs
-- Reply number of revoked leases, -1 if the run is known
-- Cost  2 commands if the run is known, otherwise about 10 + 1 per 64 leases
assert(#KEYS == 8 and #ARGV == 2, 'recover: wrong number of arguments')
local meta = call('HMGET', META, 'run', 'v')
if meta[1] == ARGV[1] then
  return -1
end
-- Ready again in the order in which the leases were granted.
local owners, leased, fences = call('HGETALL', OWN), {}, {}
for i = 1, #owners, 2 do
  leased[#leased + 1] = owners[i]
  fences[owners[i]] = parts(owners[i + 1])
end
table.sort(leased, function(a, b) return fences[a] < fences[b] end)
local v, slice = tonumber(meta[2] or 0), tonumber(ARGV[2])
for first = 1, #leased, 64 do
  local bots = {}
  for i = first, math.min(first + 63, #leased) do
    bots[#bots + 1] = leased[i]
  end
  revoke(bots, v)
  join(at_rest(bots), v, slice, false, first - 1)
end
call('HSET', META, 'run', ARGV[1])
return #leased
