"""Once a later period of an account was used, no call goes on an earlier one, however the clocks step."""

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runguard import Budget, BudgetExceededError, PolicyError, guard, run
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.money import Window
from runguard.engine.budgets import AccountLines
from runguard.engine.money import Accounts
from runguard.ledger.ledger import Account, Hold, Ledger, Stale
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.remote import StoreLedger
from runguard.ledger.sqlite import SqliteStore
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.conformance import CALL, LONG_S, a_line, an_id
from tests.kit.examples import each_row, examples
from tests.kit.waiting import PATIENCE_S

CAPS = {"1m": 2, "1h": 5, "1d": 9}
HOUR = 3_600.0
START = 490_000 * HOUR + 1_800.0  # the middle of an hour

Used = list[Account]


class Worker:
    """A guard's accounts on a ledger that others use, too, by a clock of its own."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], windows: tuple[str, ...], used: Used) -> None:
        budgets = [Budget(calls=CAPS[window], per="app", window=window) for window in windows]
        policy = Policy.build(budgets=budgets, max_wait_seconds=0)
        self.ledger, self._clock, self._used = ledger, clock, used
        self.accounts = Accounts(policy, clock, ledger)
        self._run = self.accounts.spending.begin(RunInfo("run", "app", "ann", "s", at=clock()))
        self._found: AccountLines | None = None

    def _event(self) -> ModelCall:
        return ModelCall("run", ROOT_LANE, "agent", self._clock(), "m", 0, bound=(0, 0))

    async def call(self) -> bool:
        """A whole call; return whether it was admitted."""
        charge, _ = await self.accounts.open(self._run, self._event(), True, lambda: False)
        if charge is None:
            return False
        self._used.extend(charge.lines.accounts)
        self.accounts.settle(charge, Usage(), nano=0)
        return True

    async def find(self) -> None:
        """The first half of a call: its thread is then held up."""
        self._found = self.accounts.finder.of_call(self._run, self._event())

    async def go_on(self) -> None:
        """The second half."""
        if self._found is None:
            return
        found, self._found = self._found.accounts, None
        hold = self.ledger.hold_now(found, CALL) or await self.ledger.reserve(found, CALL)
        if isinstance(hold, Hold):
            self._used.extend(found)
            self.ledger.settle(hold, CALL)


def check(used: Used) -> None:
    """At most the cap in each period, and the periods of each meter in order."""
    latest: dict[str, float] = {}
    for account in used:
        assert account.ends is not None
        assert account.ends >= latest.get(account.meter, 0.0), f"{account.key} after a later period"
        latest[account.meter] = account.ends
    for key, calls in Counter(account.key for account in used).items():
        assert calls <= next(cap for window, cap in CAPS.items() if f"@{window}#" in key), key


class Wall:
    """The machine's clock."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@contextmanager
def a_wall_clock() -> Iterator[Wall]:
    wall = Wall()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", wall)
        yield wall


steps = st.one_of(
    st.sampled_from([-86_400.0, -HOUR, -60.0, -0.001, 0.0, 0.001, 60.0, HOUR, 86_400.0]),
    st.integers(-5_000, 5_000).map(float),
    st.sampled_from([-1_800.0, 1_800.0, 1_799.999, -1_800.001]),  # to the edge of an hour
)
plans = st.lists(st.tuples(steps, st.integers(0, 2), st.sampled_from(["call", "find", "go_on"])), max_size=40)
windows = st.sampled_from([("1h",), ("1m",), ("1m", "1h"), ("1m", "1h", "1d")])
back_and_forth = [(0.0, 0, "call")] * 5 + [(HOUR, 0, "call"), (-HOUR, 0, "call"), (0.0, 1, "call"), (HOUR, 1, "call")]
held_up = [(0.0, 0, "call")] * 5 + [(0.0, 0, "find"), (HOUR, 1, "call"), (0.0, 0, "go_on"), (-HOUR, 0, "find")]


