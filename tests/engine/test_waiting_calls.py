"""A budget with ``on_exhausted="wait"``: calls wait in line until a window has room, on a clock that needs no time."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import DeadlineExceededError, guard_async
from runguard.core.decision import Action, Finding
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.core.events import ModelCall
from runguard.core.money import Budget
from runguard.engine.rate_limits import ProviderWaits
from tests.kit.accounts import Asked, Shop
from tests.kit.examples import each_row
from tests.kit.optional import present
from tests.kit.virtual_time import START, VirtualLoop, run_virtually


class VirtualShop(Shop):
    """A shop whose clock is that of a virtual loop."""

    def __init__(self, loop: VirtualLoop, *budgets: Budget, **policy: Any) -> None:
        self.loop = loop
        super().__init__(*budgets, **{"clock": loop.clock, "max_wait_seconds": 600, **policy})
        for name in ("run", "other"):
            self.open(name)

    @property
    def now(self) -> float:
        return self.loop.clock()

    @now.setter
    def now(self, at: float) -> None: ...


def per_minute(calls: int | None = 2, **more: Any) -> Budget:
    return Budget(**{"calls": calls, "per": "model", "window": "1m", "on_exhausted": "wait", **more})


def virtually(test: Any, *budgets: Budget, **policy: Any) -> Any:
    """Run a test on a loop of its own."""
    loop = VirtualLoop()
    return run_virtually(loop, test(VirtualShop(loop, *budgets, **policy)))


def waiting(shop: Shop, run: str = "run") -> list[dict[str, Any]]:
    return next(one["waiting"] for one in shop.guard.snapshot()["runs"] if one["run"] == run)


@pytest.mark.parametrize("unit", ["tokens", "usd"])
def test_tokens_and_dollars_wait_too(unit: str) -> None:
    amounts: dict[str, dict[str, Any]] = {
        "tokens": {"calls": None, "tokens": 2_000},
        "usd": {"calls": None, "usd": "0.002"},
    }

    async def go(shop: VirtualShop) -> None:
        first, second = await shop.ask(), await shop.ask()
        third = asyncio.create_task(shop.ask())
        await asyncio.sleep(1)
        assert not third.done()
        shop.pay(first, 1)  # it took less than was held: but not enough for a whole call
        await asyncio.sleep(1)
        assert not third.done()
        shop.pay(second, 1)
        assert (await third).leave
        assert not third.result().charge.lowered
        assert shop.loop.passed < 10

    virtually(go, per_minute(**amounts[unit]))


def test_a_call_larger_than_the_window_takes_what_is_left_and_then_waits() -> None:
    async def go(shop: VirtualShop) -> None:
        first = await shop.ask(10_000)
        assert first.charge.max_output == 2_000
        shop.pay(first, 1_950)
        second = await shop.ask(10_000)  # 50 tokens are fewer than is useful
        assert shop.loop.passed == 60
        assert second.charge.max_output == 2_000

    virtually(go, per_minute(calls=None, tokens=2_000))


def test_a_call_as_large_as_the_window_waits_for_all_of_it() -> None:
    async def go(shop: VirtualShop) -> None:
        await shop.buy(1_000)
        asked = await shop.ask(2_000)
        assert (asked.leave, asked.charge.lowered, shop.loop.passed) == (True, False, 60)

    virtually(go, per_minute(calls=None, tokens=2_000))


def test_the_bound_refuses_as_without_waiting() -> None:
    async def go(shop: VirtualShop) -> Any:
        for _ in range(2):
            await shop.buy()
        asked = await shop.ask()
        assert not asked.leave
        assert asked.decision.action is Action.STOP
        assert asked.decision.trip is not None
        return shop.loop.passed, asked.decision.trip.message

    waited, message = virtually(go, per_minute(), max_wait_seconds=30)
    _, plain = virtually(go, per_minute(on_exhausted="refuse"), max_wait_seconds=30)
    assert waited == 0, "the window cannot open in time: there is nothing to wait for"
    assert message == plain


def test_the_line_is_longer_than_the_bound() -> None:
    async def go(shop: VirtualShop) -> Any:
        asked = await asyncio.gather(*(shop.ask(run=run) for run in ["run"] * 4 + ["other"]))
        return [one.leave for one in asked], shop.loop.passed

    assert virtually(go, per_minute(), max_wait_seconds=60) == ([True, True, True, True, False], 60)


def test_a_cancelled_call_holds_nothing_and_lets_the_next_one_go() -> None:
    async def go(shop: VirtualShop) -> None:
        for _ in range(2):
            await shop.buy()
        first, second = (asyncio.create_task(shop.ask()) for _ in range(2))
        await asyncio.sleep(5)
        assert waiting(shop) == [
            {"scope": "model:m", "calls": 1, "until": START + 60},
            {"scope": "", "calls": 1, "until": None},
        ]
        first.cancel()
        assert (await second).leave
        assert first.cancelled()
        assert shop.loop.passed == 60
        assert shop.status("model:m", "calls").reserved == 1
        assert waiting(shop) == []
        assert len(shop.accounts.ledger.line) == 0

    virtually(go, per_minute())


@pytest.mark.parametrize("scope", ["run:run", "all"])
def test_the_kill_switch_ends_a_wait_at_once(scope: str) -> None:
    async def go(shop: VirtualShop) -> None:
        for _ in range(2):
            await shop.buy()
        asks = [asyncio.create_task(shop.ask()) for _ in range(3)]
        await asyncio.sleep(7.25)
        shop.guard.operator_stops.throw(scope, "ops", None)
        asked = await asyncio.gather(*asks)
        assert [present(one.decision.trip).rule for one in asked] == ["kill_switch"] * 3
        assert shop.loop.passed == 7.25
        assert shop.nothing_is_held

    virtually(go, per_minute())


def test_an_extension_lets_waiting_calls_go() -> None:
    async def go(shop: VirtualShop) -> None:
        for _ in range(2):
            await shop.buy()
        ask = asyncio.create_task(shop.ask())
        await asyncio.sleep(3)
        shop.accounts.extend("model:m", calls=1)
        assert (await ask).leave
        assert shop.loop.passed == 3

    virtually(go, per_minute())


def test_a_user_without_room_does_not_hold_up_others() -> None:
    budgets = per_minute(10), Budget(calls=1, per="user", window="1h", on_exhausted="wait")

    async def go(shop: VirtualShop) -> None:
        shop.open("bob's", user="bob")
        await shop.buy()
        ask = asyncio.create_task(shop.ask())
        await asyncio.sleep(1)
        assert (await shop.ask(run="bob's")).leave
        assert shop.loop.passed == 1
        assert (await ask).leave
        assert shop.loop.clock() % 3_600 == 0

    virtually(go, *budgets, max_wait_seconds=3_600)


def test_a_budget_that_refuses_still_refuses() -> None:
    async def go(shop: VirtualShop) -> None:
        for _ in range(2):
            await shop.buy()
        asked = await shop.ask()
        assert not asked.leave
        assert shop.loop.passed == 0

    virtually(go, per_minute(5), Budget(calls=2, per="run"))
    virtually(go, per_minute(5), Budget(calls=2, per="model", window="1m"))


def test_shadow_mode_does_not_wait_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    async def go(shop: VirtualShop) -> None:
        for _ in range(4):
            await shop.buy()
        assert shop.loop.passed == 0
        assert (shop.guard.waits.calls, shop.guard.waits.waited_s) == (2, 120)
        assert not shop.guard.trips

    with caplog.at_level(logging.INFO, "runguard"):
        virtually(go, per_minute(), mode="shadow")
    assert [line for line in caplog.messages if "would wait" in line] == [
        "runguard.warn: a call would wait up to 60 s for room in the budget of model:m: 2 calls per minute"
    ]


@given(
    cap=st.integers(1, 4),
    arrivals=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40), st.booleans()), min_size=1, max_size=14),
)
def test_order_and_cap_hold_in_every_window(cap: int, arrivals: list[tuple[int, int, bool]]) -> None:
    """First come, first served, and never more calls in a window than it allows; cancelled ones take no room."""
    came: list[int] = []
    admitted: list[tuple[float, int]] = []
    cancelled: set[int] = set()

    async def ask_in_order(shop: VirtualShop, number: int) -> Asked:
        came.append(number)
        asked = await shop.ask()
        assert asked.leave
        admitted.append((shop.loop.clock(), number))
        return asked

    async def call(shop: VirtualShop, number: int, begin: float, takes: float, is_cancelled: bool) -> None:
        await asyncio.sleep(begin)
        ask: asyncio.Task[Asked] = asyncio.create_task(ask_in_order(shop, number))
        if is_cancelled:
            await asyncio.sleep(takes / 10)
            ask.cancel()
        try:
            asked = await ask
        except asyncio.CancelledError:
            cancelled.add(number)
            return
        await asyncio.sleep(takes)
        shop.pay(asked)

    async def go(shop: VirtualShop) -> None:
        await asyncio.gather(*(call(shop, n, *arrival) for n, arrival in enumerate(arrivals)))
        assert shop.nothing_is_held
        assert len(shop.accounts.ledger.line) == 0

    virtually(go, per_minute(cap), max_wait_seconds=3_600)
    assert max(Counter(at // 60 for at, _ in admitted).values(), default=0) <= cap
    assert len(admitted) + len(cancelled) == len(arrivals)
    assert [n for _, n in admitted] == [n for n in came if n not in cancelled]


@each_row("window", [None, "2h", "1d", "month"])
def test_only_windows_of_at_most_an_hour_can_wait(window: str | None) -> None:
    with pytest.raises(PolicyError, match="on_exhausted='wait'"):
        Budget(calls=1, per="user", window=window, on_exhausted="wait")


def test_other_words_are_rejected() -> None:
    with pytest.raises(PolicyError, match="give 'refuse' or 'wait'"):
        Budget(calls=1, window="1m", on_exhausted="queue")  # type: ignore[arg-type]
    assert per_minute().to_dict()["on_exhausted"] == "wait"


def test_a_wait_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def go(shop: VirtualShop) -> None:
        for _ in range(3):
            await shop.buy()

    with caplog.at_level(logging.INFO, "runguard"):
        virtually(go, per_minute())
    assert caplog.messages == [
        "runguard.warn: a call waits up to 60 s for room in the budget of model:m: 2 calls per minute",
        "runguard.waited: a call of agent 'agent' waited 60.0 s for room in the budget of model:m: 2 calls per minute",
    ]


# ---- A provider that asks to wait: one probe goes first, on a clock that needs no time


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
