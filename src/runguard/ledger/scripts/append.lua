-- ARGV: kind, ref, text, most.
same_store()
local rare = seldom()
local _, stamp = rare.clock()
rare.check_index(ARGV[1], ARGV[2])
rare.append(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), stamp)
return 1
