-- Make an empty namespace a store, and give an id to a store that has none. ARGV: the id to give.
-- Reply: the version of the schema and the identity; the version is "" when there is none and the namespace is in use.
local found = call('GET', P .. 'schema')
if not found then
  if call('EXISTS', P .. 'accounts', P .. 'holds', P .. 'v:control', P .. 'beats', P .. 'claims', P .. 'kinds') > 0 then
    return { '', '' }
  end
  call('SET', P .. 'schema', SCHEMA)
  found = SCHEMA
end
if found == SCHEMA and call('EXISTS', P .. 't:identity') == 0 then
  call('MSET', P .. 'v:identity', '1', P .. 't:identity', ARGV[1])
end
return { found, call('GET', P .. 't:identity') or '' }
