-- What the scripts share; it is put in front of each, after a line that defines SCHEMA. The script itself becomes a function.
--
-- An account is a hash. Its amounts are texts of three whole numbers, "usd tokens calls": legible in redis-cli, and one HMGET gets
-- them all; a cap that is no limit is "-". Numbers become texts by %.0f alone: tostring() rounds to 14 digits.
-- A hold is a string: its state (o open, s settled, x expired, r released), its amount, and its accounts, each as "length:key".
-- Everything is read and checked before anything is written: a script that fails half way is not undone.
--
-- A line of a reservation is three arguments: key, scope, "begins ends cap cap cap window", with "-" for what there is not.
-- Functions are made anew for every call, so what is seldom needed is made in seldom().
local P, MAX, ZERO, KEEP, PERIODS_KEPT, HUGE = KEYS[1], 9007199254740991, '0 0 0', 86400, 3456000, math.huge
local LINE = '^(%S+) (%S+) ((%S+) (%S+) (%S+)) (.*)$'
local call, match, format, find = redis.call, string.match, string.format, string.find
-- The last two arguments are the identity of the store that the caller has worked with, and the number of the request, which ends the answer.
local NUMBER, ID = table.remove(ARGV), table.remove(ARGV)
local LOADED, WORLD = {}, nil -- what was read already

local function refuse(text)
  error('RUNGUARD ' .. text, 0)
end

-- A script that changes accounts, or tells of them, does so in that store and in no other one.
local function same(identity, schema)
  if identity ~= ID then
    refuse('identity')
  end
  if schema ~= SCHEMA then
    refuse('schema')
  end
end

local function same_store()
  local found = call('MGET', P .. 't:identity', P .. 'schema')
  same(found[1], found[2])
end

-- An amount that a caller sent.
local function amount(given)
  local usd, tokens, calls = match(given, '^(%d+) (%d+) (%d+)$')
  if not usd or find(given, '%f[%d]0%d') then
    refuse('amount: not three whole numbers')
  end
  usd, tokens, calls = tonumber(usd), tonumber(tokens), tonumber(calls)
  if usd > MAX or tokens > MAX or calls > MAX then
    refuse('amount: more than 2^53 - 1')
  end
  return usd, tokens, calls
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

-- caps, spent, held, granted, overrun, expired, closed; nil when there is no such account.
local function load_again(key)
  local fields = call('HMGET', P .. 'a:' .. key, 'caps', 'spent', 'held', 'granted', 'overrun', 'expired', 'closed')
  LOADED[key] = fields[1] and fields or nil
  return LOADED[key]
end

-- The same, read once: what a script changes in it, it writes too.
local function load(key)
  return LOADED[key] or load_again(key)
end

-- Seconds and microseconds; the version of the control document; the value of a hold. Checks the store, once.
local function look(hold)
  if not WORLD then
    local found = call('MGET', P .. 't:identity', P .. 'v:control', P .. 'h:' .. hold, P .. 'schema')
    same(found[1], found[4])
    WORLD = { call('TIME'), found[2] or '0' }
    return WORLD[1], WORLD[2], found[3]
  end
  return WORLD[1], WORLD[2], call('GET', P .. 'h:' .. hold)
end

-- The last three amounts and the flag are left out as long as they are nothing.
local function shown(account)
  local text = account[1] .. ' ' .. (account[2] or ZERO) .. ' ' .. (account[3] or ZERO)
  if account[4] or account[5] or account[6] or account[7] then
    return text .. ' ' .. (account[4] or ZERO) .. ' ' .. (account[5] or ZERO) .. ' ' .. (account[6] or ZERO) .. ' ' .. (account[7] or '0')
  end
  return text
end

local function check_caps(given)
  for cap in string.gmatch(given, '%S+') do
    if cap ~= '-' then
      amount(cap .. ' 0 0')
    end
  end
end

