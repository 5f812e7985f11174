-- ARGV: more, key, scope, "begins ends cap cap cap window". Reply: the account's numbers.
local m1, m2, m3 = amount(ARGV[1])
local now, stamp = clock()
state()
local key, limits = ARGV[2], match(ARGV[4], '^%S+ %S+ (%S+ %S+ %S+) ')
if not limits then
  refuse('line')
end
check_caps(limits)
local account = load(key)
local new = not account
account = account or {}
account[1] = limits
local c1, c2, c3 = stored_caps(limits)
local g1, g2, g3 = stored(account[4])
g1, g2, g3 = g1 + m1, g2 + m2, g3 + m3
for _, sum in ipairs({ g1, g2, g3, c1 + g1, c2 + g2, c3 + g3 }) do
  if sum > MAX and sum < math.huge then
    refuse('amount: more than 2^53 - 1')
  end
end
local s1, s2, s3 = stored(account[2])
local h1, h2, h3 = stored(account[3])
account[4] = text(g1, g2, g3)
if account[7] == '1' and not (s1 + h1 > c1 + g1 or s2 + h2 > c2 + g2 or s3 + h3 > c3 + g3) then
  account[7] = '0'
end
if new then
  create(key, ARGV[3], ARGV[4], limits, now, stamp)
end
call('HSET', P .. 'a:' .. key, 'caps', limits, 'granted', account[4], 'closed', account[7] or '0')
return shown(account)
