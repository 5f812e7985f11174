"""A provider that asks to wait: one probe goes first, on a clock that needs no time."""

import asyncio
import logging
from typing import Any

import pytest

from runguard import DeadlineExceededError, guard_async
from runguard.core.decision import Action, Finding
from runguard.core.errors import RunStoppedError
from runguard.core.events import ModelCall
from runguard.engine.rate_limits import ProviderWaits
from tests.kit.virtual_time import VirtualLoop, run_virtually


class BusyError(Exception):
    """A refusal with a header, as clients raise it."""

    def __init__(self, seconds: float | None, status: int = 429) -> None:
        super().__init__("busy")
        self.status_code = status
        self.headers = {} if seconds is None else {"retry-after": str(seconds)}


class Provider:
    """Refuses everybody until a time, and says how long that is."""

    def __init__(self, loop: VirtualLoop, busy_until: float, **policy: Any) -> None:
        self.loop, self.busy_until = loop, busy_until
        self.attempts: list[float] = []
        self.errors: dict[int, Exception] = {}  # by the number of the attempt
        self.takes = 2.0
        values = {"on_rate_limit": "wait", "clock": loop.clock, "max_wait_seconds": 600, **policy}
        self.call: Any = guard_async(self._answer, **values)
        self.guard = self.call.__runguard__.guard
        self.waits = next(gate for gate in self.guard.gates if isinstance(gate, ProviderWaits))
        self.waits.now = loop.time

    async def _answer(self, model: str = "") -> dict[str, int]:
        self.attempts.append(self.loop.time())
        await asyncio.sleep(self.takes)
        if (error := self.errors.get(len(self.attempts))) is not None:
            raise error
        if self.loop.time() < self.busy_until and model != "idle":
            raise BusyError(10)
        return {"tokens": 1}

    async def until_success(self, after: float = 0.0) -> None:
        """A caller that tries again at once."""
        await asyncio.sleep(after)
        while True:
            try:
                await self.call()
                return
            except BusyError:
                continue


def play(busy_until: float, callers: int = 8, **policy: Any) -> Provider:
    loop = VirtualLoop()
    provider = Provider(loop, busy_until, **policy)

    async def go() -> None:
        await asyncio.gather(*(provider.until_success(n / 100) for n in range(callers)))

    run_virtually(loop, go())
    return provider


def test_others_wait_and_follow_one_probe() -> None:
    provider = play(busy_until=25.0)
    first = [at for at in provider.attempts if at < 5]
    later = [at for at in provider.attempts if at >= 5]
    assert len(first) == 8, "nothing was known before the first answer"
    probes = [at for at in later if sum(abs(at - other) < 0.01 for other in later) == 1]
    assert len(probes) == 2, "one was refused at 12 s, one came through at 24 s"
    assert len(later) == 2 + 7
    assert provider.waits.busy == {}


def test_without_it_everybody_tries_again_and_again() -> None:
    assert len(play(busy_until=25.0, on_rate_limit="pass").attempts) == 8 * 13
    assert len(play(busy_until=25.0, on_rate_limit="wait").attempts) == 17


def test_by_default_it_waits_only_where_a_budget_waits() -> None:
    loop = VirtualLoop()
    assert not Provider(loop, 0, on_rate_limit=None).guard.policy.waits_for_provider
    budget = [{"calls": 1, "window": "1m", "per": "app", "on_exhausted": "wait"}]
    assert Provider(loop, 0, on_rate_limit=None, budgets=budget).guard.policy.waits_for_provider
    loop.close()


def test_calls_of_another_model_go_on() -> None:
    loop = VirtualLoop()
    provider = Provider(loop, 5.0, budget={"max_tokens": 10**8})

    async def go() -> None:
        with pytest.raises(BusyError):
            await provider.call(model="busy")
        await provider.call(model="idle")
        assert loop.passed == 4
        await provider.call(model="busy")

    run_virtually(loop, go())
    assert provider.attempts == [0.0, 2.0, 12.0]


@pytest.mark.parametrize("end", ["cancelled", "lost"])
def test_a_probe_that_says_nothing_hands_over_to_the_next(end: str) -> None:
    loop = VirtualLoop()
    provider = Provider(loop, 3.0)
    if end == "lost":
        provider.errors[2] = ConnectionResetError()

    async def go() -> None:
        with pytest.raises(BusyError):
            await provider.call()
        first, second = (asyncio.create_task(provider.call()) for _ in range(2))
        await asyncio.sleep(10.5)
        assert len(provider.attempts) == 2
        if end == "cancelled":
            first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await second

    run_virtually(loop, go())
    assert provider.attempts == [0.0, 12.0, 12.5 if end == "cancelled" else 14.0]


def test_a_bound_that_is_too_short_lets_the_call_go() -> None:
    loop = VirtualLoop()
    provider = Provider(loop, 100.0, max_wait_seconds=5)

    async def go() -> None:
        for _ in range(3):
            with pytest.raises(BusyError):
                await provider.call()

    run_virtually(loop, go())
    assert provider.attempts == [0.0, 2.0, 4.0]


def test_the_kill_switch_ends_the_wait() -> None:
    loop = VirtualLoop()
    provider = Provider(loop, 100.0)

    async def go() -> None:
        with pytest.raises(BusyError):
            await provider.call()
        waiting = asyncio.create_task(provider.call())
        await asyncio.sleep(1.5)
        (run,) = provider.call.snapshot()["runs"]
        assert run["waiting"] == [{"scope": "provider:Provider._answer", "calls": 1, "until": None}]
        assert provider.call.snapshot()["provider_waits"] == {"Provider._answer": 8.5}
        provider.call.stop("all", actor="ops")
        with pytest.raises(RunStoppedError):
            await waiting

    run_virtually(loop, go())
    assert (loop.passed, len(provider.attempts)) == (3.5, 1)


def test_shadow_mode_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "runguard"):
        provider = play(busy_until=3.0, callers=2, mode="shadow")
    assert provider.loop.passed < 5
    assert any("would have waited" in line for line in caplog.messages)
    assert sum("runguard.provider_busy" in line for line in caplog.messages) == 1


def test_a_stop_of_the_run_ends_the_wait() -> None:
    loop = VirtualLoop()
    provider = Provider(loop, 100.0)

    async def go() -> None:
        with pytest.raises(BusyError):
            await provider.call()
        waiting = asyncio.create_task(provider.call())
        await asyncio.sleep(1.5)
        guard = provider.guard
        (run,) = guard.runs.values()
        event = ModelCall(run.info.run, "", "agent", loop.clock())
        guard.stop(run, event, Finding("deadline", Action.STOP, 2, 1, "seconds", "run"))
        with pytest.raises(DeadlineExceededError):
            await waiting

    run_virtually(loop, go())
    assert (loop.passed, len(provider.attempts)) == (3.5, 1)
