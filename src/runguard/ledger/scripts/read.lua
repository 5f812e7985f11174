-- ARGV: keys. Reply: the accounts in full.
local reply, rare = {}, seldom()
for i = 1, #ARGV do
  local account = load(ARGV[i])
  if account then
    rare.full(reply, ARGV[i], account)
  end
end
return reply
