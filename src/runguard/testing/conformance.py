"""The scenarios that every framework adapter has to pass: ``await check(harness, name)`` for each of ``SCENARIOS``.

    @pytest.mark.parametrize("name", conformance.SCENARIOS)
    async def test_my_adapter(name):
        await conformance.check(MyHarness(), name)

A scenario plays on the real framework with a scripted model and raises ``AssertionError`` when the adapter does not do
what RunGuard promises. ``matrix`` is the table of frameworks and scenarios for the documentation.
"""

import asyncio
import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Final

from runguard.core.errors import RunStoppedError
from runguard.core.money import Budget
from runguard.engine.guard import Controls
from runguard.termination.conditions import MaxIterationsTermination

__all__ = ["SCENARIOS", "AgentSpec", "Harness", "Reply", "Session", "TurnResult", "check", "matrix"]

# ---- What an adapter provides so that the scenarios can play on it.
# A scenario describes agents without any framework: a script in place of the model, plain functions as tools. A
# ``Harness`` builds them with the real framework and a scripted model of the framework's own base class.

MODEL = "scripted-1"  # the name that scripted models report


@dataclass(slots=True)
class Reply:
    """One answer of a scripted model. Either a text, tool calls, an error to raise, or a hand-off."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    error: Exception | None = None
    hand_off: str = ""  # the agent that goes on
    waits: bool = False  # the call does not come back before it is cancelled
    cut: bool = False  # a streamed answer breaks off with an error after its first piece
    input_tokens: int = 1_000
    output_tokens: int = 100


# (number of this model's call, from 1; the newest text that the model sees: a notice, an answer or the user's message)
Script = Callable[[int, str], Reply]


@dataclass(slots=True)
class AgentSpec:
    """An agent, as a scenario describes it."""

    script: Script
    name: str = "agent"
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # their arguments are keywords
    agents: Sequence["AgentSpec"] = ()  # agents that it can call as tools named after them, with an argument "request"
    hand_offs: Sequence["AgentSpec"] = ()  # agents that it can hand off to; each can hand back
    structured: bool = False  # its result is the object {"answer": int}


@dataclass(slots=True)
class TurnResult:
    """What one user turn left behind."""

    text: str = ""  # the final answer, "" if there is none
    error: BaseException | None = None  # what the framework raised
    events: list[tuple[str, str, str]] = field(default_factory=list)  # ("call" or "answer" or "text", tool, content)
    open_calls: list[str] = field(default_factory=list)  # ids of tool calls without an answer in the stored history


class Session(ABC):
    """A conversation with one agent. Its history is stored as the framework stores it."""

    @property
    @abstractmethod
    def model_calls(self) -> int:
        """Calls that reached any scripted model of this session's harness, in all turns."""

    @abstractmethod
    async def turn(self, message: str, *, stream: bool = False) -> TurnResult:
        """One user turn. An exception of the framework is kept in the result; cancellation is raised."""


class Harness(ABC):
    """Builds sessions of one framework."""

    name: ClassVar[str]
    # Scenarios that the framework makes impossible, each with the reason that the documentation shows.
    impossible: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def guard(self, **settings: Any) -> Controls:
        """A guard of this adapter: a plugin, a middleware, a capability. ``app``, ``user`` as in ``RunInfo``.

        ``termination_condition``: ends the runs of sessions with this guard.
        """

    @abstractmethod
    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        """A new conversation, guarded by ``guard`` or by nothing."""


# ---- The scenarios.

_PRICES: Final = {MODEL: {"input": 0.0, "output": 1.0}}  # dollars per million tokens
_LIMITS: Final = {MODEL: {"max_output_tokens": 100_000}}
_DIME: Final = 100_000  # output tokens that cost ten cents
_CAP: Final = 60  # model calls after which a scripted run ends by itself: the guard did not stop it


def _script(step: Callable[[int], Reply]) -> Callable[[int, str], Reply]:
    return lambda n, _: step(n) if n <= _CAP else Reply("gave up")


def _looping(args: Callable[[int], dict[str, Any]]) -> AgentSpec:
    """An agent that calls a tool again and again, and a tool that fails in its words only."""

    def parse(**_: Any) -> dict[str, str]:
        return {"status": "partial_parse_error"}

    return AgentSpec(_script(lambda n: Reply(calls=[("parse", args(n))])), tools={"parse": parse})


