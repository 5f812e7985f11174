-- Charge what has expired, then name the accounts. ARGV: "all" or "one", scope. Reply: how many holds were charged, then the keys.
local rare = seldom()
local now, stamp = rare.clock()
same_store()
local late = rare.expired(now, 256)
rare.expire(late, now, stamp)
local reply = ARGV[1] == 'all' and call('ZRANGE', P .. 'accounts', 0, -1) or call('SMEMBERS', P .. 's:' .. ARGV[2])
table.insert(reply, 1, tostring(#late))
return reply
