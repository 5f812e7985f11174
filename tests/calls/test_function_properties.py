"""Whatever calls cost, however they end and in whatever order: the cap holds, nothing stays held, and the figures are
true.
"""

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import count
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runguard import LoopDetectedError, RunStoppedError, guard, guard_async, run
from runguard.core.money import MOST_USD, stated_nano

PATIENCE_S = 20
MOST = 100  # tokens of one answer; one token costs a millionth of a dollar
PRICES = {"m": {"input": 1, "output": 1}}
ENDS = st.sampled_from(["told", "told", "told", "refused", "lost", "interrupted"])


class Refused(Exception):  # noqa: N818 - a provider's
    status_code = 429


class Lost(Exception): ...  # noqa: N818


class Interrupted(BaseException): ...


FAULTS: dict[str, type[BaseException]] = {"refused": Refused, "lost": Lost, "interrupted": Interrupted}


@dataclass
class Job:
    """One call: what it takes, how it ends, how long it lasts, and when somebody gives up on it."""

    output: int
    ends: str = "told"
    lasts: int = 0
    cancelled_after: int | None = None
    beside: list["Job"] = field(default_factory=list)


JOBS = st.builds(Job, st.integers(1, MOST), ENDS, st.integers(0, 3), st.none() | st.integers(0, 4))


@dataclass
class Bill:
    """The provider's own books, and a look at ours whenever it is called."""

    cap: Decimal
    guarded: Any = None
    told: int = 0
    lost: int = 0
    made: int = 0
    over: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> None:
        with self.lock:
            self.made += 1
        self.look()

    def look(self) -> None:
        for status in self.guarded.budgets():
            if status.spent + status.reserved > status.limit or status.overrun or status.closed:
                self.over.append(status)

    def leave(self, job: Job) -> Any:
        with self.lock:
            if job.ends == "told":
                self.told += job.output
            elif job.ends != "refused":
                self.lost += 1
        if job.ends != "told":
            raise FAULTS[job.ends]
        return {
            "model": "m",
            "usage": {"prompt_tokens": 0, "completion_tokens": job.output, "total_tokens": job.output},
        }

    def check(self) -> None:
        """At the end: nothing over, nothing held, and what is reported is what the provider bills."""
        self.look()
        assert not self.over
        spend = self.guarded.spend()
        assert spend["reserved_usd"] == 0
        assert all(status.reserved == 0 and status.spent <= status.limit for status in self.guarded.budgets())
        assert spend["calls"] == self.made
        assert spend["estimated_calls"] == self.lost
        assert spend["usd"] >= Decimal(self.told) / 10**6
        assert spend["usd"] <= self.cap
        if not self.lost:
            assert spend["usd"] == Decimal(self.told) / 10**6


def limits(cap: int) -> dict[str, Any]:
    return {
        "budget": {"max_usd": Decimal(cap) / 10**6},
        "prices": PRICES,
        "tokens": lambda *args, **kwargs: 0,
        "max_wait_seconds": 0.02,
    }


SLOW = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(jobs=st.lists(JOBS, min_size=1, max_size=16), cap=st.integers(1, 900), threads=st.integers(1, 6))
def test_threads_with_a_known_bound_never_pass_the_cap(jobs: list[Job], cap: int, threads: int) -> None:
    bill = Bill(Decimal(cap) / 10**6)

    def model(job: Job, **request: Any) -> Any:
        bill.enter()
        if job.lasts:
            threading.Event().wait(job.lasts / 5_000)
        return bill.leave(job)

    bill.guarded = guard(model, **limits(cap))
    mine, refusals = iter(jobs), []

    def work() -> None:
        while True:
            with bill.lock:
                job = next(mine, None)
            if job is None:
                return
            try:
                bill.guarded(job, model="m", max_tokens=MOST)
            except RunStoppedError as error:
                refusals.append(error)
            except (Refused, Lost, Interrupted):
                continue

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
    assert bill.made + len(refusals) == len(jobs)
    bill.check()


async def _lasting(job: Job) -> None:
    for _ in range(job.lasts):
        await asyncio.sleep(0)


async def _all(call: Any, jobs: list[Job], **request: Any) -> list[Any]:
    """All at once, some of them given up on the way."""

    async def one(job: Job) -> Any:
        task = asyncio.ensure_future(call(job, **request))
        if job.cancelled_after is not None:
            for _ in range(job.cancelled_after):
                await asyncio.sleep(0)
            task.cancel()
        try:
            return await task
        except (RunStoppedError, Refused, Lost, Interrupted, asyncio.CancelledError) as error:
            return error

    return await asyncio.wait_for(asyncio.gather(*(one(job) for job in jobs)), PATIENCE_S)


@SLOW
@given(jobs=st.lists(JOBS, min_size=1, max_size=24), cap=st.integers(1, 1_200))
def test_tasks_with_a_known_bound_never_pass_the_cap(jobs: list[Job], cap: int) -> None:
    for job in jobs:
        if job.ends == "interrupted":  # a loop does not outlive one
            job.ends = "lost"
    bill = Bill(Decimal(cap) / 10**6)

    async def model(job: Job, **request: Any) -> Any:
        bill.enter()
        try:
            await _lasting(job)
        except asyncio.CancelledError:
            bill.lost += 1
            raise
        return bill.leave(job)

    bill.guarded = guard_async(model, **limits(cap))
    asyncio.run(_all(bill.guarded, jobs, model="m", max_tokens=MOST))
    bill.check()


