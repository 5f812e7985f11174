"""The calls of a store, summed up by day: for the bill of a month, and for days whose records were purged.

A document per day (UTC) contains the sums of the calls recorded on it, and the id of the last record in them. One more
document says up to which record all of them are summed up. So any worker may continue at any time, and a worker that
dies in the middle, or that another one overtakes, counts nothing twice.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Final

from runguard.core.errors import PolicyError
from runguard.core.money import to_nano
from runguard.ledger.store import StoreOutage, StoreSession

_DONE: Final = "spend"  # the document that says up to which record days are summed up
_PAGE: Final = 2_000
_TRIES: Final = 5
# A store may number a record before it shows it: sum up what has been there for a while.
SETTLED_S: Final = 30.0
_NAMES: Final = ("app", "user", "agent", "model", "tool")
COUNTS: Final = ("calls", "input", "output", "nano", "unpriced", "estimated", "tool_calls")

Key = tuple[str, ...]  # app, user, agent, model and tool of calls, then their labels as JSON


@dataclass(slots=True)
class DaySums:
    """The calls of one day, by who made them."""

    last: str = ""  # id of the last record that is summed up
    rows: dict[Key, list[int]] = field(default_factory=dict)  # in the order of COUNTS
    unreadable: int = 0

    def add(self, text: str) -> None:
        """Add the record of a call. One that corrects an earlier record takes that one back."""
        try:
            record = json.loads(text)
            labels = record.get("labels") or {}
            who = (record.get("app"), record.get("user"), json.dumps(labels, sort_keys=True) if labels else "")
            new = _counts(record, who)
            was = _counts(record["was"], who) if record.get("was") else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, PolicyError):
            self.unreadable += 1
            return
        self._book(*new, 1)
        if was is not None:
            self._book(*was, -1)

    def _book(self, key: Key, counts: Iterable[int], sign: int) -> None:
        row = self.rows.setdefault(key, [0] * len(COUNTS))
        for position, count in enumerate(counts):
            row[position] += sign * count
        if not any(row):
            del self.rows[key]

    def dumped(self) -> str:
        rows = [[*key, *row] for key, row in self.rows.items()]
        return json.dumps({"last": self.last, "rows": rows, "unreadable": self.unreadable}, separators=(",", ":"))

    @classmethod
    def loaded(cls, text: str) -> "DaySums":
        if not text:
            return cls()
        found: dict[str, Any] = json.loads(text)
        width = len(_NAMES) + 1
        rows = {tuple(row[:width]): list(row[width:]) for row in found["rows"]}
        return cls(found["last"], rows, found["unreadable"])


def _counts(facts: dict[str, Any], who: tuple[Any, Any, str]) -> tuple[Key, tuple[int, ...]]:
    usd = facts["usd"]
    nano = 0 if usd is None else to_nano(usd, least=0)
    names = (who[0], who[1], facts["agent"], facts["model"], facts["tool"])
    key = (*(name if isinstance(name, str) else "" for name in names), who[2])
    unpriced, estimated = int(usd is None), int(bool(facts.get("estimated")))
    of_tool = int(facts.get("kind") == "tool")  # the price of a tool, not a model call
    return key, (1 - of_tool, int(facts["input"]), int(facts["output"]), nano, unpriced, estimated, of_tool)


def day_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def sum_up(session: StoreSession) -> bool:
    """Add new records to the sums of their days. False when another worker is doing it at this moment."""
    until = session.now() - SETTLED_S
    while True:
        version, done = session.get(_DONE)
        page = [row for row in session.page("call", done, _PAGE) if row[1] < until]
        if not page:
            return True
        for day in sorted({day_of(at) for _, at, _, _ in page}):
            if not _add_to_day(session, day, [(name, text) for name, at, _, text in page if day_of(at) == day]):
                return False
        if not session.put(_DONE, version, page[-1][0]):
            return False


def purge(session: StoreSession, older_than: float) -> bool:
    """Drop what is older than so many seconds. What calls cost stays, as sums of their days; without the sums nothing
    is dropped. False when another worker sums up at this moment.
    """
    if not sum_up(session):
        return False
    session.purge(max(older_than, 2 * SETTLED_S))
    return True


def _add_to_day(session: StoreSession, day: str, records: list[tuple[str, str]]) -> bool:
    version, text = session.get(f"{_DONE} {day}")
    sums = DaySums.loaded(text)
    new = [(name, record) for name, record in records if _order(name) > _order(sums.last)]
    for _, record in new:
        sums.add(record)
    sums.last = new[-1][0] if new else sums.last
    return not new or session.put(f"{_DONE} {day}", version, sums.dumped())


def read_sums(session: StoreSession, first: date, last: date) -> dict[str, DaySums]:
    """The sums of days, with the records that are not summed up yet. Nothing is written."""
    for _ in range(_TRIES):
        _, done = session.get(_DONE)
        found = _read(session, first, last, done)
        if session.get(_DONE)[1] == done:
            return found
    raise StoreOutage("the sums of the store change while they are read; try again")


def _read(session: StoreSession, first: date, last: date, done: str) -> dict[str, DaySums]:
    days: dict[str, DaySums] = {}
    for number in range(first.toordinal(), last.toordinal() + 1):
        day = date.fromordinal(number).isoformat()
        if text := session.get(f"{_DONE} {day}")[1]:
            days[day] = DaySums.loaded(text)
    after = done
    while page := session.page("call", after, _PAGE):
        after = page[-1][0]
        for name, at, _, text in page:
            day = day_of(at)
            if first.isoformat() <= day <= last.isoformat():
                sums = days.setdefault(day, DaySums())
                if _order(name) > _order(sums.last):
                    sums.add(text)
    return days


def _order(name: str) -> tuple[int, ...]:
    """The id of a record as numbers, which grow from record to record."""
    return tuple(map(int, name.split("-"))) if name else ()
