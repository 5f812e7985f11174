-- Charge what has expired, then name the accounts. ARGV: "all" or "one", scope. Reply: how many holds were charged, then the keys.
local now, stamp = clock()
state()
local charged = expire(now, stamp, 256)
local reply
if ARGV[1] == 'all' then
  reply = call('ZRANGE', P .. 'accounts', 0, -1)
else
  reply = call('SMEMBERS', P .. 's:' .. ARGV[2])
end
table.insert(reply, 1, tostring(charged))
return reply