@SLOW
@given(jobs=st.lists(JOBS, min_size=1, max_size=24), cost=st.integers(1, 50), calls=st.integers(1, 12), data=st.data())
def test_tasks_whose_cost_nobody_knows_beforehand(jobs: list[Job], cost: int, calls: int, data: st.DataObject) -> None:
    """One price for all: the first goes alone, and then as many as fit.

    Any of them may fail, be refused or be given up.
    """
    spare = data.draw(st.integers(0, cost - 1))
    told = refused = given_up = 0

    async def model(job: Job) -> Any:
        nonlocal told, refused, given_up
        try:
            await _lasting(job)
        except asyncio.CancelledError:
            given_up += 1
            raise
        if job.ends == "told":
            told += 1
            return {"usd": Decimal(cost) / 100}
        refused += job.ends == "refused"
        given_up += job.ends != "refused"
        raise Refused if job.ends == "refused" else Lost

    call: Any = guard_async(model, budget={"max_usd": Decimal(cost * calls + spare) / 100}, max_wait_seconds=0.02)
    asyncio.run(_all(call, jobs))
    spend = call.spend()
    assert told <= calls
    assert spend["calls"] == told + refused + given_up
    assert spend["reserved_usd"] == 0
    assert spend["estimated_calls"] == given_up
    assert Decimal(told * cost) / 100 <= spend["usd"] <= Decimal((told + given_up) * cost) / 100
    assert not call.budgets() or not call.budgets()[0].closed
    if not given_up and not any(isinstance(job.cancelled_after, int) for job in jobs):
        assert told == min(calls, sum(job.ends == "told" for job in jobs)) or call.trips
        assert spend["usd"] == Decimal(told * cost) / 100


@settings(max_examples=40)
@given(cost=st.integers(1, 10**9), cap=st.integers(1, 10**10), nested=st.booleans())
def test_one_after_the_other_spends_what_fits_exactly(cost: int, cap: int, nested: bool) -> None:
    """In nano-dollars, so that any rounding would show."""
    made, nano = 0, Decimal(1).scaleb(-9)
    tries = min(cap // cost, 20) + 2

    def model() -> Any:
        nonlocal made
        made += 1
        return {"usd": cost * nano}

    around: dict[str, Any] = {"budget": {"max_usd": cap * nano}}
    call: Any = guard(model, **({} if nested else around))
    with run(**(around if nested else {})) as block:
        for _ in range(tries):
            try:
                call()
            except RunStoppedError:
                continue
        figures = block.caller.spend() if nested and block.caller is not None else call.spend()
    # The first is let in whatever it may take; whoever breaks the cap closes it.
    assert made == max(1, min(cap // cost, tries))
    assert figures["usd"] == made * cost * nano


def _first_circle(signs: list[str], repeats: int, longest: int) -> int | None:
    """By looking: after how many steps the last ones are ``repeats`` equal rounds."""
    for end in range(1, len(signs) + 1):
        for period in range(1, longest + 1):
            last = signs[max(end - period * repeats, 0) : end]
            if len(last) == period * repeats and last == last[:period] * repeats:
                return end
    return None


@settings(max_examples=60)
@given(signs=st.lists(st.sampled_from("abc"), max_size=40), repeats=st.integers(2, 4), longest=st.integers(1, 5))
def test_circles_are_found_at_once_and_only_there(signs: list[str], repeats: int, longest: int) -> None:
    steps = count()
    call = guard(lambda: {"sig": signs[next(steps)]}, loop={"repeats": repeats, "max_cycle_len": longest})
    made, found = 0, None
    for _ in signs:
        try:
            call()
            made += 1
        except LoopDetectedError as error:
            found = error
            break
    expected = _first_circle(signs, repeats, longest)
    if expected is None or expected == len(signs):  # said with the next call, and there is none
        assert (made, found) == (len(signs), None)
    else:
        assert found is not None
        assert (made, next(steps)) == (expected, expected)
        pattern = list(found.pattern)
        assert signs[:expected][-len(pattern) * found.repeats :] == pattern * found.repeats
        assert found.repeats >= repeats


@given(
    value=st.decimals(allow_nan=True, allow_infinity=True)
    | st.floats()
    | st.integers()
    | st.booleans()
    | st.text()
    | st.none()
)
def test_an_amount_is_rounded_up_or_none(value: Any) -> None:
    nano = stated_nano(value)
    is_amount = False
    with suppress(InvalidOperation):
        stated = Decimal(str(value))
        is_amount = not isinstance(value, bool | None) and stated.is_finite() and 0 <= stated <= MOST_USD
    assert (nano is not None) == is_amount
    if nano is not None:
        assert nano - 1 < Fraction(str(value)) * 10**9 <= nano
