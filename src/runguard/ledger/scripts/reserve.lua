-- ARGV: hold, wanted, ttl, force; then the lines.
-- Reply: one text, which clients read faster than a list: "answer clock control", then the numbers of each account on a line.
local hold, ttl, last = ARGV[1], tonumber(ARGV[3]), #ARGV
local w1, w2, w3 = amount(ARGV[2])
if not ttl or ttl ~= ttl then
  refuse('time: not a number')
end
local time, control, known = look(hold)
local now, stamp = time[1] + time[2] / 1000000, format('%s.%06d', time[1], time[2])
local world = ' ' .. stamp .. ' ' .. control
if known then
  local reply = (find(known, '^o') and 'yes' or 'no') .. world
  for i = 5, last, 3 do
    local account = load(ARGV[i])
    reply = reply .. '\n' .. (account and shown(account) or '')
  end
  return reply
end
local lines, stale = {}, false
for i = 5, last, 3 do
  local begins, ends, caps, c1, c2, c3 = match(ARGV[i + 2] or '', LINE)
  if not begins then
    refuse('line')
  end
  local from, to = begins == '-' and -HUGE or tonumber(begins), ends == '-' and HUGE or tonumber(ends)
  if not from or not to or from ~= from or to ~= to then
    refuse('time: not a number')
  end
  if now >= to or now < from then
    stale = true
  end
  lines[i] = { caps, tonumber(c1) or HUGE, tonumber(c2) or HUGE, tonumber(c3) or HUGE }
end
if stale then
  return 'stale' .. world
end
local late = call('ZRANGEBYSCORE', P .. 'holds', 0, stamp, 'LIMIT', 0, 64)
if #late > 0 then
  seldom().expire(late, now, stamp)
end
local accounts, fits, fresh, names = {}, true, nil, ''
for i = 5, last, 3 do
  local key, line = ARGV[i], lines[i]
  local account = accounts[key] or load(key)
  if not account then
    check_caps(line[1])
    account, fresh = { line[1], new = i }, fresh or seldom()
    fresh.ready(ARGV[i + 1])
  elseif account[1] ~= line[1] then
    check_caps(line[1])
    account[1], account.moved = line[1], true
  end
  accounts[key], line.account = account, account
  local s1, s2, s3 = stored(account[2])
  local h1, h2, h3 = stored(account[3])
  local g1, g2, g3 = stored(account[4])
  if account[7] == '1' or s1 + h1 + w1 > line[2] + g1 or s2 + h2 + w2 > line[3] + g2 or s3 + h3 + w3 > line[4] + g3 then
    fits = false
  end
  names = names .. #key .. ':' .. key
end
if fresh then
  for i = 5, last, 3 do
    if lines[i].account.new == i then
      fresh.create(ARGV[i], ARGV[i + 1], ARGV[i + 2], now, stamp)
    end
  end
end
fits = fits or ARGV[4] == '1'
local reply = (fits and 'yes' or 'no') .. world
if fits then
  call('ZADD', P .. 'holds', format('%.6f', now + ttl), hold)
end
for i = 5, last, 3 do
  local account = lines[i].account
  if fits then
    local h1, h2, h3 = stored(account[3])
    account[3] = format('%.0f %.0f %.0f', h1 + w1, h2 + w2, h3 + w3)
    if account.moved then
      call('HSET', P .. 'a:' .. ARGV[i], 'held', account[3], 'caps', account[1])
    else
      call('HSET', P .. 'a:' .. ARGV[i], 'held', account[3])
    end
  elseif account.moved then
    call('HSET', P .. 'a:' .. ARGV[i], 'caps', account[1])
  end
  reply = reply .. '\n' .. shown(account)
end
if fits then
  call('SET', P .. 'h:' .. hold, 'o ' .. ARGV[2] .. ' ' .. names)
end
return reply