-- Take the hold away and put the actual amount in the place of what was booked; an excess that breaks a cap closes the account.
-- One of hold and booked is zero. Differences come first, so that no sum on the way is beyond what a double counts exactly.
local function book(account, h1, h2, h3, b1, b2, b3, a1, a2, a3)
  local s1, s2, s3 = stored(account[2])
  local held1, held2, held3 = stored(account[3])
  local max, min = math.max, math.min
  held1, held2, held3 = max(held1 - h1, 0), max(held2 - h2, 0), max(held3 - h3, 0)
  s1, s2, s3 = max(s1 + (a1 - b1), 0), max(s2 + (a2 - b2), 0), max(s3 + (a3 - b3), 0)
  account[2], account[3] = format('%.0f %.0f %.0f', s1, s2, s3), format('%.0f %.0f %.0f', held1, held2, held3)
  local m1, m2, m3 = a1 - h1 - b1, a2 - h2 - b2, a3 - h3 - b3
  if m1 > 0 or m2 > 0 or m3 > 0 then
    local c1, c2, c3 = match(account[1], '^(%S+) (%S+) (%S+)$')
    if not c1 then
      refuse('damaged')
    end
    local g1, g2, g3 = stored(account[4])
    c1, c2, c3 = tonumber(c1) or HUGE, tonumber(c2) or HUGE, tonumber(c3) or HUGE
    local d1, d2, d3 = (s1 - c1) + (held1 - g1), (s2 - c2) + (held2 - g2), (s3 - c3) + (held3 - g3)
    local over1, over2, over3 = m1 > 0 and d1 > 0, m2 > 0 and d2 > 0, m3 > 0 and d3 > 0
    if over1 or over2 or over3 then
      local o1, o2, o3 = stored(account[5])
      o1 = over1 and max(o1, min(d1, o1 + m1)) or o1
      o2 = over2 and max(o2, min(d2, o2 + m2)) or o2
      o3 = over3 and max(o3, min(d3, o3 + m3)) or o3
      account[5], account[7], account.over = format('%.0f %.0f %.0f', o1, o2, o3), '1', true
    end
  end
end

local function save(key, account, stamp)
  local at = P .. 'a:' .. key
  call('HSET', at, 'spent', account[2], 'held', account[3], 'updated', stamp)
  if account.over then
    call('HSET', at, 'overrun', account[5], 'closed', '1')
  end
  if account.late then
    call('HSET', at, 'expired', account[6])
  end
end

