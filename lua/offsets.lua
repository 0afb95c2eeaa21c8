-- Inserted before the body of the scripts that compare offsets of a log of the bus.
--
-- Whether offset a is after b. Offsets are (ms, seq) pairs of up to 64 bits each. They are
-- compared as texts, because a Lua number would lose digits.
local function after(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)%-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)%-(%d+)$')
  if #a_ms ~= #b_ms then return #a_ms > #b_ms end
  if a_ms ~= b_ms then return a_ms > b_ms end
  if #a_seq ~= #b_seq then return #a_seq > #b_seq end
  return a_seq > b_seq
end

-- The chain of a call that covers several logs: ARGV[1] is their number, then per log its name, the
-- offset before the call, and the last one. Returns the position of each log, and how many logs
-- stand before the call, and how many behind it.
local function chain(hwm, logs)
  local names, stands, fit, behind = {}, nil, 0, 0
  for log = 1, logs do
    names[log] = ARGV[3 * log - 1]
  end
  stands = redis.call('HMGET', hwm, unpack(names))
  for log = 1, logs do
    local stand = stands[log] or '0-0'
    stands[log] = stand
    if not after(ARGV[3 * log + 1], stand) then
      behind = behind + 1
    elseif stand == ARGV[3 * log] then
      fit = fit + 1
    end
  end
  return stands, fit, behind
end
