-- ARGV: name, version, text. Reply: 1 when the document had this version.
same_store()
local at = P .. 'v:' .. ARGV[1]
if (call('GET', at) or '0') ~= ARGV[2] then
  return 0
end
call('MSET', at, format('%.0f', tonumber(ARGV[2]) + 1), P .. 't:' .. ARGV[1], ARGV[3])
return 1