local function seldom()
  local it = {}

  function it.number(given)
    local number = tonumber(given)
    if not number or number ~= number then
      refuse('time: not a number')
    end
    return number
  end

  function it.keys(names)
    local keys, at = {}, 1
    while at <= #names do
      local from, to, length = find(names, '^(%d+):', at)
      if not from then
        refuse('damaged')
      end
      keys[#keys + 1] = names:sub(to + 1, to + length)
      at = to + length + 1
    end
    return keys
  end

  function it.drop(key, scope)
    call('DEL', P .. 'a:' .. key, P .. 'm:' .. key)
    call('ZREM', P .. 'accounts', key)
    call('ZREM', P .. 'passing', key)
    if scope then
      call('SREM', P .. 's:' .. scope, key)
    end
  end

  -- Where the ids of all records of a kind about one thing are, oldest first.
  function it.index(kind, ref)
    return P .. 'i:' .. #kind .. ':' .. kind .. ':' .. ref
  end

  -- What is of another type fails here, before anything is written.
  function it.check_index(kind, ref)
    call('LLEN', it.index(kind, ref))
    call('SISMEMBER', P .. 'kinds', kind)
    call('XLEN', P .. 'r:' .. kind)
  end

  -- Add a record. Beyond the most, the oldest go, two for each new one: an index names what is there and nothing else.
  function it.append(kind, ref, text, most, stamp)
    local at = P .. 'r:' .. kind
    call('SADD', P .. 'kinds', kind)
    call('RPUSH', it.index(kind, ref), call('XADD', at, '*', 'at', stamp, 'ref', ref, 'text', text))
    local surplus = call('XLEN', at) - most
    if surplus > 0 then
      it.drop_records(kind, call('XRANGE', at, '-', '+', 'COUNT', math.min(surplus, 2)))
    end
  end

  -- Drop the oldest records of a kind: each is the first of its index.
  function it.drop_records(kind, records)
    for _, record in ipairs(records) do
      call('LREM', it.index(kind, record[2][4]), 1, record[1])
      call('XDEL', P .. 'r:' .. kind, record[1])
    end
  end

  -- Look at the indexes of an account before anything is written: what is of another type fails here.
  function it.ready(scope)
    call('ZCARD', P .. 'accounts')
    call('ZCARD', P .. 'passing')
    call('ZCARD', P .. 'holds')
    call('SCARD', P .. 's:' .. scope)
  end

  -- Write the indexes of a new account, and its fixed fields. A new period is the moment to forget very old ones.
  function it.create(key, scope, line, now, stamp)
    local _, ends, caps, _, _, _, window = match(line, LINE)
    call('ZADD', P .. 'accounts', ends == '-' and '+inf' or ends, key)
    call('SADD', P .. 's:' .. scope, key)
    if find(scope, '^run') or find(scope, '^session:') then
      call('ZADD', P .. 'passing', stamp, key)
    end
    if ends ~= '-' then
      local before = now - PERIODS_KEPT
      for _, old in ipairs(call('ZRANGEBYSCORE', P .. 'accounts', '-inf', format('(%.6f', before), 'LIMIT', 0, 16)) do
        local found = redis.pcall('HMGET', P .. 'a:' .. old, 'held', 'scope', 'updated')
        if not found.err and old ~= key and (found[1] or ZERO) == ZERO and tonumber(found[3] or 0) < before then
          it.drop(old, found[2])
        end
      end
    end
    call('HSET', P .. 'a:' .. key, 'scope', scope, 'window', window, 'ends', ends, 'caps', caps, 'updated', stamp)
  end

  -- Open holds stand in "holds" with the time of their end, finished ones with minus the time at which they were finished.
  function it.finish(hold, value, now)
    call('ZADD', P .. 'holds', format('%.6f', -now), hold)
    call('SET', P .. 'h:' .. hold, value, 'EX', KEEP)
  end

  function it.forget(now)
    call('ZREMRANGEBYSCORE', P .. 'holds', format('(%.6f', KEEP - now), '(0')
  end

  -- Charge holds whose worker never came back. An account that cannot be read is left alone: it must not stop the others.
  function it.expire(found, now, stamp)
    for i = 1, #found do
      local hold = found[i]
      local value = redis.pcall('GET', P .. 'h:' .. hold)
      local wanted, names
      if type(value) == 'string' then
        wanted, names = match(value, '^o (%d+ %d+ %d+) (.*)$')
      end
      if wanted then
        local a1, a2, a3 = stored(wanted)
        local whole, keys = pcall(it.keys, names)
        for _, key in ipairs(whole and keys or {}) do
          local fine, account = pcall(load_again, key)
          if fine and account and pcall(book, account, a1, a2, a3, 0, 0, 0, a1, a2, a3) then
            local sure, e1, e2, e3 = pcall(stored, account[6])
            if sure then
              account[6], account.late = format('%.0f %.0f %.0f', e1 + a1, e2 + a2, e3 + a3), true
              save(key, account, stamp)
            end
          end
          LOADED[key] = nil -- it may be changed and not written
        end
        it.finish(hold, 'x ' .. wanted .. ' ' .. names, now)
      else
        call('ZREM', P .. 'holds', hold)
      end
    end
  end

  function it.expired(now, most)
    return call('ZRANGEBYSCORE', P .. 'holds', 0, format('%.6f', now), 'LIMIT', 0, most)
  end

  function it.clock()
    local time = call('TIME')
    return time[1] + time[2] / 1000000, format('%s.%06d', time[1], time[2]), time[2] % 64 == 0
  end

  -- An account in full, for a caller that does not know it.
  function it.full(reply, key, account)
    local facts = call('HMGET', P .. 'a:' .. key, 'scope', 'window', 'ends')
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4], reply[n + 5] = key, facts[1] or '', facts[2] or '', facts[3] or '-', shown(account)
  end

  return it
end
