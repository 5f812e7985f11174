"""Sessions on a real Valkey server."""

from runguard.core.money import UNLIMITED, Amount
from runguard.ledger.ledger import Line
from runguard.ledger.redis import RedisSession

CALL: Amount = (100, 10, 1)


def a_line(key: str = "user:ann", caps: Amount = (1_000, UNLIMITED, UNLIMITED), ends: float | None = None) -> Line:
    return Line(key, key, "1d" if ends is not None else None, None, ends, caps)


def key_of(session: RedisSession, rest: str) -> str:
    return session._prefix + rest
