-- Inserted before the body of the scripts that drop repeated events of the bus.

-- Whether one of the names, 16 bytes each, is not noted (any more).
local function forgotten(now, before, names)
  for at = 1, #names, 16 do
    local name = string.sub(names, at, at + 15)
    if redis.call('HEXISTS', now, name) + redis.call('HEXISTS', before, name) == 0 then
      return true
    end
  end
  return false
end

-- The places from 0 of the names, 16 bytes each, that were noted within the window (ms); and the lifetime
-- of `now`, which lives for two windows and becomes `before` after one.
local function repeated(now, before, names, window)
  local fields, seen = {}, {}
  for at = 1, #names, 16 do
    fields[#fields + 1] = string.sub(names, at, at + 15)
  end
  if #fields == 0 then
    return seen
  end
  local left = redis.call('PTTL', now)
  if left > 2 * window then
    redis.call('PEXPIRE', now, 2 * window) -- The window is shorter than it was.
  elseif left >= 0 and left < window then
    redis.call('RENAME', now, before)
    left = -2
  end
  local in_now, in_before = redis.call('HMGET', now, unpack(fields)), redis.call('HMGET', before, unpack(fields))
  for place = 1, #fields do
    if in_now[place] or in_before[place] then
      seen[#seen + 1] = place - 1
    end
  end
  return seen, left
end

-- Notes names. `left`: the lifetime of `now`, as repeated() returned it.
local function remember(now, names, window, left)
  if names == '' then
    return
  end
  local noted = {}
  for at = 1, #names, 16 do
    noted[#noted + 1], noted[#noted + 2] = string.sub(names, at, at + 15), ''
  end
  redis.call('HSET', now, unpack(noted))
  if left < 0 then
    redis.call('PEXPIRE', now, 2 * window)
  end
end
