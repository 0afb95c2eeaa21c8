#!lua flags=allow-oom
-- note: writes down how far a bus stream was read. Runs on a full Redis too: a stream is trimmed
-- there, and without the note its next reader takes that for a gap.
--
-- KEYS  [1] hash: offset, entries (how many were ever added up to there)
-- ARGV  offset, entries
-- Reply 1
-- Cost  1 command
assert(#KEYS == 1 and #ARGV == 2, 'note: wrong number of arguments')
redis.call('HSET', KEYS[1], 'offset', ARGV[1], 'entries', ARGV[2])
return 1
