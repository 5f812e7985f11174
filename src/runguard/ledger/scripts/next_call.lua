-- settle_and_reserve in the usual case, in half the time: an open hold is settled at no more than its amount, on accounts that are as
-- the caller knows them, and the next one fits. In every other case it writes nothing and replies an empty text.
-- ARGV: hold, actual, hold of the next call, wanted, ttl; kind, ref, text and most of its record, or one empty text; key and line of
-- each account; identity, number of the request.
local P, ZERO, LAST = KEYS[1], '0 0 0', #ARGV - 2
local AMOUNT, NUMBER = '^(%d+) (%d+) (%d+)$', ARGV[LAST + 2]
local call, match, format = redis.call, string.match, string.format
local OTHER = { '', NUMBER }
local hold, other, kind = ARGV[1], ARGV[3], ARGV[6]
local found = call('MGET', P .. 't:identity', P .. 'schema', P .. 'v:control', P .. 'h:' .. hold, P .. 'h:' .. other)
if found[1] ~= ARGV[LAST + 1] or found[2] ~= SCHEMA or not found[4] or found[5] or hold == other then
  return OTHER
end
local h1, h2, h3, names = match(found[4], '^o (%d+) (%d+) (%d+) (.*)$')
local a1, a2, a3 = match(ARGV[2], AMOUNT)
local w1, w2, w3 = match(ARGV[4], AMOUNT)
if not h1 or not a1 or not w1 then
  return OTHER
end
h1, h2, h3, a1, a2, a3 = tonumber(h1), tonumber(h2), tonumber(h3), tonumber(a1), tonumber(a2), tonumber(a3)
w1, w2, w3 = tonumber(w1), tonumber(w2), tonumber(w3)
if a1 > h1 or a2 > h2 or a3 > h3 then
  return OTHER
end
local time = call('TIME')
local now, stamp = time[1] + time[2] / 1000000, format('%s.%06d', time[1], time[2])
if #call('ZRANGEBYSCORE', P .. 'holds', '0', stamp, 'LIMIT', '0', '1') > 0 then
  return OTHER -- a hold is past its time, maybe this one
end
local first = kind == '' and 7 or 10
local given, settled, reserved, write = '', '', '', {}
for i = first, LAST, 2 do
  local key = ARGV[i]
  local account = call('HMGET', P .. 'a:' .. key, 'caps', 'spent', 'held', 'granted', 'overrun', 'expired', 'closed')
  local begins, ends, caps, c1, c2, c3 = match(ARGV[i + 1], '^(%S+) (%S+) ((%S+) (%S+) (%S+)) ')
  local s1, s2, s3 = match(account[2] or ZERO, AMOUNT)
  local held1, held2, held3 = match(account[3] or ZERO, AMOUNT)
  local g1, g2, g3 = match(account[4] or ZERO, AMOUNT)
  if account[1] ~= caps or not s1 or not held1 or not g1 or account[7] == '1' then
    return OTHER
  end
  if (begins ~= '-' and now < tonumber(begins)) or (ends ~= '-' and now >= tonumber(ends)) then
    return OTHER
  end
  s1, s2, s3 = s1 + a1, s2 + a2, s3 + a3
  held1, held2, held3 = held1 - h1, held2 - h2, held3 - h3
  local n1, n2, n3 = held1 + w1, held2 + w2, held3 + w3
  if
    (held1 < 0 or held2 < 0 or held3 < 0)
    or (c1 ~= '-' and s1 + n1 > c1 + g1)
    or (c2 ~= '-' and s2 + n2 > c2 + g2)
    or (c3 ~= '-' and s3 + n3 > c3 + g3)
  then
    return OTHER
  end
  local spent, rest = format('%.0f %.0f %.0f', s1, s2, s3), ''
  local held = format('%.0f %.0f %.0f', n1, n2, n3)
  if account[4] or account[5] or account[6] or account[7] then
    rest = ' ' .. (account[4] or ZERO) .. ' ' .. (account[5] or ZERO) .. ' ' .. (account[6] or ZERO) .. ' ' .. (account[7] or '0')
  end
  settled = settled .. '\n' .. caps .. ' ' .. spent .. ' ' .. format('%.0f %.0f %.0f', held1, held2, held3) .. rest
  reserved = reserved .. '\n' .. caps .. ' ' .. spent .. ' ' .. held .. rest
  given = given .. #key .. ':' .. key
  write[i], write[i + 1] = spent, held
end
if given ~= names then
  return OTHER
end
if kind ~= '' then
  local records, index = P .. 'r:' .. kind, P .. 'i:' .. #kind .. ':' .. kind .. ':' .. ARGV[7]
  -- what is of another type fails here, before anything is written
  call('LLEN', index)
  local is_known = call('SISMEMBER', P .. 'kinds', kind) == 1
  if call('XLEN', records) >= tonumber(ARGV[9]) then
    return OTHER -- the oldest go
  end
  if not is_known then
    call('SADD', P .. 'kinds', kind)
  end
  call('RPUSH', index, call('XADD', records, '*', 'at', stamp, 'ref', ARGV[7], 'text', ARGV[8]))
end
for i = first, LAST, 2 do
  call('HSET', P .. 'a:' .. ARGV[i], 'spent', write[i], 'held', write[i + 1], 'updated', stamp)
end
call('SET', P .. 'h:' .. hold, 's ' .. ARGV[2] .. ' ' .. names, 'EX', '86400')
call('SET', P .. 'h:' .. other, 'o ' .. ARGV[4] .. ' ' .. names)
call('ZADD', P .. 'holds', '-' .. stamp, hold, format('%.6f', now + ARGV[5]), other)
if time[2] % 64 == 0 then
  call('ZREMRANGEBYSCORE', P .. 'holds', format('(%.6f', 86400 - now), '(0')
end
local world = 'yes ' .. stamp .. ' ' .. (found[3] or '0')
return { world .. settled .. '\f' .. world .. reserved, NUMBER }
