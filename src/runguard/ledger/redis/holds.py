"""Reservations and settlements on a Redis or Valkey server."""

from collections.abc import Sequence
from typing import Final

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.identity import Seen
from runguard.ledger.redis.connection import RedisConnection
from runguard.ledger.redis.encoding import balance_of, balances_of, moment_text, seconds_text
from runguard.ledger.store import Balance, Line, Record, SettledCall, StoreError, StoreReply, check_amounts, check_ttl

MOST_EXACT: Final = (1 << 53) - 1
AT_ONCE: Final = 500
MOST_BATCHES: Final = 20_000
RECORDS_KEPT: Final = 100_000  # of each kind, about
_LINES_KEPT: Final = 1_024


class RedisHolds(RedisConnection):
    """The operations on accounts."""

    def __init__(self, url: str, name: str, namespace: str, timeout: float, seen: Seen) -> None:
        super().__init__(url, name, namespace, timeout, seen)
        self._known: dict[str, tuple[Line, tuple[bytes, bytes, bytes]]] = {}

    def _amount(self, amount: Amount) -> str:
        check_amounts(amount)
        if max(amount) > MOST_EXACT:
            raise StoreError(
                f"{self._name}: {max(amount)} is more than a Redis store can count exactly ({MOST_EXACT}, or "
                "$9,007,199.25); use another store"
            )
        usd, tokens, calls = amount
        return f"{usd} {tokens} {calls}"

    def _lines(self, lines: Sequence[Line]) -> list[bytes]:
        """The arguments of lines, cached: a run uses the same lines again and again."""
        args: list[bytes] = []
        for line in lines:
            known = self._known.get(line.key)
            if known is None or (known[0] is not line and known[0] != line):
                if len(self._known) >= _LINES_KEPT:
                    self._known.clear()
                known = self._known[line.key] = line, self._packed(line)
            args += known[1]
        return args

    def _packed(self, line: Line) -> tuple[bytes, bytes, bytes]:
        check_amounts(NOTHING, (line,))
        for cap in line.caps:
            if MOST_EXACT < cap < UNLIMITED:
                raise StoreError(
                    f"{self._name}: the cap {cap} of {line.scope} is more than a Redis store can count exactly "
                    f"({MOST_EXACT}, or $9,007,199.25); "
                    "lower it, leave it out, or use another store"
                )
        usd, tokens, calls = ("-" if cap >= UNLIMITED else cap for cap in line.caps)
        text = f"{moment_text(line.begins)} {moment_text(line.ends)} {usd} {tokens} {calls} {line.window or ''}"
        return line.key.encode(), line.scope.encode(), text.encode()

    def _reply(self, lines: Sequence[Line], reply: str | list[str]) -> StoreReply:
        if isinstance(reply, list):
            _, now, control = reply[0].split(" ")
            return StoreReply(balances_of(reply, 1), float(now), int(control))
        head, *rows = reply.split("\n")
        answer, now, control = head.split(" ")
        balances = [
            balance_of(line.key, line.scope, line.window, line.ends, row)
            for line, row in zip(lines, rows, strict=False)
            if row
        ]
        return StoreReply(balances, float(now), int(control), answer == "yes", answer == "stale")

    # ---- operations -------------------------------------------------------------------------------------------------

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
        lines = _each_once(lines)
        return self._reply(lines, self._run("reserve", *self._asked_for(hold, ttl, lines, want, force)))

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        return self._reply(lines, self._run("settle", *self._billed(hold, lines, actual, record)))

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        lines = _each_once(lines)
        first = self._billed(bill.hold, bill.lines, bill.actual, bill.record)
        second = self._asked_for(hold, ttl, lines, want, force)
        reply = self._run("settle_and_reserve", *first, *second, str(len(first)))
        if isinstance(reply, list):
            *settled, reserved = reply
        else:
            settled, _, reserved = reply.partition("\f")
        return self._reply(bill.lines, settled), self._reply(lines, reserved)

    def _asked_for(
        self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, force: bool
    ) -> tuple[str | bytes, ...]:
        check_ttl(ttl)
        return hold, self._amount(want), seconds_text(ttl), "1" if force else "0", *self._lines(lines)

    def _billed(
        self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None
    ) -> tuple[str | bytes, ...]:
        appended = (*record, str(RECORDS_KEPT)) if record is not None else ("", "", "", "")
        return hold, self._amount(actual), *appended, *self._lines(lines)

    def release(self, hold: str) -> StoreReply:
        return self._reply((), self._run("release", hold))

    def extend(self, line: Line, more: Amount) -> Balance:
        numbers = self._run("extend", self._amount(more), *self._lines((line,)))
        return balance_of(line.key, line.scope, line.window, line.ends, numbers)

    def read(self, scope: str | None = None) -> list[Balance]:
        which = ("all", "") if scope is None else ("one", scope)
        for _ in range(MOST_BATCHES):
            charged, *keys = self._run("list", *which)
            if charged == "0":
                break
        balances: list[Balance] = []
        for start in range(0, len(keys), AT_ONCE):
            balances += balances_of(self._run("read", *keys[start : start + AT_ONCE]), 0)
        return sorted(balances, key=lambda balance: balance.key)


def _each_once(lines: Sequence[Line]) -> Sequence[Line]:
    return list({line.key: line for line in lines}.values()) if len(lines) > 1 else lines
