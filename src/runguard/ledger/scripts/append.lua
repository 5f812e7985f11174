-- ARGV: kind, ref, text, most. Beyond the most, the oldest go, two for each new one: an index names what is there and nothing else.
same_store()
local rare = seldom()
local _, stamp = rare.clock()
local at, index = P .. 'r:' .. ARGV[1], rare.index(ARGV[1], ARGV[2])
call('LLEN', index) -- what is of another type fails here, before anything is written
call('SADD', P .. 'kinds', ARGV[1])
local id = call('XADD', at, '*', 'at', stamp, 'ref', ARGV[2], 'text', ARGV[3])
call('RPUSH', index, id)
local surplus = call('XLEN', at) - tonumber(ARGV[4])
if surplus > 0 then
  rare.drop_records(ARGV[1], call('XRANGE', at, '-', '+', 'COUNT', math.min(surplus, 2)))
end
return 1
