#!lua flags=allow-oom
-- note: stores how far a log of the bus was read. Also runs on a full Redis, where streams are trimmed:
-- without the note, the next reader would consider the trimmed entries a gap.
--
-- KEYS  [1] hash: offset, entries (number ever added up to there), lag (number behind it, when it was known
--       last)
-- ARGV  offset, entries, lag (empty: not known)
-- Reply 1
-- Cost  1 command
assert(#KEYS == 1 and #ARGV == 3, 'note: wrong number of arguments')
local lag = ARGV[3] ~= '' and {'lag', ARGV[3]} or {}
redis.call('HSET', KEYS[1], 'offset', ARGV[1], 'entries', ARGV[2], unpack(lag))
return 1
