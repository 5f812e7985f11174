-- ARGV: hold, ttl, wanted, force, accounts as JSON; then of each line: key, scope, "begins ends cap cap cap window".
-- Reply: "answer clock control", then one text of numbers per line.
local hold, ttl = ARGV[1], moment(ARGV[2])
local w1, w2, w3 = amount(ARGV[3])
local now, stamp = clock()
local control, known = state(hold)
local caps, stale = {}, false
for i = 8, #ARGV, 3 do
  local begins, ends, limits = match(ARGV[i], '^(%S+) (%S+) (%S+ %S+ %S+) ')
  if not begins then
    refuse('line')
  end
  begins, ends = moment(begins), moment(ends)
  if (ends and now >= ends) or (begins and now < begins) then
    stale = true
  end
  caps[i] = limits
end
if stale then
  return { 'stale ' .. stamp .. ' ' .. control }
end
local accounts, answer = {}, 'yes '
if expire(now, stamp, 64) > 0 and known then
  known = call('GET', P .. 'h:' .. hold)
end
if known then
  local reply = { (find(known, '^o') and 'yes ' or 'no ') .. stamp .. ' ' .. control }
  for i = 6, #ARGV, 3 do
    local account = load(ARGV[i])
    reply[#reply + 1] = account and shown(account) or ''
  end
  return reply
end
for i = 6, #ARGV, 3 do
  local key, limits = ARGV[i], caps[i + 2]
  local account = accounts[key] or load(key)
  if not account then
    check_caps(limits)
    account = { limits, new = i }
  elseif account[1] ~= limits then
    check_caps(limits)
    account[1], account.moved = limits, true
  end
  accounts[key], accounts[i] = account, account
  local s1, s2, s3 = stored(account[2])
  local h1, h2, h3 = stored(account[3])
  local g1, g2, g3 = stored(account[4])
  local c1, c2, c3 = stored_caps(account[1])
  if (account[7] == '1' or s1 + h1 + w1 > c1 + g1 or s2 + h2 + w2 > c2 + g2 or s3 + h3 + w3 > c3 + g3) and ARGV[4] ~= '1' then
    answer = 'no '
  end
end
local reply = { answer .. stamp .. ' ' .. control }
for i = 6, #ARGV, 3 do
  local key, account = ARGV[i], accounts[i]
  if account.new == i then
    create(key, ARGV[i + 1], ARGV[i + 2], account[1], now, stamp)
  end
end
if answer == 'yes ' then
  call('ZADD', P .. 'holds', format('%.6f', now + ttl), hold)
end
for i = 6, #ARGV, 3 do
  local key, account = ARGV[i], accounts[i]
  if answer == 'yes ' then
    local h1, h2, h3 = stored(account[3])
    account[3] = text(h1 + w1, h2 + w2, h3 + w3)
    if account.moved then
      call('HSET', P .. 'a:' .. key, 'held', account[3], 'updated', stamp, 'caps', account[1])
    else
      call('HSET', P .. 'a:' .. key, 'held', account[3], 'updated', stamp)
    end
  elseif account.moved then
    call('HSET', P .. 'a:' .. key, 'caps', account[1])
  end
  reply[#reply + 1] = shown(account)
end
if answer == 'yes ' then
  call('SET', P .. 'h:' .. hold, 'o ' .. text(w1, w2, w3) .. ' ' .. ARGV[5])
end
return reply
