-- Inserted before the body of the scripts that compare offsets of a bus stream.
--
-- Whether stream offset a is after b. Offsets are (ms, seq) pairs of up to 64 bits each. They are
-- compared as texts, because a Lua number would lose digits.
local function after(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)%-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)%-(%d+)$')
  if #a_ms ~= #b_ms then return #a_ms > #b_ms end
  if a_ms ~= b_ms then return a_ms > b_ms end
  if #a_seq ~= #b_seq then return #a_seq > #b_seq end
  return a_seq > b_seq
end
