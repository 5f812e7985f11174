"""All operations of a Redis or Valkey store: reservations and settlements, marks, documents, records, claims, purge."""

import json
from collections.abc import Sequence
from typing import Final

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.identity import IDENTITY, Seen
from runguard.ledger.redis.connection import RedisConnection
from runguard.ledger.redis.encoding import balance_of, balances_of, moment_text, seconds_text
from runguard.ledger.store import Balance, Line, Record, SettledCall, StoreError, StoreReply, check_amounts, check_ttl

MOST_EXACT: Final = (1 << 53) - 1
_AT_ONCE: Final = 500
_MOST_BATCHES: Final = 20_000
RECORDS_KEPT: Final = 100_000  # of each kind, about
_LINES_KEPT: Final = 1_024
_UNUSUAL: Final = 100


class RedisSession(RedisConnection):
    """One connection with all operations of ``StoreSession``."""

    def __init__(self, url: str, name: str, namespace: str, timeout: float, seen: Seen) -> None:
        super().__init__(url, name, namespace, timeout, seen)
        self._known: dict[str, tuple[Line, tuple[bytes, bytes, bytes]]] = {}
        self._unusual = 0  # calls before the usual case is tried again

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
        return [part for line in lines for part in self._packed_line(line)]

    def _packed_line(self, line: Line) -> tuple[bytes, bytes, bytes]:
        """The arguments of a line, cached: a run uses the same lines again and again."""
        known = self._known.get(line.key)
        if known is None or (known[0] is not line and known[0] != line):
            if len(self._known) >= _LINES_KEPT:
                self._known.clear()
            known = self._known[line.key] = line, self._packed(line)
        return known[1]

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

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
        lines = _each_once(lines)
        return self._reply(lines, self._run("reserve", *self._asked_for(hold, ttl, lines, want, force)))

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        return self._reply(lines, self._run("settle", *self._billed(hold, lines, actual, record)))

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        lines = _each_once(lines)
        if lines == bill.lines and lines and not force:
            usual = self._next_call(bill, hold, ttl, want)
            if usual is not None:
                return usual
        first = self._billed(bill.hold, bill.lines, bill.actual, bill.record)
        second = self._asked_for(hold, ttl, lines, want, force)
        reply = self._run("settle_and_reserve", *first, *second, str(len(first)))
        if isinstance(reply, list):
            *settled, reserved = reply
        else:
            settled, _, reserved = reply.partition("\f")
        return self._reply(bill.lines, settled), self._reply(lines, reserved)

    def _next_call(
        self, bill: SettledCall, hold: str, ttl: float, want: Amount
    ) -> tuple[StoreReply, StoreReply] | None:
        """Do both in the usual case; None: it is another case, and nothing was done."""
        if self._unusual:
            self._unusual -= 1
            return None
        check_ttl(ttl)
        record = (*bill.record, str(RECORDS_KEPT)) if bill.record is not None else ("",)
        args = (bill.hold, self._amount(bill.actual), hold, self._amount(want), seconds_text(ttl), *record)
        reply = self._run("next_call", *args, *[part for line in bill.lines for part in self._packed_line(line)[::2]])
        if not reply:
            self._unusual = _UNUSUAL
            return None
        settled, _, reserved = reply.partition("\f")
        return self._reply(bill.lines, settled), self._reply(bill.lines, reserved)

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
        for _ in range(_MOST_BATCHES):
            charged, *keys = self._run("list", *which)
            if charged == "0":
                break
        balances: list[Balance] = []
        for start in range(0, len(keys), _AT_ONCE):
            balances += balances_of(self._run("read", *keys[start : start + _AT_ONCE]), 0)
        return sorted(balances, key=lambda balance: balance.key)

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        return bool(self._run("mark", key, mark, json.dumps([percent, *limit])))

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        found: dict[str, tuple[float, Amount]] = {}
        names_and_texts = self._do("HGETALL", f"{self._prefix}m:{key}")
        for mark, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True):
            percent, usd, tokens, calls = json.loads(text)
            found[mark] = percent, (usd, tokens, calls)
        return found

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        if marks:
            self._do("HDEL", f"{self._prefix}m:{key}", *marks)

    def get(self, name: str) -> tuple[int, str]:
        expected = self._seen.text
        identity, version, text = self._values(f"t:{IDENTITY}", f"v:{name}", f"t:{name}")
        self._seen.meet(expected, identity or "")
        if (version is None) != (text is None):
            raise StoreError(
                f"{self._name}: the document '{name}' is damaged: its version or its text is missing. Restore "
                "the store from a backup, "
                "or remove the document: runguard store repair"
            )
        return (int(version), text) if version is not None and text is not None else (0, "")

    def put(self, name: str, version: int, text: str) -> bool:
        return bool(self._run("put", name, str(version), text))

    def drop(self, name: str) -> None:
        self._do("DEL", f"{self._prefix}v:{name}", f"{self._prefix}t:{name}")

    def now(self) -> float:
        seconds, micros = self._do("TIME")
        return float(f"{seconds}.{int(micros):06d}")

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        self._run("append", kind, ref, text, str(RECORDS_KEPT))

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        if count <= 0:
            return []
        found = self._do("XREVRANGE", f"{self._prefix}r:{kind}", "+", "-", "COUNT", str(count))
        records = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reversed(found)]
        return [(float(record["at"]), record["ref"], record["text"]) for record in records]

    def page(self, kind: str, after: str, count: int) -> list[tuple[str, float, str, str]]:
        if count <= 0:
            return []
        millis, _, number = after.partition("-")
        first = f"{millis}-{int(number) + 1}" if after else "-"  # "(" for "after" needs Redis 6.2
        found = self._do("XRANGE", f"{self._prefix}r:{kind}", first, "+", "COUNT", str(count))
        records = [(name, dict(zip(fields[::2], fields[1::2], strict=True))) for name, fields in found]
        return [(name, float(record["at"]), record["ref"], record["text"]) for name, record in records]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        since = "0" if last is None else str(-last)
        ids = self._do("LRANGE", f"{self._prefix}i:{len(kind.encode())}:{kind}:{ref}", since, "-1")
        found: list[str] = []
        for start in range(0, len(ids), _AT_ONCE):
            found += self._run("about", kind, *ids[start : start + _AT_ONCE])
        return [(float(at), text) for at, text in zip(found[::2], found[1::2], strict=True)]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        return int(self._run("beat", run, json.dumps([worker, text]), "1" if ended else "0"))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        found = self._run("running", seconds_text(within))
        runs = []
        for run, beat, facts in zip(found[::3], found[1::3], found[2::3], strict=True):
            worker, text = json.loads(facts)
            runs.append((run, worker, float(beat), text))
        return runs

    def claim(self, key: str, ttl: float) -> str:
        return str(self._run("claim", key, seconds_text(ttl)))

    def finish(self, key: str, done: bool) -> None:
        self._run("finish", key, "1" if done else "0")

    def purge(self, older_than: float) -> None:
        old = moment_text(self.now() - float(seconds_text(older_than)))
        for what in ("expire", "holds", "claims", "runs", "accounts", "passing"):
            self._batches(what, old)
        for kind in self._do("SMEMBERS", f"{self._prefix}kinds"):
            self._batches("records", old, kind)

    def _batches(self, what: str, old: str, kind: str = "") -> None:
        skip = 0
        for _ in range(_MOST_BATCHES):
            seen, kept = self._run("purge", what, old, str(_AT_ONCE), str(skip), kind)
            if seen < _AT_ONCE:
                return
            skip += kept


def _each_once(lines: Sequence[Line]) -> Sequence[Line]:
    return list({line.key: line for line in lines}.values()) if len(lines) > 1 else lines