async def stopped(guard: Any, result: TurnResult, rules: set[str]) -> None:
    trips = guard.trips
    assert len(trips) == 1, f"expected one trip, got {[trip.rule for trip in trips]}"
    assert trips[0].rule in rules, f"stopped by {trips[0].rule}, expected one of {sorted(rules)}"
    assert result.error is None, f"the stop raised {result.error!r}"
    assert result.text == guard.guard.stop_text(trips[0]), f"the run ended with '{result.text}'"
    assert not result.open_calls, f"tool calls without an answer in the history: {result.open_calls}"
    await nothing_left(guard)


async def begun(session: Session) -> None:
    """Wait until a model was called."""
    for _ in range(10_000):
        if session.model_calls:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no model was called")


async def untouched(harness: Harness, spec: AgentSpec) -> None:
    guard = harness.guard()
    bare, guarded = [await harness.session(spec, one).turn("go") for one in (None, guard)]
    assert bare.error is None, f"the scenario fails without a guard: {bare.error!r}"
    assert bare.events == guarded.events, "the guard changed a healthy run"
    assert not guard.trips, f"a healthy run was stopped by {guard.trips[0].rule}"


async def nothing_left(guard: Any) -> None:
    """Nothing stays reserved, and no run stays open. A run that failed may end with the last reference to it."""
    for _ in range(100):
        if not guard.guard.runs:
            break
        gc.collect()
        await asyncio.sleep(0.01)
    reserved = guard.spend()["reserved_usd"]
    assert not reserved, f"{reserved} dollars stay reserved"
    assert not guard.guard.runs, "a run was not ended"


async def stubborn_loop(harness: Harness) -> None:
    """The same call with the same failing answer is stopped, and the stop leaves a clean history."""
    guard = harness.guard()
    session = harness.session(_looping(lambda n: {"doc": "invoice"}), guard)
    result = await session.turn("parse it")
    await stopped(guard, result, {"repetition", "stall", "tool_failures"})
    assert session.model_calls <= 10, f"{session.model_calls} model calls before the stop"


async def paraphrased_loop(harness: Harness) -> None:
    """The same failing answer to ever new arguments is stopped."""
    guard = harness.guard()
    session = harness.session(_looping(lambda n: {"doc": f"invoice, attempt {n}"}), guard)
    result = await session.turn("parse it")
    await stopped(guard, result, {"repetition", "stall", "tool_failures", "no_news"})
    assert session.model_calls <= 10, f"{session.model_calls} model calls before the stop"


async def healthy_batch(harness: Harness) -> None:
    """The same short answer to twenty different calls is a batch, not a loop."""
    spec = AgentSpec(
        lambda n, _: Reply(calls=[("save", {"row": n})]) if n <= 20 else Reply("saved 20 rows"),
        tools={"save": lambda row: "ok"},
    )
    await untouched(harness, spec)


async def healthy_paging(harness: Harness) -> None:
    """Twenty pages of different content."""
    spec = AgentSpec(
        lambda n, _: Reply(calls=[("page", {"number": n})]) if n <= 20 else Reply("read 20 pages"),
        tools={"page": lambda number: {"rows": [number * 10 + k for k in range(10)], "next": number + 1}},
    )
    await untouched(harness, spec)


async def healthy_polling(harness: Harness) -> None:
    """The same question until the job is done: three equal answers, some progress, the result."""
    polled: list[int] = []
    states = ["queued", "running", "running", "running", "half done", "done"]

    def status(job: str) -> dict[str, str]:
        polled.append(1)
        return {"job": job, "state": states[(len(polled) - 1) % len(states)]}

    spec = AgentSpec(
        lambda n, _: Reply(calls=[("status", {"job": "7"})]) if n <= 6 else Reply("done"), tools={"status": status}
    )
    await untouched(harness, spec)


async def healthy_edits(harness: Harness) -> None:
    """Edit, test, edit: the same test command with an answer that changes."""

    def step(n: int, _: str) -> Reply:
        if n > 16:
            return Reply("all tests pass")
        return Reply(calls=[("edit", {"line": n}) if n % 2 else ("test", {})])

    runs: list[int] = []

    def test() -> str:
        runs.append(1)
        return f"{8 - (len(runs) - 1) % 8} failed"

    await untouched(harness, AgentSpec(step, tools={"edit": lambda line: "edited", "test": test}))