@examples(150)
@given(plans, windows, st.tuples(steps, steps, steps))
@example(back_and_forth, ("1h",), (0.0, 0.0, 0.0))
@example(held_up, ("1h",), (0.0, 0.0, 0.0))
@example([(0.0, 0, "find"), (HOUR, 1, "call"), (0.0, 0, "go_on")], ("1h",), (0.0, 0.0, 0.0))
def test_workers_of_one_process_whose_clocks_step_and_differ(
    plan: list[tuple[float, int, str]], windows: tuple[str, ...], ahead: tuple[float, float, float]
) -> None:
    wall, used, ledger = Wall(), Used(), MemoryLedger()
    workers = [Worker(ledger, lambda more=more: wall() + more, windows, used) for more in ahead]  # type: ignore[misc]
    for seconds, worker, step in plan:
        wall.now += seconds
        asyncio.run(getattr(workers[worker], step)())
    check(used)


@examples(25)
@given(plans, windows)
@example(back_and_forth, ("1h",))
@example(back_and_forth, ("1m", "1h", "1d"))
@example(held_up, ("1h",))
def test_workers_on_one_file_whose_machine_has_a_clock_that_steps(
    plan: list[tuple[float, int, str]], windows: tuple[str, ...]
) -> None:
    """Worker 2 has a ledger of its own, as in another process."""
    with tempfile.TemporaryDirectory() as folder, a_wall_clock() as wall:
        used, url = Used(), f"sqlite:///{folder}/r.db?synchronous=normal"
        ledgers = [StoreLedger(SqliteStore(url), PATIENCE_S) for _ in range(2)]
        workers = [Worker(ledgers[n // 2], wall, windows, used) for n in range(3)]
        for seconds, worker, step in plan:
            wall.now += seconds
            asyncio.run(getattr(workers[worker], step)())
        for ledger in ledgers:
            assert ledger.flush(PATIENCE_S)
            ledger.close()
    check(used)


# ---- memory ---------------------------------------------------------------------------------------------------------


async def test_a_call_that_was_held_up_over_the_end_of_its_window_goes_on_the_next_one() -> None:
    wall, used, ledger = Wall(), Used(), MemoryLedger()
    slow, fast = (Worker(ledger, wall, ("1h",), used) for _ in range(2))
    await slow.find()
    wall.now += HOUR
    assert await fast.call()
    await slow.go_on()
    assert len(used) == 1, "the hour of the slow call is over: nothing is held on it"
    assert await slow.call()


async def test_an_account_of_a_past_period_is_stale_also_where_a_refusal_is_only_reported() -> None:
    ledger = MemoryLedger()
    ledger.period_time(START)
    account = ledger.account("m#1", "m", "1h", START + HOUR, (0, 0, 0), START)
    ledger.period_time(START + HOUR)
    assert isinstance(await ledger.reserve([account], CALL, force=True), Stale)
    assert ledger.hold_now([account], CALL) is None


# ---- SQLite ---------------------------------------------------------------------------------------------------------


async def test_a_file_stays_in_the_later_window_until_the_clock_has_caught_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_wall_clock() as wall, caplog.at_level(logging.WARNING, "runguard"):
        used, ledger = Used(), StoreLedger(SqliteStore(f"sqlite:///{tmp_path}/r.db"), PATIENCE_S)
        worker = Worker(ledger, wall, ("1h",), used)
        assert [await worker.call() for _ in range(3)] == [True] * 3
        wall.now += HOUR
        assert await worker.call()
        wall.now -= HOUR
        assert [await worker.call() for _ in range(5)] == [True] * 4 + [False]
        wall.now += HOUR + 1_799
        assert not await worker.call()
        wall.now += 1
        assert await worker.call()
        ledger.close()
    assert len({account.key for account in used}) == 3
    logged = [record.getMessage().split(":")[0] for record in caplog.records]
    assert logged == ["runguard.clock_back"]


async def test_budgets_of_many_windows_go_on_together_after_a_step_back(tmp_path: Path) -> None:
    """The minute of one account and the day of another are asked for at one time, which both accept."""
    with a_wall_clock() as wall:
        used, ledger = Used(), StoreLedger(SqliteStore(f"sqlite:///{tmp_path}/r.db"), PATIENCE_S)
        wall.now += 10 * HOUR
        assert await Worker(ledger, wall, ("1h",), used).call()
        wall.now += 60 * HOUR
        assert await Worker(ledger, wall, ("1m",), used).call()
        wall.now -= 100 * HOUR
        assert await Worker(ledger, wall, ("1m", "1h", "1d"), used).call()
        ledger.close()
    check(used)


def test_a_period_in_use_stays_in_force_in_every_operation(tmp_path: Path) -> None:
    early = a_line("p#1", begins=START, ends=START + HOUR)
    later = a_line("p#2", begins=START + HOUR, ends=START + 2 * HOUR)
    with a_wall_clock() as wall, closing(SqliteStore(f"sqlite:///{tmp_path}/r.db").connect(PATIENCE_S)) as session:
        assert session.reserve("first", 10 * HOUR, [early], CALL).ok
        wall.now = START + HOUR
        assert session.reserve(an_id(), LONG_S, [later], CALL).ok
        wall.now = START
        for force in (False, True):
            reply = session.reserve(an_id(), LONG_S, [early], CALL, force=force)
            assert reply.stale
            assert reply.latest == START + HOUR
            assert reply.now == START, "the clock itself is not moved: holds expire by it"
        assert session.reserve("first", 10 * HOUR, [early], CALL).ok, "a known reservation answers as before"
        assert session.reserve(an_id(), LONG_S, [later], CALL).ok
        assert session.settle("first", [early], CALL).balances[0].spent == CALL, "a settlement stays where it was held"
        assert session.reserve(an_id(), LONG_S, [early], CALL).stale


def test_what_was_booked_without_a_reservation_uses_its_period(tmp_path: Path) -> None:
    early = a_line("p#1", begins=START, ends=START + HOUR)
    later = a_line("p#2", begins=START + HOUR, ends=START + 2 * HOUR)
    for way in ("settle", "extend"):
        with a_wall_clock(), closing(SqliteStore(f"sqlite:///{tmp_path}/{way}.db").connect(PATIENCE_S)) as session:
            assert session.reserve(an_id(), LONG_S, [early], CALL).ok
            if way == "settle":
                session.settle("lost", [later], CALL)
            else:
                session.extend(later, CALL)
            assert session.reserve(an_id(), LONG_S, [early], CALL).stale


async def test_more_money_goes_to_the_window_in_force(tmp_path: Path) -> None:
    with a_wall_clock() as wall:
        url = f"sqlite:///{tmp_path}/r.db"
        used, ledger = Used(), StoreLedger(SqliteStore(url), PATIENCE_S)
        worker = Worker(ledger, wall, ("1h",), used)
        assert await worker.call()
        wall.now += HOUR
        while await worker.call():
            pass
        wall.now -= HOUR
        ledger.flush(PATIENCE_S)
        ledger.close()
        # another process, which has not yet asked for a reservation
        other = StoreLedger(SqliteStore(url), PATIENCE_S)
        again = Worker(other, wall, ("1h",), used)
        (status,) = again.accounts.extend("app:app", calls=1)
        assert status.limit == CAPS["1h"] + 1
        assert status.spent == CAPS["1h"]
        assert [await again.call(), await again.call()] == [True, False]
        with pytest.raises(PolicyError, match="no budget limits"):
            again.accounts.extend("user:app/ann", calls=1)
        other.close()


# ---- A clock that is set back opens no window again: neither one that is over, nor a fresh one


CAP = 5
START_CLOCK_STEPS = 1_000_000 * HOUR


class Clock:
    def __init__(self) -> None:
        self.now = START_CLOCK_STEPS

    def __call__(self) -> float:
        return self.now


class Counted:
    """Calls behind a guard with a budget per hour.

    Counts those that went through by the latest time that a call was ever made at.
    """

    def __init__(self, window: str = "per_hour") -> None:
        self.clock, self.latest = Clock(), 0.0
        self.by_period: Counter[str] = Counter()
        self._hour = Window.parse("1h")
        self.call = guard(self._model, budget={window: {"max_calls": CAP}}, clock=self.clock)

    def _model(self) -> dict[str, Any]:
        self.by_period[self._hour.bounds(self.latest)[0]] += 1
        return {"usd": 0}

    def step(self, seconds: float) -> None:
        self.clock.now += seconds

    def ask(self, times: int) -> int:
        """How many of them were refused."""
        self.latest, refused = max(self.latest, self.clock.now), 0
        for _ in range(times):
            try:
                with run():  # each in a run of its own, which looks its accounts up
                    self.call()
            except BudgetExceededError:
                refused += 1
        return refused


def test_a_step_back_over_the_end_of_a_window_does_not_open_the_old_one_again() -> None:
    counted = Counted()
    assert counted.ask(7) == 2
    counted.step(HOUR)
    counted.ask(1)  # the new window is open, the old one is forgotten
    counted.step(-HOUR)
    assert counted.ask(10) == 6, "four are left of the new window, and nothing of the old one"
    counted.step(HOUR)
    assert counted.ask(5) == 5


def test_the_next_window_begins_when_the_clock_has_caught_up() -> None:
    counted = Counted()
    assert counted.ask(7) == 2
    counted.step(-HOUR / 2)
    assert counted.ask(7) == 7
    counted.step(HOUR)
    assert counted.ask(7) == 7, "still the window in which it was set back"
    counted.step(HOUR / 2)
    assert counted.ask(7) == 2


@examples(100)
@given(st.lists(st.tuples(st.integers(-4 * 3_600, 4 * 3_600), st.integers(1, 7)), max_size=20))
@example([(0, 5), (3_600, 1), (-3_600, 7), (3_600, 7)])
@example([(0, 5), (-7_200, 7), (7_200, 7)])
def test_however_the_clock_is_set_no_window_gets_more_than_its_cap(steps: list[tuple[int, int]]) -> None:
    counted = Counted()
    for seconds, calls in steps:
        counted.step(seconds)
        counted.ask(calls)
    assert all(made <= CAP for made in counted.by_period.values()), counted.by_period


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 2 * 3_600), st.integers(1, 7)), max_size=20))
def test_a_clock_that_only_goes_forward_gets_every_window_in_full(steps: list[tuple[int, int]]) -> None:
    counted, asked = Counted(), Counter[str]()
    for seconds, calls in steps:
        counted.step(seconds)
        asked[counted._hour.bounds(counted.clock.now)[0]] += calls
        counted.ask(calls)
    assert {period: min(CAP, calls) for period, calls in asked.items()} == dict(counted.by_period)


@each_row("odd", [float("nan"), float("inf"), 1e300, -float("inf")])
def test_a_clock_that_says_nonsense_once_does_not_stay(odd: float) -> None:
    ledger = MemoryLedger()
    assert ledger.period_time(START_CLOCK_STEPS) == START_CLOCK_STEPS
    ledger.period_time(odd)
    assert ledger.period_time(START_CLOCK_STEPS + 1) == START_CLOCK_STEPS + 1


def test_a_clock_set_back_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = MemoryLedger()
    with caplog.at_level(logging.WARNING, "runguard"):
        for at in (START_CLOCK_STEPS, START_CLOCK_STEPS - 0.5, START_CLOCK_STEPS - 2 * HOUR, START_CLOCK_STEPS - HOUR):
            assert ledger.period_time(at) == START_CLOCK_STEPS
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["runguard.clock_back"]
