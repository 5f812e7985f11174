-- ARGV: hold, actual, accounts as JSON; then of each line: key, scope, "begins ends cap cap cap window".
-- Reply: "yes clock control", then one text of numbers per line; or "full clock control" and the accounts of the hold in full.
local hold = ARGV[1]
local a1, a2, a3 = amount(ARGV[2])
local now, stamp, tidy = clock()
local control, known = state(hold)
local kind, names = 'u', ARGV[3]
local v1, v2, v3 = 0, 0, 0
if known then
  local value
  kind, value, names = match(known, '^(%l) (%d+ %d+ %d+) (.*)$')
  if not kind then
    refuse('damaged')
  end
  v1, v2, v3 = stored(value)
end
local keys, at, same = {}, {}, names == ARGV[3]
for i = 4, #ARGV, 3 do
  if not match(ARGV[i + 2] or '', '^%S+ %S+ %S+ %S+ %S+ ') then
    refuse('line')
  end
  keys[#keys + 1], at[ARGV[i]] = ARGV[i], i
end
if not same then
  keys = cjson.decode(names)
end
local h1, h2, h3, b1, b2, b3 = 0, 0, 0, 0, 0, 0
if kind == 'o' then
  h1, h2, h3 = v1, v2, v3
elseif kind == 's' or kind == 'x' then
  b1, b2, b3 = v1, v2, v3
end
local accounts = {}
for n = 1, #keys do
  local key = keys[n]
  local i = at[key]
  local account = accounts[key] or load(key)
  local limits = i and match(ARGV[i + 2], '^%S+ %S+ (%S+ %S+ %S+) ')
  if not account and i and (kind == 'o' or kind == 'u' or kind == 'r') then
    check_caps(limits)
    account = { limits, new = true }
  elseif account and kind == 'u' and account[1] ~= limits then
    check_caps(limits)
    account[1], account.moved = limits, true
  end
  if account then
    book(account, h1, h2, h3, b1, b2, b3, a1, a2, a3)
    if kind == 'x' then
      local e1, e2, e3 = stored(account[6])
      account[6], account.late = text(math.max(e1 - b1, 0), math.max(e2 - b2, 0), math.max(e3 - b3, 0)), true
    end
    accounts[key] = account
  end
end
for n = 1, #keys do
  local account, i = accounts[keys[n]], at[keys[n]]
  if account and account.new then
    create(keys[n], ARGV[i + 1], ARGV[i + 2], account[1], now, stamp)
    account.new = false
  end
end
finish(hold, 's ' .. text(a1, a2, a3) .. ' ' .. names, now)
local reply = { (same and 'yes ' or 'full ') .. stamp .. ' ' .. control }
for n = 1, #keys do
  local account = accounts[keys[n]]
  if account then
    if account.moved then
      call('HSET', P .. 'a:' .. keys[n], 'caps', account[1])
    end
    save(keys[n], account, stamp)
  end
  if not same and account then
    full(reply, keys[n], account)
  elseif same then
    reply[#reply + 1] = account and shown(account) or ''
  end
end
if tidy then
  forget(now)
end
return reply
