-- ARGV: kind, ids of records. Reply: at, text of each that is still there.
local at = P .. 'r:' .. ARGV[1]
local reply = {}
for i = 2, #ARGV do
  local record = call('XRANGE', at, ARGV[i], ARGV[i])[1]
  if record then
    local n = #reply
    reply[n + 1], reply[n + 2] = record[2][2], record[2][6]
  end
end
return reply
