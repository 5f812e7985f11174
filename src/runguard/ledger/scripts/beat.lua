-- ARGV: run, facts, ended. Reply: version of the control document. A run that ended is of no more use.
same_store()
local _, stamp = seldom().clock()
if ARGV[3] == '1' then
  call('ZREM', P .. 'beats', ARGV[1])
  call('HDEL', P .. 'runs', ARGV[1])
else
  call('ZADD', P .. 'beats', stamp, ARGV[1])
  call('HSET', P .. 'runs', ARGV[1], ARGV[2])
end
return call('GET', P .. 'v:control') or '0'
