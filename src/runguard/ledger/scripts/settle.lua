-- ARGV: hold, actual; kind, ref, text and most of its record (or four empty texts); then the lines.
-- Reply: as of a reservation; or, when the hold has other accounts than the lines, the list "full clock control", then each in full.
local hold, last = ARGV[1], #ARGV
local a1, a2, a3 = amount(ARGV[2])
local time, control, known = look(hold)
local now, stamp = time[1] + time[2] / 1000000, format('%s.%06d', time[1], time[2])
local keys, at, given, n = {}, {}, '', 0
for i = 7, last, 3 do
  local key = ARGV[i]
  n = n + 1
  keys[n], at[key], given = key, i, given .. #key .. ':' .. key
end
local state, names = 'u', given
local h1, h2, h3, b1, b2, b3 = 0, 0, 0, 0, 0, 0
if known then
  local value
  state, value, names = match(known, '^(%l) (%d+ %d+ %d+) (.*)$')
  if state == 'o' then
    h1, h2, h3 = stored(value)
  elseif state == 's' or state == 'x' then
    b1, b2, b3 = stored(value)
  elseif state ~= 'r' then
    refuse('damaged')
  end
  if state == 'r' and names == '' then -- released before it was made: nobody knew its accounts
    names = given
  end
end
local same, rare = names == given, nil
-- The record of a settlement that is repeated with the same amount is there already.
local recorded = ARGV[3] ~= '' and not (state == 's' and b1 == a1 and b2 == a2 and b3 == a3)
if recorded then
  rare = seldom()
  rare.check_index(ARGV[3], ARGV[4])
end
if not same then
  rare = rare or seldom()
  keys = rare.keys(names)
  n = #keys
end
local accounts, new = {}, nil
for k = 1, n do
  local key = keys[k]
  local account, i = accounts[key] or load(key), at[key]
  if i and (not account or state == 'u') then
    local _, _, caps = match(ARGV[i + 2] or '', LINE)
    if not caps then
      refuse('line')
    end
    check_caps(caps)
    if not account then
      account, new, rare = { caps, new = i }, true, rare or seldom()
      rare.ready(ARGV[i + 1])
    elseif account[1] ~= caps then
      account[1], account.moved = caps, true
    end
  end
  if account then
    book(account, h1, h2, h3, b1, b2, b3, a1, a2, a3)
    if state == 'x' then
      local e1, e2, e3 = stored(account[6])
      account[6], account.late = format('%.0f %.0f %.0f', math.max(e1 - b1, 0), math.max(e2 - b2, 0), math.max(e3 - b3, 0)), true
    end
    accounts[key] = account
  end
end
if new then
  for _, account in pairs(accounts) do
    local i = account.new
    if i then
      rare.create(ARGV[i], ARGV[i + 1], ARGV[i + 2], now, stamp)
    end
  end
end
if recorded then
  rare.append(ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), stamp)
end
call('ZADD', P .. 'holds', format('%.6f', -now), hold)
call('SET', P .. 'h:' .. hold, 's ' .. ARGV[2] .. ' ' .. names, 'EX', KEEP)
local world = stamp .. ' ' .. control
local reply, list = 'yes ' .. world, { 'full ' .. world }
for k = 1, n do
  local key = keys[k]
  local account = accounts[key]
  if account then
    if account.moved then
      call('HSET', P .. 'a:' .. key, 'caps', account[1])
    end
    save(key, account, stamp)
  end
  if same then
    reply = reply .. '\n' .. (account and shown(account) or '')
  elseif account then
    rare.full(list, key, account)
  end
end
if time[2] % 64 == 0 then
  seldom().forget(now)
end
return same and reply or list
