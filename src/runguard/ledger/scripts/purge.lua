-- One batch. ARGV: what, before when, how many, how many to skip, kind of record. Reply: how many were looked at, how many were kept.
same_store()
local rare = seldom()
local what, old, most, skip = ARGV[1], rare.number(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now, stamp = rare.clock()
local kept, found = 0, {}
local before = format('(%.6f', old)
if what == 'expire' then
  found = rare.expired(now, most)
  rare.expire(found, now, stamp)
elseif what == 'holds' then
  found = call('ZRANGEBYSCORE', P .. 'holds', format('(%.6f', -old), '(0', 'LIMIT', 0, most)
  for _, hold in ipairs(found) do
    call('DEL', P .. 'h:' .. hold)
    call('ZREM', P .. 'holds', hold)
  end
elseif what == 'claims' then
  found = call('ZRANGEBYSCORE', P .. 'claims', '-inf', before, 'LIMIT', 0, most)
  for _, key in ipairs(found) do
    call('DEL', P .. 'c:' .. key)
    call('ZREM', P .. 'claims', key)
  end
elseif what == 'runs' then
  found = call('ZRANGEBYSCORE', P .. 'beats', '-inf', before, 'LIMIT', 0, most)
  for _, run in ipairs(found) do
    call('HDEL', P .. 'runs', run)
    call('ZREM', P .. 'beats', run)
  end
elseif what == 'records' then
  local at = P .. 'r:' .. ARGV[5]
  local past = {}
  found = call('XRANGE', at, '-', format('%.0f', math.floor(old * 1000) + 1), 'COUNT', most)
  for _, record in ipairs(found) do
    if tonumber(record[2][2]) < old then
      past[#past + 1] = record
    end
  end
  rare.drop_records(ARGV[5], past)
  if #past < #found then
    found = {}
  end
  if call('XLEN', at) == 0 then
    call('DEL', at)
    call('SREM', P .. 'kinds', ARGV[5])
  end
else
  -- "accounts": periods by their end; "passing": accounts of runs and sessions by when they were last seen to change.
  found = call('ZRANGEBYSCORE', P .. what, '-inf', before, 'LIMIT', skip, most)
  for _, key in ipairs(found) do
    local facts = call('HMGET', P .. 'a:' .. key, 'held', 'scope', 'updated', 'caps')
    if facts[4] and (facts[1] or ZERO) ~= ZERO then
      kept = kept + 1
    elseif what == 'passing' and facts[4] and tonumber(facts[3]) >= old then
      call('ZADD', P .. 'passing', facts[3], key)
    else
      rare.drop(key, facts[2])
    end
  end
end
return { #found, kept }
