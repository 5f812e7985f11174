-- ARGV: keys. Reply: the accounts in full.
local reply = {}
for i = 1, #ARGV do
  local account = load(ARGV[i])
  if account then
    full(reply, ARGV[i], account)
  end
end
return reply
