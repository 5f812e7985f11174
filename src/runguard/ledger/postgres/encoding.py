"""Values as they travel to and from the Postgres server: array literals, short names, rows of accounts."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from runguard.ledger.store import Balance, Line, StoreReply

_LONG: Final = 500  # characters: an index entry has room for 2,700 bytes, and two names may share one


def short_name(name: str) -> str:
    """A name that an index takes: the beginning of a very long one, and its digest."""
    return name if len(name) <= _LONG else f"{name[:100]}… {hashlib.sha256(name.encode()).hexdigest()}"


def long_name(name: str) -> str | None:
    return name if len(name) > _LONG else None


def in_lock_order(lines: Sequence[Line]) -> Sequence[Line]:
    """In the order in which accounts are locked: by code points, as the server's "C" collation; none twice."""
    if len(lines) < 2:
        return lines
    by_key = {short_name(line.key): line for line in lines}
    return [by_key[key] for key in sorted(by_key)]


def columns_of(lines: Sequence[Line]) -> tuple[str, str, str]:
    """Names, times and caps of all lines, as array literals."""
    keys, scopes = [line.key for line in lines], [line.scope for line in lines]
    names = [
        *map(short_name, keys),
        *map(short_name, scopes),
        *[line.window for line in lines],
        *map(long_name, keys),
        *map(long_name, scopes),
    ]
    times = [*[line.begins for line in lines], *[line.ends for line in lines]]
    return texts(names), numbers_of(times), integers([cap for line in lines for cap in line.caps])


def texts(values: Sequence[str | None]) -> str:
    return (
        "{"
        + ",".join(["NULL" if v is None else '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values])
        + "}"
    )


def numbers_of(values: Sequence[float | None]) -> str:
    return "{" + ",".join(["NULL" if v is None else repr(float(v)) for v in values]) + "}"


def integers(values: Sequence[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def reply_of(answer: str, lines: Sequence[Line]) -> StoreReply:
    _, _, now, control, _, found = json.loads(answer)
    return StoreReply(balances_of(found, lines), now, control)


def balances_of(rows: Sequence[Sequence[Any]], lines: Sequence[Line]) -> list[Balance]:
    if len(rows) > 1:  # as the caller has them
        found = {row[0]: row for row in rows}
        known = [line.key for line in lines if line.key in found]
        rows = [found[key] for key in dict.fromkeys((*known, *found))]
    return [balance_of(row) for row in rows]


def balance_of(row: Sequence[Any]) -> Balance:
    key, scope, window, ends, *numbers, closed = row
    return _with_amounts(key, scope, window, None if ends is None else float(ends), numbers, closed=closed)


def balance_of_line(line: Line, numbers: str, *, closed: bool) -> Balance:
    """The account of a line; the server sent only its numbers."""
    amounts = [int(number) for number in numbers[1:-1].split(",")]
    return _with_amounts(line.key, line.scope, line.window, line.ends, amounts, closed=closed)


def _with_amounts(
    key: str, scope: str, window: str | None, ends: float | None, numbers: Sequence[int], *, closed: bool
) -> Balance:
    """``numbers``: caps, spent, held, granted, overrun and expired, each as dollars, tokens and calls."""
    caps, spent, held, granted, overrun, expired = (
        (numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, 18, 3)
    )
    return Balance(key, scope, window, ends, caps, spent, held, granted, overrun, expired, closed)
