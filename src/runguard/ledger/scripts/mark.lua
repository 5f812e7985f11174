-- ARGV: key, mark, facts. Reply: 1 for the first who marks it.
same_store()
return call('HSETNX', P .. 'm:' .. ARGV[1], ARGV[2], ARGV[3])