async def budget_race(harness: Harness) -> None:
    """Fifty conversations at once, ten cents a call, one dollar: ten calls are made."""
    guard = harness.guard(app="race", budgets=[Budget(usd=1, per="app")], prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(lambda n, _: Reply("done", input_tokens=10, output_tokens=_DIME))
    sessions = [harness.session(spec, guard) for _ in range(50)]
    await asyncio.gather(*(session.turn("go") for session in sessions))
    made, spent = sum(session.model_calls for session in sessions), guard.spend()["usd"]
    assert made == 10, f"{made} calls of ten cents were made on a budget of one dollar"
    assert spent == 1, f"{spent} dollars were booked for ten calls of ten cents"


async def stream_cut(harness: Harness) -> None:
    """A stream that breaks off is booked as an estimate, and nothing stays reserved."""
    guard = harness.guard(max_usd=1, prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(lambda n, _: Reply("half of an answer", cut=True) if n == 1 else Reply("whole"))
    await harness.session(spec, guard).turn("go", stream=True)
    spend = guard.spend()
    assert spend["calls"] >= 1, "the call was not booked"
    assert spend["estimated_calls"] >= 1, "the cut call was not booked as an estimate"
    await nothing_left(guard)


async def cancellation(harness: Harness) -> None:
    """A cancelled turn gives everything back, and the next one works."""
    guard = harness.guard(max_usd=1, prices=_PRICES, models=_LIMITS)
    session = harness.session(AgentSpec(lambda n, _: Reply(waits=True) if n == 1 else Reply("done")), guard)
    turn = asyncio.ensure_future(session.turn("go"))
    await begun(session)
    turn.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await turn
    del turn
    await nothing_left(guard)
    fresh = harness.session(AgentSpec(lambda n, _: Reply("done")), guard)
    assert (await fresh.turn("go")).text == "done", "no turn works after a cancelled one"


async def model_error(harness: Harness) -> None:
    """An error of the model reaches the caller as without a guard, and nothing stays reserved."""
    guard = harness.guard(max_usd=1, prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(lambda n, _: Reply(error=ConnectionError("no route to the model")))
    kinds = [type((await harness.session(spec, one).turn("go")).error) for one in (None, guard)]
    assert kinds[0] is kinds[1], f"without a guard {kinds[0]}, with one {kinds[1]}"
    await nothing_left(guard)


async def tool_exception(harness: Harness) -> None:
    """A tool that raises behaves as without a guard."""

    def broken(**_: Any) -> str:
        raise ValueError("out of paper")

    spec = AgentSpec(
        lambda n, _: Reply(calls=[("broken", {})]) if n == 1 else Reply("could not print"), tools={"broken": broken}
    )
    seen = [await harness.session(spec, one).turn("go") for one in (None, harness.guard())]
    assert type(seen[0].error) is type(seen[1].error), f"{seen[0].error!r} without a guard, {seen[1].error!r} with one"
    assert seen[0].text == seen[1].text, f"'{seen[0].text}' without a guard, '{seen[1].text}' with one"


async def structured_output(harness: Harness) -> None:
    """A stop of a run with structured output invents no object: it raises the typed error, or ends with its text."""
    guard = harness.guard(max_model_calls=3)
    spec = _looping(lambda n: {"doc": f"{n}"})
    spec.structured = True
    result = await harness.session(spec, guard).turn("go")
    assert [trip.rule for trip in guard.trips] == ["model_calls"], f"trips: {[trip.rule for trip in guard.trips]}"
    if not isinstance(result.error, RunStoppedError):
        text = guard.guard.stop_text(guard.trips[0])
        assert result.text == text, f"ended with '{result.text}', {result.error!r}"


async def nested_agent(harness: Harness) -> None:
    """An agent that a tool calls belongs to the same run: one limit, one trip."""
    inner = AgentSpec(_script(lambda n: Reply(calls=[("look", {"n": n})])), "inner", {"look": lambda n: f"page {n}"})
    outer = AgentSpec(_script(lambda n: Reply(calls=[("inner", {"request": f"task {n}"})])), "outer", agents=[inner])
    guard = harness.guard(max_model_calls=12)
    session = harness.session(outer, guard)
    result = await session.turn("go")
    await stopped(guard, result, {"model_calls"})
    assert session.model_calls == 12, f"{session.model_calls} calls on a limit of 12 for the whole tree"


async def hand_off_cycle(harness: Harness) -> None:
    """Two agents that hand the task to each other are stopped."""
    second = AgentSpec(_script(lambda n: Reply(hand_off="first")), "second")
    first = AgentSpec(_script(lambda n: Reply(hand_off="second")), "first", hand_offs=[second])
    guard = harness.guard()
    session = harness.session(first, guard)
    result = await session.turn("go")
    await stopped(guard, result, {"handoff", "cycle"})
    assert session.model_calls < _CAP


async def next_turn(harness: Harness) -> None:
    """After a stop the same conversation goes on with the next message."""
    guard = harness.guard()

    def step(n: int, newest: str) -> Reply:
        return Reply("hello") if newest == "good morning" else Reply(calls=[("parse", {"doc": "x"})])

    spec = AgentSpec(step, tools={"parse": lambda doc: {"status": "partial_parse_error"}})
    session = harness.session(spec, guard)
    await stopped(guard, await session.turn("parse it"), {"repetition", "stall", "tool_failures"})
    second = await session.turn("good morning")
    assert second.text == "hello", f"the turn after a stop answered '{second.text}', {second.error!r}"
    assert len(guard.trips) == 1


async def shadow_mode(harness: Harness) -> None:
    """In shadow mode the trip is recorded and the run is the same as without a guard."""
    spec = _looping(lambda n: {"doc": "invoice"})
    guard = harness.guard(mode="shadow")
    bare, watched = [await harness.session(spec, one).turn("parse it") for one in (None, guard)]
    assert bare.events == watched.events, "shadow mode changed the run"
    assert guard.trips, "shadow mode recorded no trip"
    assert not guard.trips[0].enforced


async def kill_switch(harness: Harness) -> None:
    """The kill switch ends a model call in flight and refuses new runs until it is released."""
    guard = harness.guard(app="shop")
    session = harness.session(AgentSpec(lambda n, _: Reply(waits=True) if n == 1 else Reply("done")), guard)
    turn = asyncio.ensure_future(session.turn("go"))
    await begun(session)
    guard.stop("app:shop", actor="ops", reason="drill")
    await asyncio.wait_for(turn, 20)
    refused = harness.session(AgentSpec(lambda n, _: Reply("done")), guard)
    await refused.turn("go")
    assert refused.model_calls == 0, "a new run called a model while the switch was on"
    guard.resume("app:shop")
    again = harness.session(AgentSpec(lambda n, _: Reply("done")), guard)
    assert (await again.turn("go")).text == "done", "no run works after the switch was released"


async def store_outage(harness: Harness) -> None:
    """A store that cannot be reached refuses the call, unless ``on_outage="open"``."""
    for on_outage, expected in (("closed", 0), ("open", 1)):
        guard = harness.guard(
            store="redis://127.0.0.1:9", store_timeout=0.2, on_outage=on_outage, max_usd=1, prices=_PRICES
        )
        session = harness.session(AgentSpec(lambda n, _: Reply("done")), guard)
        await session.turn("go")
        assert session.model_calls == expected, f"{session.model_calls} calls with on_outage={on_outage!r}"


async def paid_tool(harness: Harness) -> None:
    """The price of a tool is on the bill, and a budget refuses the tool before it runs."""
    executed: list[int] = []

    def search(n: int) -> dict[str, int]:
        executed.append(n)
        return {"hit": n}

    guard = harness.guard(tools={"search": {"price": "0.4"}}, max_usd=1, prices=_PRICES, models=_LIMITS)
    calls = [Reply(calls=[("search", {"n": n})]) for n in range(3)]
    spec = AgentSpec(_script(lambda n: calls[n - 1] if n <= len(calls) else Reply("done")), tools={"search": search})
    result = await harness.session(spec, guard).turn("find it")
    assert result.error is None, f"the refusal raised {result.error!r}"
    assert executed == [0, 1], f"the tool ran for {executed}: a third call does not fit into the budget"
    spend = guard.spend()
    assert spend["tools_usd"] == Decimal("0.8"), f"{spend['tools_usd']} dollars were booked for two calls of 0.4"
    assert spend["by_tool"]["search"]["paid_tool_calls"] == 2, "the bill does not name the tool"
    assert result.text == "done", f"the run ended with '{result.text}': the model could not finish"
    await nothing_left(guard)


async def last_answer(harness: Harness) -> None:
    """A stop ends with the agent's own answer: one call without tools, within the limits."""
    guard = harness.guard(final_answer=True, max_model_calls=4, max_usd=1, prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(
        _script(lambda n: Reply("what I have") if n == 4 else Reply(calls=[("search", {"n": n})])),
        tools={"search": lambda n: {"hit": n}},
    )
    session = harness.session(spec, guard)
    result = await session.turn("find it")
    assert result.error is None, f"the stop raised {result.error!r}"
    assert session.model_calls == 4, f"{session.model_calls} model calls were made, 4 are allowed"
    assert [trip.rule for trip in guard.trips] == ["model_calls"], "the run was not stopped by its limit"
    texts = [content for kind, _, content in result.events if kind == "text"]
    assert any("what I have" in content for content in texts), f"the agent's answer is missing: {result.events}"
    assert not result.open_calls, f"tool calls without an answer in the history: {result.open_calls}"
    await nothing_left(guard)


async def termination_condition(harness: Harness) -> None:
    """A termination condition ends the run before its next model call. It is not a trip, and the next turn works."""
    guard = harness.guard(termination_condition=MaxIterationsTermination(6))

    def step(n: int, newest: str) -> Reply:
        return Reply("hello") if newest == "good morning" else Reply(calls=[("page", {"n": n})])

    session = harness.session(AgentSpec(step, tools={"page": lambda n: {"page": n}}), guard)
    result = await session.turn("read on")
    assert result.error is None, f"the end raised {result.error!r}"
    assert session.model_calls == 3, f"{session.model_calls} model calls: each makes two events, six are allowed"
    assert not result.open_calls, f"tool calls without an answer in the history: {result.open_calls}"
    assert not guard.trips, "the end of the work was recorded as a trip"
    second = await session.turn("good morning")
    assert second.text == "hello", f"the next turn answered '{second.text}', {second.error!r}"


SCENARIOS: Final[dict[str, Callable[[Harness], Awaitable[None]]]] = {
    scenario.__name__: scenario
    for scenario in (
        stubborn_loop,
        paraphrased_loop,
        healthy_batch,
        healthy_paging,
        healthy_polling,
        healthy_edits,
        budget_race,
        stream_cut,
        cancellation,
        model_error,
        tool_exception,
        structured_output,
        nested_agent,
        hand_off_cycle,
        next_turn,
        shadow_mode,
        kill_switch,
        store_outage,
        paid_tool,
        last_answer,
        termination_condition,
    )
}


async def check(harness: Harness, name: str) -> None:
    """Play one scenario. Raises ``AssertionError`` when the adapter fails it, or passes one declared impossible."""
    reason = harness.impossible.get(name)
    try:
        await SCENARIOS[name](harness)
    except AssertionError:
        if reason is None:
            raise
    else:
        assert reason is None, f"{harness.name} passes '{name}', which it declares impossible: {reason}"


def matrix(harnesses: Iterable[Harness]) -> str:
    """A Markdown table: which framework does what, and why not."""
    columns = list(harnesses)
    notes: list[str] = []
    rows = []
    for name, scenario in SCENARIOS.items():
        cells = []
        for harness in columns:
            reason = harness.impossible.get(name)
            if reason is not None and reason not in notes:
                notes.append(reason)
            cells.append("yes" if reason is None else f"no [{notes.index(reason) + 1}]")
        about = (scenario.__doc__ or "").strip()
        rows.append(f"| **{name.replace('_', ' ')}** {about} | {' | '.join(cells)} |")
    head = f"| scenario | {' | '.join(harness.name for harness in columns)} |\n|---|{'---|' * len(columns)}"
    return "\n".join([head, *rows, *([""] if notes else []), *(f"{n}. {note}" for n, note in enumerate(notes, 1))])
