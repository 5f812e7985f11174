"""The model calls of a store over time. Each refresh reads only new records."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from runguard.core.money import to_usd
from runguard.ledger.ledger import StoreSession
from runguard.view.records import Call, Unreadable, latest, read_call, table, word
from runguard.view.rows import Figures, Spend

CALLS_KEPT: Final = 20_000
BY: Final = ("app", "agent", "model", "user", "tool")
TOOLS: Final = "(tools)"  # calls of tools that have a price, beside the models
OTHERS: Final = "others"
_FIRST_LOOK: Final = 256
_RUNS_ASKED: Final = 2_000
_ALIVE_S: Final = 60.0
_STEPS: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0)
_BUCKETS: Final = 60
_NAMES: Final = 7  # names with their own colour


class CallLog:
    """The last calls that a store recorded, oldest first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_truncated = False  # the store has older calls
        self._last: list[tuple[float, str, str]] = []
        self._owners: dict[str, tuple[str, str]] = {}  # run -> app and user, if its calls do not name them
        self._nameless = 0

    def refresh(self, session: StoreSession, unreadable: Unreadable) -> None:
        """Read new records: request a longer and longer tail until it contains the last known record."""
        size = _FIRST_LOOK
        while True:
            rows = session.tail("call", size)
            known = _end_of(rows, self._last)
            if known is not None or len(rows) < size or size >= CALLS_KEPT:
                break
            size = min(size * 8, CALLS_KEPT)
        if known is None:  # the first refresh, or too many new records: start over
            self.calls, known, unreadable.counts["call"] = [], 0, 0
            self.is_truncated = len(rows) >= CALLS_KEPT
        new_calls = [read_call(*row) for row in rows[known:]]
        unreadable.counts["call"] = unreadable.counts.get("call", 0) + new_calls.count(None)
        self.calls += [call for call in new_calls if call is not None]
        if len(self.calls) > CALLS_KEPT:
            self.calls, self.is_truncated = self.calls[-CALLS_KEPT:], True
        self._last = rows[-8:] or self._last
        self._name_owners(session)

    def _name_owners(self, session: StoreSession) -> None:
        """Find the owners of older records, which do not name them, in the run's own record or its heartbeat."""
        nameless = {call.run for call in self.calls if call.app is None} - self._owners.keys()
        if not nameless or len(nameless) == self._nameless:
            return
        alive = ((run, text) for run, _, _, text in session.running(_ALIVE_S))
        for run, text in (*alive, *((run, text) for _, run, text in session.tail("run", _RUNS_ASKED))):
            if run in nameless and (facts := table(text)) is not None:
                self._owners[run] = word(facts.get("app")), word(facts.get("user"))
        self._nameless = len(nameless - self._owners.keys())

    def property_of(self, by: str) -> Callable[[Call], str]:
        if by == "agent":
            return lambda call: call.agent
        if by == "model":
            return lambda call: TOOLS if call.is_tool else call.model
        if by == "tool":
            return lambda call: call.tool
        which = BY.index(by) and 1  # app, or user

        def owner(call: Call) -> str:
            name = call.user if which else call.app
            return name if name is not None else self._owners.get(call.run, ("", ""))[which]

        return owner


def _end_of(rows: Sequence[tuple[float, str, str]], last: Sequence[tuple[float, str, str]]) -> int | None:
    """Return the position after the last known records, or None if they are not in ``rows``."""
    if not last:
        return None
    for end in range(len(rows), len(last) - 1, -1):
        if rows[end - 1] == last[-1] and list(rows[end - len(last) : end]) == list(last):
            return end
    return None


def spend_of(log: CallLog, since: float, until: float, by: str) -> Spend:
    """Sum up the calls of a period in buckets that begin at multiples of the step."""
    until = max(until, since + 1.0)
    step = next((step for step in _STEPS if (until - since) / step <= _BUCKETS), (until - since) / _BUCKETS)
    first = since // step * step
    begins = tuple(first + step * number for number in range(int((until - first) // step) + 1))
    calls = [call for call in latest(log.calls) if since <= call.at <= until]
    property_of = log.property_of(by)
    named: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        named[property_of(call)].append(call)
    totals = sorted(
        (_figures(name, found) for name, found in named.items()),
        key=lambda figures: (-figures.usd, -figures.tokens, figures.name),
    )
    names = [figures.name for figures in totals]
    lines = [named[name] for name in names]
    if len(names) > _NAMES + 1:
        names = [*names[:_NAMES], OTHERS]
        lines = [*lines[:_NAMES], [call for line in lines[_NAMES:] for call in line]]
    nanos, tokens = ([[0] * len(begins) for _ in names] for _ in range(2))
    for position, line in enumerate(lines):
        for call in line:
            bucket = min(int((call.at - first) // step), len(begins) - 1)
            nanos[position][bucket] += call.nano or 0
            tokens[position][bucket] += call.tokens_in + call.tokens_out
    reaches_back = not log.is_truncated or (bool(log.calls) and log.calls[0].at <= since)
    return Spend(
        by,
        since,
        until,
        step,
        begins,
        tuple(names),
        tuple(tuple(nano / 1e9 for nano in row) for row in nanos),
        tuple(map(tuple, tokens)),
        tuple(totals),
        _figures("", calls),
        None if reaches_back else len(log.calls),
    )


def _figures(name: str, calls: Sequence[Call]) -> Figures:
    return Figures(
        name,
        to_usd(sum(call.nano or 0 for call in calls)),
        sum(call.tokens_in + call.tokens_out for call in calls),
        sum(not call.is_tool for call in calls),
        sum(call.nano is None for call in calls),
        sum(call.estimated for call in calls),
        sum(call.is_tool for call in calls),
    )
