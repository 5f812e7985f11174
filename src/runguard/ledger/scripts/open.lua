-- Create the marker in an empty namespace. Reply: the marker's text, or "" when there is none and the namespace is in use.
local found = call('GET', P .. 'schema')
if found then
  return found
end
if call('EXISTS', P .. 'accounts', P .. 'holds', P .. 'v:control', P .. 'beats', P .. 'claims', P .. 'kinds') > 0 then
  return ''
end
call('SET', P .. 'schema', SCHEMA)
return SCHEMA
