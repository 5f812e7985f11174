-- ARGV: those of a settlement, those of a reservation, how many the settlement has.
-- The settlement comes first and stays when the reservation fails: its caller books it again, which changes nothing.
-- Reply: both replies with a form feed between; or the list of the settlement, with the reservation's reply at its end.
local first, bill, ask = tonumber(table.remove(ARGV)), {}, {}
for i = 1, first do
  bill[i] = ARGV[i]
end
for i = first + 1, #ARGV do
  ask[i - first] = ARGV[i]
end
local settled, reserved = settle(bill), nil
reserved = reserve(ask)
if type(settled) == 'table' then
  settled[#settled + 1] = reserved
  return settled
end
return settled .. '\f' .. reserved
