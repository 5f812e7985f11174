-- ARGV: kind, ref, text, most.
local _, stamp = seldom().clock()
call('SADD', P .. 'kinds', ARGV[1])
call('XADD', P .. 'r:' .. ARGV[1], 'MAXLEN', '~', ARGV[4], '*', 'at', stamp, 'ref', ARGV[2], 'text', ARGV[3])
return 1
