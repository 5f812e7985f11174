-- ARGV: key, done.
same_store()
local at = P .. 'c:' .. ARGV[1]
local _, stamp = seldom().clock()
if ARGV[2] == '1' then
  call('ZADD', P .. 'claims', stamp, ARGV[1])
  call('SET', at, 'done', 'EX', PERIODS_KEPT)
elseif call('GET', at) == 'pending' then
  call('DEL', at)
  call('ZREM', P .. 'claims', ARGV[1])
end
return 1
