"""The SQL of the Postgres store for one account, which is the common and hot case.

There a plain statement does the work at half the cost of a function. The functions (``scripts/postgres.sql``) are for
the other cases: a new account, a full or closed one, a period that is over, a call that billed more than it held. A
reservation that meets such a case writes nothing and is repeated with the function. A settlement calls the function
within the same statement, because its hold may be written already.
"""

import re
from typing import Final

_NUMBERS: Final = """ARRAY[cap_usd, cap_tokens, cap_calls, spent_usd, spent_tokens, spent_calls, held_usd,
  held_tokens, held_calls,
    granted_usd, granted_tokens, granted_calls, overrun_usd, overrun_tokens, overrun_calls, expired_usd,
      expired_tokens, expired_calls]::bigint[]::text"""
RESERVE_ONE: Final = f"""
WITH account AS (
  UPDATE runguard.accounts SET cap_usd = %(cap0)s::bigint, cap_tokens = %(cap1)s::bigint,
    cap_calls = %(cap2)s::bigint, updated = runguard.clock(),
    held_usd = least(held_usd + %(want0)s::bigint, 4611686018427387903),
      held_tokens = least(held_tokens + %(want1)s::bigint, 4611686018427387903),
    held_calls = least(held_calls + %(want2)s::bigint, 4611686018427387903)
  WHERE key = %(key)s::text AND NOT closed
    AND %(want0)s::bigint <= %(cap0)s::bigint + granted_usd - spent_usd - held_usd
    AND %(want1)s::bigint <= %(cap1)s::bigint + granted_tokens - spent_tokens - held_tokens
    AND %(want2)s::bigint <= %(cap2)s::bigint + granted_calls - spent_calls - held_calls
    AND runguard.clock() >= %(begins)s::float8 AND runguard.clock() < %(ends)s::float8
    AND EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
  RETURNING {_NUMBERS} AS numbers, updated
), hold AS (
  INSERT INTO runguard.holds SELECT %(hold)s::text, ARRAY[%(key)s::text], 'open', updated + %(ttl)s::float8, updated,
    %(want0)s::bigint, %(want1)s::bigint, %(want2)s::bigint FROM account
)
SELECT numbers, updated, (SELECT version FROM runguard.documents WHERE name = 'control'),
  EXISTS (SELECT FROM runguard.holds WHERE state = 'open' AND expires <= account.updated), %(number)s::text
FROM account
"""
SETTLE_ONE: Final = f"""
WITH hold AS (
  UPDATE runguard.holds SET state = 'settled', updated = runguard.clock(), paid_usd = %(paid0)s::bigint,
    paid_tokens = %(paid1)s::bigint,
    paid_calls = %(paid2)s::bigint
  WHERE id = %(hold)s::text AND state = 'open' AND keys = ARRAY[%(key)s::text]
    AND usd >= %(paid0)s::bigint AND tokens >= %(paid1)s::bigint AND calls >= %(paid2)s::bigint
    AND EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
  RETURNING usd, tokens, calls, updated
), account AS (
  UPDATE runguard.accounts AS a SET updated = hold.updated,
    held_usd = greatest(held_usd - usd, 0), held_tokens = greatest(held_tokens - tokens, 0),
      held_calls = greatest(held_calls - calls, 0),
    spent_usd = least(spent_usd + %(paid0)s::bigint, 4611686018427387903),
      spent_tokens = least(spent_tokens + %(paid1)s::bigint, 4611686018427387903),
    spent_calls = least(spent_calls + %(paid2)s::bigint, 4611686018427387903)
  FROM hold WHERE key = %(key)s::text RETURNING {_NUMBERS} AS numbers, closed, a.updated
)
SELECT CASE WHEN numbers IS NULL THEN runguard.settle(%(hold)s::text, %(names)s::text[], %(times)s::float8[],
  %(caps)s::bigint[],
    ARRAY[%(paid0)s::bigint, %(paid1)s::bigint, %(paid2)s::bigint]) END,
  numbers, closed, updated, (SELECT version FROM runguard.documents WHERE name = 'control'), %(number)s::text
FROM (SELECT FROM runguard.documents WHERE name = 'identity'
  AND text = %(identity)s::text) AS here LEFT JOIN account ON true
"""

