-- What the scripts share; it is put in front of each, after a line that defines SCHEMA.
--
-- An account is a hash. Its amounts are texts of three whole numbers, "usd tokens calls", so that they can be read with redis-cli and
-- need one HMGET; a cap that is no limit is "-". Numbers are made texts by %.0f alone: tostring() rounds to 14 digits.
-- A hold is a string: its state (o open, s settled, x expired, r released), its amount and its accounts as JSON.
-- Everything is read and checked before anything is written: a script that fails half way is not undone.
local P, MAX, ZERO, KEEP, PERIODS_KEPT = KEYS[1], 9007199254740991, '0 0 0', 86400, 3456000
local call, match, format, find = redis.call, string.match, string.format, string.find

local function refuse(text)
  error('RUNGUARD ' .. text, 0)
end

local function text(usd, tokens, calls)
  return format('%.0f %.0f %.0f', usd, tokens, calls)
end

-- An amount that a caller sent.
local function amount(given)
  local usd, tokens, calls = match(given or '', '^(%d+) (%d+) (%d+)$')
  if not usd or find(given, '^0%d') or find(given, ' 0%d') then
    refuse('amount: not three whole numbers')
  end
  usd, tokens, calls = tonumber(usd), tonumber(tokens), tonumber(calls)
  if usd > MAX or tokens > MAX or calls > MAX then
    refuse('amount: more than 2^53 - 1')
  end
  return usd, tokens, calls
end

local function check_caps(given)
  if not match(given, '^%S+ %S+ %S+$') then
    refuse('amount: not three caps')
  end
  for cap in string.gmatch(given, '%S+') do
    if cap ~= '-' then
      amount(cap .. ' 0 0')
    end
  end
end

-- An amount as it is stored.
local function stored(field)
  if not field or field == ZERO then
    return 0, 0, 0
  end
  local usd, tokens, calls = match(field, '^(%d+) (%d+) (%d+)$')
  if not usd then
    refuse('damaged')
  end
  return tonumber(usd), tonumber(tokens), tonumber(calls)
end

local function stored_caps(field)
  local usd, tokens, calls = match(field, '^(%S+) (%S+) (%S+)$')
  if not usd then
    refuse('damaged')
  end
  return tonumber(usd) or math.huge, tonumber(tokens) or math.huge, tonumber(calls) or math.huge
end

local function clock()
  local time = call('TIME')
  return time[1] + time[2] / 1000000, format('%s.%06d', time[1], time[2]), time[2] % 64 == 0
end

local function moment(given)
  if given == '-' then
    return nil
  end
  local at = match(given, '^%-?%d+%.?%d*$') and tonumber(given)
  if not at then
    refuse('time: not a number')
  end
  return at
end

-- caps, spent, held, granted, overrun, expired, closed; nil when there is no such account.
local function load(key)
  local fields = call('HMGET', P .. 'a:' .. key, 'caps', 'spent', 'held', 'granted', 'overrun', 'expired', 'closed')
  if fields[1] then
    return fields
  end
  return nil
end

local function shown(account)
  return account[1] .. ' ' .. (account[2] or ZERO) .. ' ' .. (account[3] or ZERO) .. ' ' .. (account[4] or ZERO) .. ' '
    .. (account[5] or ZERO) .. ' ' .. (account[6] or ZERO) .. ' ' .. (account[7] or '0')
end

local function drop(key, scope)
  call('DEL', P .. 'a:' .. key, P .. 'm:' .. key)
  call('ZREM', P .. 'accounts', key)
  call('ZREM', P .. 'passing', key)
  if scope then
    call('SREM', P .. 's:' .. scope, key)
  end
end

-- Write the indexes of a new account, and its fixed fields. A new period is the moment to forget very old ones.
local function create(key, scope, line, caps, now, stamp)
  local ends, window = match(line, '^%S+ (%S+) %S+ %S+ %S+ (.*)$')
  call('ZADD', P .. 'accounts', ends == '-' and '+inf' or ends, key)
  call('SADD', P .. 's:' .. scope, key)
  if find(scope, '^run') then
    call('ZADD', P .. 'passing', stamp, key)
  end
  if ends ~= '-' then
    for _, old in ipairs(call('ZRANGEBYSCORE', P .. 'accounts', '-inf', format('(%.6f', now - PERIODS_KEPT), 'LIMIT', 0, 16)) do
      local found = redis.pcall('HMGET', P .. 'a:' .. old, 'held', 'scope', 'updated')
      if not found.err and (found[1] or ZERO) == ZERO and tonumber(found[3] or 0) < now - PERIODS_KEPT and old ~= key then
        drop(old, found[2])
      end
    end
  end
  call('HSET', P .. 'a:' .. key, 'scope', scope, 'window', window, 'ends', ends, 'caps', caps, 'updated', stamp)
