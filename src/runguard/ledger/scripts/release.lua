-- ARGV: hold. Reply: "full clock control", then the accounts of the hold in full; none when it was not open any more.
local hold, rare = ARGV[1], seldom()
local now, stamp, tidy = rare.clock()
same_store()
local found = call('MGET', P .. 'v:control', P .. 'h:' .. hold)
local reply = { 'full ' .. stamp .. ' ' .. (found[1] or '0') }
local wanted, names = match(found[2] or '', '^o (%d+ %d+ %d+) (.*)$')
if not found[2] then -- a reservation that is still on its way must not hold anything when it arrives
  rare.finish(hold, 'r 0 0 0 ', now)
end
if not wanted or tonumber(call('ZSCORE', P .. 'holds', hold) or 0) <= now then
  return reply
end
local h1, h2, h3 = stored(wanted)
local keys, accounts = rare.keys(names), {}
for _, key in ipairs(keys) do
  local account = accounts[key] or load(key)
  if account then
    book(account, h1, h2, h3, 0, 0, 0, 0, 0, 0)
    accounts[key] = account
  end
end
rare.finish(hold, 'r ' .. wanted .. ' ' .. names, now)
for _, key in ipairs(keys) do
  local account = accounts[key]
  if account then
    save(key, account, stamp)
    rare.full(reply, key, account)
  end
end
if tidy then
  rare.forget(now)
end
return reply
