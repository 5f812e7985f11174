-- ARGV: more; then one line. Reply: the account's numbers.
local m1, m2, m3 = amount(ARGV[1])
local rare = seldom()
local now, stamp = rare.clock()
same_store()
local key = ARGV[2]
local _, _, caps, c1, c2, c3 = match(ARGV[4] or '', LINE)
if not caps then
  refuse('line')
end
check_caps(caps)
c1, c2, c3 = tonumber(c1) or HUGE, tonumber(c2) or HUGE, tonumber(c3) or HUGE
local account = load(key)
local new = not account
account = account or {}
account[1] = caps
local s1, s2, s3 = stored(account[2])
local h1, h2, h3 = stored(account[3])
local g1, g2, g3 = stored(account[4])
g1, g2, g3 = g1 + m1, g2 + m2, g3 + m3
for _, sum in ipairs({ g1, g2, g3, c1 + g1, c2 + g2, c3 + g3 }) do
  if sum > MAX and sum < HUGE then
    refuse('amount: with this extension more than 2^53 - 1')
  end
end
account[4] = format('%.0f %.0f %.0f', g1, g2, g3)
if not (s1 + h1 > c1 + g1 or s2 + h2 > c2 + g2 or s3 + h3 > c3 + g3) then
  account[7] = '0'
end
if new then
  rare.ready(ARGV[3])
  rare.create(key, ARGV[3], ARGV[4], now, stamp)
end
call('HSET', P .. 'a:' .. key, 'caps', caps, 'granted', account[4], 'closed', account[7] or '0')
return shown(account)