end

-- Take the hold away and put the actual amount in the place of what was booked; an excess that breaks a cap closes the account.
-- One of hold and booked is zero.
local function book(account, h1, h2, h3, b1, b2, b3, a1, a2, a3)
  local s1, s2, s3 = stored(account[2])
  local held1, held2, held3 = stored(account[3])
  held1, held2, held3 = math.max(held1 - h1, 0), math.max(held2 - h2, 0), math.max(held3 - h3, 0)
  s1, s2, s3 = math.max(s1 + a1 - b1, 0), math.max(s2 + a2 - b2, 0), math.max(s3 + a3 - b3, 0)
  account[2], account[3] = text(s1, s2, s3), text(held1, held2, held3)
  local m1, m2, m3 = a1 - h1 - b1, a2 - h2 - b2, a3 - h3 - b3
  if m1 > 0 or m2 > 0 or m3 > 0 then
    local c1, c2, c3 = stored_caps(account[1])
    local g1, g2, g3 = stored(account[4])
    local d1, d2, d3 = s1 + held1 - c1 - g1, s2 + held2 - c2 - g2, s3 + held3 - c3 - g3
    if (m1 > 0 and d1 > 0) or (m2 > 0 and d2 > 0) or (m3 > 0 and d3 > 0) then
      local o1, o2, o3 = stored(account[5])
      if m1 > 0 and d1 > 0 then o1 = math.max(o1, math.min(d1, o1 + m1)) end
      if m2 > 0 and d2 > 0 then o2 = math.max(o2, math.min(d2, o2 + m2)) end
      if m3 > 0 and d3 > 0 then o3 = math.max(o3, math.min(d3, o3 + m3)) end
      account[5], account[7], account.over = text(o1, o2, o3), '1', true
    end
  end
end

local function save(key, account, stamp)
  local at = P .. 'a:' .. key
  call('HSET', at, 'spent', account[2] or ZERO, 'held', account[3] or ZERO, 'updated', stamp)
  if account.over then
    call('HSET', at, 'overrun', account[5], 'closed', '1')
  end
  if account.late then
    call('HSET', at, 'expired', account[6])
  end
end

-- Open holds stand in "holds" with the time of their end, finished ones with minus the time at which they were finished.
local function finish(hold, value, now)
  call('ZADD', P .. 'holds', format('%.6f', -now), hold)
  call('SET', P .. 'h:' .. hold, value, 'EX', KEEP)
end

local function forget(now)
  call('ZREMRANGEBYSCORE', P .. 'holds', format('(%.6f', KEEP - now), '(0')
end

-- Charge holds whose worker never came back. An account that cannot be read is left alone: it must not stop the others.
local function expire(now, stamp, most)
  local found = call('ZRANGEBYSCORE', P .. 'holds', 0, format('%.6f', now), 'LIMIT', 0, most)
  for i = 1, #found do
    local hold = found[i]
    local value = redis.pcall('GET', P .. 'h:' .. hold)
    local state, wanted, keys
    if type(value) == 'string' then
      state, wanted, keys = match(value, '^(%l) (%d+ %d+ %d+) (.*)$')
    end
    if state == 'o' then
      local a1, a2, a3 = stored(wanted)
      local good, list = pcall(cjson.decode, keys)
      for _, key in ipairs(good and list or {}) do
        local fine, account = pcall(load, key)
        if fine and account and pcall(book, account, a1, a2, a3, 0, 0, 0, a1, a2, a3) then
          local sure, e1, e2, e3 = pcall(stored, account[6])
          if sure then
            account[6], account.late = text(e1 + a1, e2 + a2, e3 + a3), true
            save(key, account, stamp)
          end
        end
      end
      finish(hold, 'x ' .. wanted .. ' ' .. keys, now)
    else
      call('ZREM', P .. 'holds', hold)
    end
  end
  return #found
end

-- Marker, version of the control document, and a hold if one is named.
local function state(hold)
  local found = call('MGET', P .. 'schema', P .. 'v:control', P .. 'h:' .. (hold or ''))
  if found[1] ~= SCHEMA then
    refuse('schema')
  end
  return found[2] or '0', found[3]
end

-- Accounts in full, for a caller that does not know them.
local function full(reply, key, account)
  local facts = call('HMGET', P .. 'a:' .. key, 'scope', 'window', 'ends')
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4], reply[n + 5] = key, facts[1] or '', facts[2] or '', facts[3] or '-', shown(account)
end
