"""Redis or Valkey as a store: many machines share one server. Every operation is one Lua script, so that it is one step
and one round trip.

All keys begin with ``{namespace}:``. The braces make it the hash tag of every key: in a cluster a namespace lives in
one slot, so on one node, and a reservation over many accounts stays one atomic step. It also means that a namespace is
as fast as one node; teams that need more use one namespace each. This client speaks to one server: give it the node
that owns the slot. Scripts build their keys from the prefix (``KEYS[1]``), which is all that a router needs to find the
slot.

Lua counts in doubles, which are exact up to 2**53: amounts beyond 9,007,199,254,740,991 (9.007 million dollars) are
refused. ``?timeout`` and the like are not options: every call ends within about the timeout given to ``connect``. Half
of it is for reaching the server, half for each answer; only looking up a host name cannot be limited.

``backend`` reads the URL, ``connection`` runs scripts, ``session`` has the operations.
"""
