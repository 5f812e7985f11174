"""Values as they travel to and from the Redis server: times, commands, rows of accounts."""

import math
from typing import Final

from runguard.core.money import UNLIMITED
from runguard.ledger.store import Balance

_LONGEST_S: Final = 1e9  # longer than anybody waits, short enough for every command


def command_of(*parts: bytes) -> bytes:
    """A command in Redis' protocol."""
    return b"*%d\r\n%b" % (len(parts), b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]))


def seconds_text(seconds: float) -> str:
    if math.isnan(seconds):
        raise ValueError("a duration must be a number")
    return format(max(-_LONGEST_S, min(seconds, _LONGEST_S)), ".6f")


def moment_text(at: float | None) -> str:
    if at is None:
        return "-"
    if not math.isfinite(at):
        raise ValueError(f"{at!r} is not a moment")
    text = repr(float(at))
    return text if "e" not in text else format(at, ".6f")


def balance_of(key: str, scope: str, window: str | None, ends: float | None, text: str) -> Balance:
    n = text.split(" ")
    usd, tokens, calls = n[:3]
    caps = (
        UNLIMITED if usd == "-" else int(usd),
        UNLIMITED if tokens == "-" else int(tokens),
        UNLIMITED if calls == "-" else int(calls),
    )
    spent, held = (int(n[3]), int(n[4]), int(n[5])), (int(n[6]), int(n[7]), int(n[8]))
    if len(n) == 9:
        return Balance(key, scope, window, ends, caps, spent, held)
    granted, overrun, expired = ((int(n[at]), int(n[at + 1]), int(n[at + 2])) for at in (9, 12, 15))
    return Balance(key, scope, window, ends, caps, spent, held, granted, overrun, expired, n[18] == "1")


def balances_of(reply: list[str], start: int) -> list[Balance]:
    rows = (reply[at : at + 5] for at in range(start, len(reply), 5))
    return [
        balance_of(key, scope, window or None, None if ends == "-" else float(ends), numbers)
        for key, scope, window, ends, numbers in rows
    ]
