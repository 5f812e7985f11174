"""The daily sums of a store equal its accounts to the nano-dollar, whoever sums up, crashes or purges in between."""

import contextlib
import json
import multiprocessing
from datetime import date
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runguard.core.money import NOTHING, Amount, to_usd
from runguard.ledger import ledger as daily_sums
from runguard.ledger.ledger import COUNTS, DaySums, Line, StoreOutage, StoreSession, read_sums, sum_up
from runguard.ledger.remote import StoreLedger
from tests.kit.conformance import LONG_S, Connect, a_line, an_id
from tests.kit.examples import each_row
from tests.kit.stores import Place
from tests.kit.waiting import PATIENCE_S

SPAWN = multiprocessing.get_context("spawn")
APPS, USERS, MODELS = ("shop", "docs"), ("ann", "bob"), ("small", "large")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum up records as soon as they are there."""
    monkeypatch.setattr(daily_sums, "SETTLED_S", -60.0)


def text_of(app: str, user: str, model: str, amount: Amount, was: dict[str, Any] | None = None) -> dict[str, Any]:
    figures = {"agent": "a", "model": model, "tool": "", "input": amount[1], "output": 0, "usd": str(to_usd(amount[0]))}
    return {"app": app, "user": user, **figures, "labels": {"team": user[0]}, **({"was": was} if was else {})}


class Books:
    """Settles calls on one account for each app and remembers nothing but the holds that are open to corrections."""

    def __init__(self, session: StoreSession) -> None:
        self.session = session
        self.lines = {app: a_line(f"{app}#{an_id()}", scope=f"app:{app}") for app in APPS}
        self.settled: list[tuple[str, str, Amount, dict[str, Any]]] = []

    def settle(self, app: str, user: str, model: str, amount: Amount) -> None:
        hold, record = an_id(), text_of(app, user, model, amount)
        self.session.reserve(hold, LONG_S, [self.lines[app]], amount)
        self.session.settle(hold, [self.lines[app]], amount, ("call", "run", json.dumps(record)))
        self.settled.append((hold, app, amount, record))

    def correct(self, which: int, model: str, amount: Amount) -> None:
        if not self.settled:
            return
        position = which % len(self.settled)
        hold, app, before, record = self.settled[position]
        if amount == before:
            return
        was = {name: record[name] for name in ("agent", "model", "tool", "input", "output", "usd")}
        new = text_of(app, record["user"], model, amount, was)
        self.session.settle(hold, [self.lines[app]], amount, ("call", "run", json.dumps(new)))
        self.settled[position] = (hold, app, amount, new)

    def repeat(self, which: int) -> None:
        if self.settled:
            hold, app, amount, record = self.settled[which % len(self.settled)]
            self.session.settle(hold, [self.lines[app]], amount, ("call", "run", json.dumps(record)))

    def accounts(self) -> dict[str, Amount]:
        spent = {balance.key: balance.spent for balance in self.session.read()}
        return {app: spent.get(line.key, NOTHING) for app, line in self.lines.items()}

    def sums(self) -> dict[str, Amount]:
        found = dict.fromkeys(APPS, NOTHING)
        for sums in read_sums(self.session, *today()).values():
            for (app, *_), row in sums.rows.items():
                counts = dict(zip(COUNTS, row, strict=True))
                usd, tokens, calls = found[app]
                found[app] = usd + counts["nano"], tokens + counts["input"] + counts["output"], calls + counts["calls"]
        return found


def today() -> tuple[date, date]:
    day = date.today()  # noqa: DTZ011 - with a day before and after it, in any time zone
    return date.fromordinal(day.toordinal() - 1), date.fromordinal(day.toordinal() + 1)


class Dying:
    """A session whose worker dies after so many writes of documents."""

    def __init__(self, session: StoreSession, writes: int) -> None:
        self._session, self._left = session, writes

    def put(self, name: str, version: int, text: str) -> bool:
        if not self._left:
            raise StoreOutage("gone")
        self._left -= 1
        return self._session.put(name, version, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


amounts = st.tuples(st.integers(0, 10**12), st.integers(0, 10**6), st.just(1))
steps = st.one_of(
    st.tuples(st.just("settle"), st.sampled_from(APPS), st.sampled_from(USERS), st.sampled_from(MODELS), amounts),
    st.tuples(st.just("correct"), st.integers(0, 99), st.sampled_from(MODELS), amounts),
    st.tuples(st.just("repeat"), st.integers(0, 99)),
    st.tuples(st.just("sum up"), st.integers(0, 1)),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("purge")),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(steps, max_size=20))
def test_sums_equal_the_accounts(connect: Connect, script: list[tuple[Any, ...]]) -> None:
    workers = [connect(), connect()]
    workers[0].purge(-60)
    before = Books(workers[0]).sums()
    books = Books(workers[0])
    for step, *rest in script:
        match step:
            case "settle":
                books.settle(*rest)
            case "correct":
                books.correct(*rest)
            case "repeat":
                books.repeat(*rest)
            case "sum up":
                assert sum_up(workers[rest[0]])
            case "die":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(daily_sums, "_PAGE", 2)
                    with contextlib.suppress(StoreOutage):
                        sum_up(Dying(workers[1], rest[0]))
            case "purge":
                assert sum_up(workers[1])
                workers[1].purge(-60)
                assert workers[1].tail("call", 10) == []
                books.settled.clear()  # the store has forgotten these calls
    sums = books.sums()
    grown = {app: tuple(a - b for a, b in zip(sums[app], before[app], strict=True)) for app in APPS}
    assert grown == books.accounts()


def test_two_workers_that_sum_up_at_once_count_nothing_twice(session: StoreSession, connect: Connect) -> None:
    books, other = Books(session), connect()
    for number in range(5):
        books.settle("shop", "ann", "small", (number, 1, 1))

    class Overtaken(Dying):
        """Before its first write, another worker sums up everything."""

        def put(self, name: str, version: int, text: str) -> bool:
            if not self._left:
                self._left = 1
                assert sum_up(other)
            return self._session.put(name, version, text)

    assert not sum_up(Overtaken(session, 0))
    assert books.sums()["shop"] == (10, 5, 5) == books.accounts()["shop"]


def work(place: Place, lines: dict[str, Line], seed: int) -> None:
    """In a process of its own: settle calls and sum up in between."""
    daily_sums.SETTLED_S = -60.0  # type: ignore[misc]
    session = place.connect()
    books = Books(session)
    books.lines = lines
    for number in range(40):
        books.settle(APPS[number % 2], "ann", "small", (seed * 1_000 + number, number, 1))
        if number % 7 == seed:
            sum_up(session)
    session.close()


def test_two_processes_that_settle_and_sum_up_agree_with_the_accounts(place: Place, session: StoreSession) -> None:
    books = Books(session)
    processes = [SPAWN.Process(target=work, args=(place, books.lines, seed)) for seed in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sum_up(session)
    assert books.sums() == books.accounts()
    assert sum(calls for _, _, calls in books.sums().values()) == 80


@pytest.mark.parametrize("is_summed_up", [True, False])
def test_the_writer_purges_only_what_is_summed_up(
    place: Place, session: StoreSession, monkeypatch: pytest.MonkeyPatch, is_summed_up: bool
) -> None:
    books = Books(session)
    books.settle("shop", "ann", "small", (7, 1, 1))
    if not is_summed_up:  # another worker is doing it at this moment
        monkeypatch.setattr(daily_sums, "sum_up", lambda _: False)
    ledger = StoreLedger(place.store(), PATIENCE_S, retention_s=-60.0)
    ledger._writer._purge(session)
    assert len(session.tail("call", 5)) == (0 if is_summed_up else 1)
    assert books.sums()["shop"] == (7, 1, 1)


def test_records_are_summed_up_when_they_have_been_there_for_a_while(
    session: StoreSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daily_sums, "SETTLED_S", 30.0)
    Books(session).settle("shop", "ann", "small", (7, 1, 1))
    assert sum_up(session)
    assert session.get("spend") == (0, "")


@each_row("text", ["", "[]", "{}", "nonsense", '{"usd": "x", "agent": 1, "model": 2, "tool": 3}'])
def test_a_record_that_cannot_be_read_is_counted_and_left_out(text: str) -> None:
    sums = DaySums()
    sums.add(text)
    assert (sums.rows, sums.unreadable) == ({}, 1)
    assert DaySums.loaded(sums.dumped()) == sums
