-- ARGV: hold. Reply: "full clock control", then the accounts of the hold in full; none when it was not open.
local now, stamp, tidy = clock()
local control, known = state(ARGV[1])
local reply = { 'full ' .. stamp .. ' ' .. control }
local wanted, names = match(known or '', '^o (%d+ %d+ %d+) (.*)$')
if not wanted then
  return reply
end
local h1, h2, h3 = stored(wanted)
local keys, accounts = cjson.decode(names), {}
for n = 1, #keys do
  local account = accounts[keys[n]] or load(keys[n])
  if account then
    book(account, h1, h2, h3, 0, 0, 0, 0, 0, 0)
    accounts[keys[n]] = account
  end
end
finish(ARGV[1], 'r ' .. wanted .. ' ' .. names, now)
for n = 1, #keys do
  local account = accounts[keys[n]]
  if account then
    save(keys[n], account, stamp)
    full(reply, keys[n], account)
  end
end
if tidy then
  forget(now)
end
return reply
