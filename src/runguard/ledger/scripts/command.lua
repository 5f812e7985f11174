-- ARGV: a command and its arguments. Reply: its answer. As a script it carries the number of the request.
return call(unpack(ARGV))
