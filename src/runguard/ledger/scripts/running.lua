-- ARGV: seconds. Reply: run, beat, facts of each, oldest beat first.
local now = seldom().clock()
local found = call('ZRANGEBYSCORE', P .. 'beats', format('%.6f', now - seldom().number(ARGV[1])), '+inf', 'WITHSCORES')
local reply = {}
for i = 1, #found, 2 do
  local facts = call('HGET', P .. 'runs', found[i])
  if facts then
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3] = found[i], found[i + 1], facts
  end
end
return reply