# A settlement and its record in one statement. The row of the hold is locked before it is read, so a settlement that
# is repeated while the first one is still under way appends no second record.
_RECORD: Final = """
WITH before AS (
  SELECT state, paid_usd, paid_tokens, paid_calls FROM runguard.holds WHERE id = %(hold)s::text FOR UPDATE
), record AS (
  INSERT INTO runguard.records (at, kind, ref, text)
  SELECT runguard.clock(), %(kind)s::text, %(ref)s::text, %(text)s::text
  WHERE EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
    AND NOT EXISTS (SELECT FROM before WHERE state = 'settled'
      AND paid_usd = %(paid0)s::bigint AND paid_tokens = %(paid1)s::bigint AND paid_calls = %(paid2)s::bigint)
  RETURNING seq
)"""
_AFTER_RECORD: Final = "(SELECT count(*) FROM record) >= 0"  # the function changes the hold: the record reads it first
SETTLE_ONE_RECORDED: Final = SETTLE_ONE.replace("WITH hold AS", f"{_RECORD}, hold AS", 1).replace(
    "WHEN numbers IS NULL THEN", f"WHEN numbers IS NULL AND {_AFTER_RECORD} THEN", 1
)
SETTLE_RECORDED: Final = f"""{_RECORD}
SELECT CASE WHEN {_AFTER_RECORD} THEN runguard.settle(%(hold)s::text, %(names)s::text[], %(times)s::float8[],
  %(caps)s::bigint[], ARRAY[%(paid0)s::bigint, %(paid1)s::bigint, %(paid2)s::bigint]) END, %(number)s::text
FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text
"""

# The settlement of one call and the reservation of the next on the same account: the row of the account is written
# once. It writes nothing unless the hold is open and covers the bill, and the next call fits. The two operations then
# handle the other cases one after the other.
SETTLE_AND_RESERVE_ONE: Final = f"""
WITH before AS (
  SELECT usd, tokens, calls FROM runguard.holds
  WHERE id = %(bill)s::text AND state = 'open' AND keys = ARRAY[%(key)s::text]
    AND usd >= %(paid0)s::bigint AND tokens >= %(paid1)s::bigint AND calls >= %(paid2)s::bigint
    AND EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
  FOR UPDATE
), account AS (
  UPDATE runguard.accounts AS a SET cap_usd = %(cap0)s::bigint, cap_tokens = %(cap1)s::bigint,
    cap_calls = %(cap2)s::bigint, updated = runguard.clock(),
    spent_usd = least(spent_usd + %(paid0)s::bigint, 4611686018427387903),
      spent_tokens = least(spent_tokens + %(paid1)s::bigint, 4611686018427387903),
    spent_calls = least(spent_calls + %(paid2)s::bigint, 4611686018427387903),
    held_usd = least(greatest(held_usd - usd, 0) + %(want0)s::bigint, 4611686018427387903),
      held_tokens = least(greatest(held_tokens - tokens, 0) + %(want1)s::bigint, 4611686018427387903),
    held_calls = least(greatest(held_calls - calls, 0) + %(want2)s::bigint, 4611686018427387903)
  FROM before WHERE key = %(key)s::text AND NOT closed
    AND %(want0)s::bigint <= %(cap0)s::bigint + granted_usd - spent_usd - %(paid0)s::bigint
      - greatest(held_usd - usd, 0)
    AND %(want1)s::bigint <= %(cap1)s::bigint + granted_tokens - spent_tokens - %(paid1)s::bigint
      - greatest(held_tokens - tokens, 0)
    AND %(want2)s::bigint <= %(cap2)s::bigint + granted_calls - spent_calls - %(paid2)s::bigint
      - greatest(held_calls - calls, 0)
    AND runguard.clock() >= %(begins)s::float8 AND runguard.clock() < %(ends)s::float8
  RETURNING {_NUMBERS} AS numbers, a.updated
), settled AS (
  UPDATE runguard.holds AS h SET state = 'settled', updated = account.updated, paid_usd = %(paid0)s::bigint,
    paid_tokens = %(paid1)s::bigint, paid_calls = %(paid2)s::bigint
  FROM account WHERE id = %(bill)s::text
), record AS (
  INSERT INTO runguard.records (at, kind, ref, text)
  SELECT updated, %(kind)s::text, %(ref)s::text, %(text)s::text FROM account WHERE %(kind)s::text IS NOT NULL
), hold AS (
  INSERT INTO runguard.holds SELECT %(hold)s::text, ARRAY[%(key)s::text], 'open', updated + %(ttl)s::float8, updated,
    %(want0)s::bigint, %(want1)s::bigint, %(want2)s::bigint FROM account
)
SELECT numbers, updated, (SELECT version FROM runguard.documents WHERE name = 'control'),
  EXISTS (SELECT FROM runguard.holds WHERE state = 'open' AND expires <= account.updated AND id <> %(bill)s::text),
  %(number)s::text
FROM account
"""


def in_schema(sql: str, schema: str) -> str:
    """A statement for another schema than ``runguard``."""
    return re.sub(r"\brunguard\.", f'"{schema}".', sql)
