"""PostgreSQL as a store: one schema; every operation is one call of a function there, so one round trip and one commit.

The server's clock is the only one. No operation takes longer than its deadline, however many round trips it needs: the
server ends statements and lock waits before the deadline, and the client gives up after it.

``backend`` reads the URL, ``dialing`` connects within a deadline, ``connection`` sends statements, ``schema`` creates
and checks the schema, ``session`` has the operations.
"""
