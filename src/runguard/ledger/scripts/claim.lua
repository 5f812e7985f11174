-- ARGV: key, ttl. Reply: "yes", "pending" or "done".
same_store()
local at, ttl = P .. 'c:' .. ARGV[1], seldom().number(ARGV[2])
local found = call('GET', at)
if found then
  return found
end
local now = seldom().clock()
if ttl > 0 then
  call('ZADD', P .. 'claims', format('%.6f', now + ttl), ARGV[1])
  call('SET', at, 'pending', 'PX', format('%.0f', math.ceil(ttl * 1000)))
end
return 'yes'
