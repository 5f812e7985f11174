"""The conformance kit for adapters: ``await check(harness, name, mode)`` for each of ``CASES``.

    @pytest.mark.parametrize(("name", "mode"), conformance.CASES)
    async def test_my_adapter(name, mode):
        await conformance.check(MyHarness(), name, mode)

A scenario plays on the real framework with a scripted model and raises ``AssertionError`` when the adapter does not do
what RunGuard promises. ``matrix`` is the table of frameworks and scenarios for the documentation.
"""

import asyncio
import contextlib
import gc
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from runguard.calls.functions import run as block_of
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.core.money import Budget
from runguard.engine.guard import Controls
from runguard.termination.conditions import MaxIterationsTermination

__all__ = [
    "CASES",
    "MODEL",
    "MODES",
    "ONLY",
    "SCENARIOS",
    "AgentSpec",
    "AskAgainError",
    "Harness",
    "Reply",
    "Script",
    "Session",
    "TurnResult",
    "check",
    "matrix",
]

# ---- What an adapter provides so that the scenarios of the conformance kit can play on it.
#
# A scenario describes agents without any framework: a script in place of the model, plain functions as
# tools.
# A ``Harness`` builds them with the real framework and a scripted model of the framework's own base class. Authors of
# adapters import all of it from ``testing/conformance``.

MODEL = "scripted-1"  # the name that scripted models report
# How a user can start a turn: awaited, with the framework's synchronous entry in a plain thread, streamed, and awaited
# in a plain thread with an event loop of its own for each turn.
MODES: Final = ("async", "sync", "stream", "thread")
_T = TypeVar("_T")


class AskAgainError(Exception):
    """A scripted tool raises it to ask the model for another try, in the framework's own way where it has one."""


@dataclass(slots=True)
class Reply:
    """One answer of a scripted model. Either a text, tool calls, an error to raise, or a hand-off."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    error: Exception | None = None
    hand_off: str = ""  # the agent that goes on
    waits: bool = False  # the call does not come back before it is cancelled, streamed or not
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
    approvals: Sequence[str] = ()  # tools that a human must approve each time
    pooled: bool = False  # its agents are started by a tool in a thread pool of its own
    instruction: str = ""
    about: Mapping[str, str] = field(default_factory=dict)  # descriptions of tools, instead of their names


@dataclass(slots=True)
class TurnResult:
    """What one user turn left behind."""

    text: str = ""  # the final answer, "" if there is none
    error: BaseException | None = None  # what the framework raised
    events: list[tuple[str, str, str]] = field(default_factory=list)  # ("call" or "answer" or "text", tool, content)
    open_calls: list[str] = field(default_factory=list)  # ids of tool calls without an answer in the stored history
    waits: bool = False  # a human must approve a tool call
    spent: Mapping[str, Any] | None = None  # the bill of the run, as a user of the framework reads it


class Session(ABC):
    """A conversation with one agent. Its history is stored as the framework stores it."""

    mode = "async"  # in which its turns are played, one of ``MODES``

    @property
    @abstractmethod
    def model_calls(self) -> int:
        """Calls that reached any scripted model of this session's harness, in all turns."""

    @abstractmethod
    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        """Play one user turn in the framework's asynchronous way. None: approve all tool calls that wait.

        An exception of the framework is kept in the result. Cancellation is raised.
        """

    @abstractmethod
    def play_now(self, message: str | None) -> TurnResult:
        """``play`` with the framework's synchronous entry. It is called in a thread without an event loop."""

    @abstractmethod
    def moved(self, guard: Controls) -> "Session":
        """Return the same conversation on another worker: its stored history, new objects, and another guard."""

    async def turn(self, message: str | None, *, mode: str = "", stream: bool = False) -> TurnResult:
        """Play one user turn in one of ``MODES``, that of the session unless given."""
        mode = mode or self.mode
        if mode == "sync":
            return await in_thread(lambda: self.play_now(message))
        if mode == "thread":
            return await in_thread(lambda: asyncio.run(self.play(message, stream=False)))
        return await self.play(message, stream=stream or mode == "stream")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns in a thread of its own, which begins without any context of this one."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await done  # type: ignore[no-any-return]


class Harness(ABC):
    """Builds sessions of one framework."""

    name: ClassVar[str]
    # Scenarios that the framework makes impossible, each with the reason that the documentation shows. The key is the
    # name of a scenario, or "name:mode", or ":mode" for a mode that the framework does not have.
    impossible: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def guard(self, **settings: Any) -> Controls:
        """Return a guard of this adapter: a plugin, a middleware, a capability. ``app``, ``user`` as in ``RunInfo``.

        ``termination_condition``: ends the runs of sessions with this guard.
        """

    @abstractmethod
    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        """Return a new conversation, guarded by ``guard`` or by nothing."""

    def reason(self, name: str, mode: str) -> str | None:
        """Why the framework makes a case impossible; None where it does not."""
        keys = (name, f"{name}:{mode}", f":{mode}")
        return next((self.impossible[key] for key in keys if key in self.impossible), None)


# ---- Playing a scenario.


class Stage:
    """A harness whose sessions play their turns in one mode."""

    def __init__(self, harness: Harness, mode: str) -> None:
        self._harness, self._mode = harness, mode
        self.guard = harness.guard

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        session = self._harness.session(agent, guard)
        session.mode = self._mode
        return session

    async def play(self, agent: AgentSpec, guard: Controls | None) -> tuple[Session, TurnResult]:
        """Play the first turn of a new conversation."""
        session = self.session(agent, guard)
        return session, await session.turn("go")


# ---- The scenarios of the conformance kit: what RunGuard promises on every framework.
#
# ``runguard.testing.conformance`` plays them in the modes of ``MODES``, or in those of ``ONLY``.

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


async def untouched(harness: Stage, spec: AgentSpec) -> None:
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


async def stubborn_loop(harness: Stage) -> None:
    """The same call with the same failing answer is stopped, and the stop leaves a clean history."""
    guard = harness.guard()
    session, result = await harness.play(_looping(lambda n: {"doc": "invoice"}), guard)
    await stopped(guard, result, {"repetition", "stall", "tool_failures"})
    assert session.model_calls <= 10, f"{session.model_calls} model calls before the stop"


async def paraphrased_loop(harness: Stage) -> None:
    """The same failing answer to ever new arguments is stopped."""
    guard = harness.guard()
    session, result = await harness.play(_looping(lambda n: {"doc": f"invoice, attempt {n}"}), guard)
    await stopped(guard, result, {"repetition", "stall", "tool_failures", "no_news"})
    assert session.model_calls <= 10, f"{session.model_calls} model calls before the stop"


async def healthy_batch(harness: Stage) -> None:
    """The same short answer to twenty different calls is a batch, not a loop."""
    spec = AgentSpec(
        lambda n, _: Reply(calls=[("save", {"row": n})]) if n <= 20 else Reply("saved 20 rows"),
        tools={"save": lambda row: "ok"},
    )
    await untouched(harness, spec)


async def healthy_paging(harness: Stage) -> None:
    """Twenty pages of different content."""
    spec = AgentSpec(
        lambda n, _: Reply(calls=[("page", {"number": n})]) if n <= 20 else Reply("read 20 pages"),
        tools={"page": lambda number: {"rows": [number * 10 + k for k in range(10)], "next": number + 1}},
    )
    await untouched(harness, spec)


async def healthy_polling(harness: Stage) -> None:
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


async def healthy_edits(harness: Stage) -> None:
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


async def budget_race(harness: Stage) -> None:
    """Fifty conversations at once, ten cents a call, one dollar: ten calls are made."""
    guard = harness.guard(app="race", budgets=[Budget(usd=1, per="app")], prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(lambda n, _: Reply("done", input_tokens=10, output_tokens=_DIME))
    sessions = [harness.session(spec, guard) for _ in range(50)]
    await asyncio.gather(*(session.turn("go") for session in sessions))
    made, spent = sum(session.model_calls for session in sessions), guard.spend()["usd"]
    assert made == 10, f"{made} calls of ten cents were made on a budget of one dollar"
    assert spent == 1, f"{spent} dollars were booked for ten calls of ten cents"


async def stream_cut(harness: Stage) -> None:
    """A stream that breaks off is booked as an estimate, and nothing stays reserved."""
    guard = harness.guard(max_usd=1, prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(lambda n, _: Reply("half of an answer", cut=True) if n == 1 else Reply("whole"))
    await harness.session(spec, guard).turn("go")
    spend = guard.spend()
    assert spend["calls"] >= 1, "the call was not booked"
    assert spend["estimated_calls"] >= 1, "the cut call was not booked as an estimate"
    await nothing_left(guard)


async def cancellation(harness: Stage) -> None:
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


async def model_error(harness: Stage) -> None:
    """An error of the model reaches the caller as without a guard, and nothing stays reserved."""
    guard = harness.guard(max_usd=1, prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(lambda n, _: Reply(error=ConnectionError("no route to the model")))
    kinds = [type((await harness.session(spec, one).turn("go")).error) for one in (None, guard)]
    assert kinds[0] is kinds[1], f"without a guard {kinds[0]}, with one {kinds[1]}"
    await nothing_left(guard)


async def tool_exception(harness: Stage) -> None:
    """A tool that raises behaves as without a guard."""

    def broken(**_: Any) -> str:
        raise ValueError("out of paper")

    spec = AgentSpec(
        lambda n, _: Reply(calls=[("broken", {})]) if n == 1 else Reply("could not print"), tools={"broken": broken}
    )
    seen = [await harness.session(spec, one).turn("go") for one in (None, harness.guard())]
    assert type(seen[0].error) is type(seen[1].error), f"{seen[0].error!r} without a guard, {seen[1].error!r} with one"
    assert seen[0].text == seen[1].text, f"'{seen[0].text}' without a guard, '{seen[1].text}' with one"


async def structured_output(harness: Stage) -> None:
    """A stop of a run with structured output invents no object: it raises the typed error, or ends with its text."""
    guard = harness.guard(max_model_calls=3)
    spec = _looping(lambda n: {"doc": f"{n}"})
    spec.structured = True
    result = await harness.session(spec, guard).turn("go")
    assert [trip.rule for trip in guard.trips] == ["model_calls"], f"trips: {[trip.rule for trip in guard.trips]}"
    if not isinstance(result.error, RunStoppedError):
        text = guard.guard.stop_text(guard.trips[0])
        assert result.text == text, f"ended with '{result.text}', {result.error!r}"


def _delegating(*, pooled: bool = False) -> AgentSpec:
    """An agent that calls another one again and again, which calls a tool again and again."""
    inner = AgentSpec(_script(lambda n: Reply(calls=[("look", {"n": n})])), "inner", {"look": lambda n: f"page {n}"})
    script = _script(lambda n: Reply(calls=[("inner", {"request": f"task {n}"})]))
    return AgentSpec(script, "outer", agents=[inner], pooled=pooled)


async def _one_limit(harness: Stage, spec: AgentSpec) -> None:
    guard = harness.guard(max_model_calls=12)
    session, result = await harness.play(spec, guard)
    await stopped(guard, result, {"model_calls"})
    assert session.model_calls == 12, f"{session.model_calls} calls on a limit of 12 for the whole tree"


async def nested_agent(harness: Stage) -> None:
    """An agent that a tool calls belongs to the same run: one limit, one trip."""
    await _one_limit(harness, _delegating())


async def deep_delegation(harness: Stage) -> None:
    """An agent that is nested too deep is refused, and its caller goes on."""
    last = AgentSpec(lambda n, _: Reply("deep"), "last")
    middle = AgentSpec(
        lambda n, _: Reply(calls=[("last", {"request": "x"})]) if n == 1 else Reply("middle"), "middle", agents=[last]
    )
    outer = AgentSpec(
        lambda n, _: Reply(calls=[("middle", {"request": "x"})]) if n == 1 else Reply("done"), "outer", agents=[middle]
    )
    for limit, calls in ((1, 4), (2, 5)):
        guard = harness.guard(max_delegation_depth=limit)
        session, result = await harness.play(outer, guard)
        assert (result.text, result.error) == ("done", None), f"the turn ended with '{result.text}', {result.error!r}"
        assert session.model_calls == calls, f"{session.model_calls} calls at a depth of {limit}, not {calls}"


async def paid_agent(harness: Stage) -> None:
    """An agent in a paid tool belongs to the same run, and does not wait for what is held for the tool."""
    guard = harness.guard(
        app="paid", budgets=[Budget(usd=1, per="app")], tools={"inner": {"price": "0.95"}}, max_model_calls=4,
        prices=_PRICES, models=_LIMITS,
    )  # fmt: skip
    session, _ = await asyncio.wait_for(harness.play(_delegating(), guard), 20)
    assert session.model_calls <= 4, f"{session.model_calls} calls on a limit of 4 for the whole tree"
    assert guard.trips, "the run was not stopped"
    await nothing_left(guard)


async def hand_off_cycle(harness: Stage) -> None:
    """Two agents that hand the task to each other are stopped."""
    second = AgentSpec(_script(lambda n: Reply(hand_off="first")), "second")
    first = AgentSpec(_script(lambda n: Reply(hand_off="second")), "first", hand_offs=[second])
    guard = harness.guard()
    session, result = await harness.play(first, guard)
    await stopped(guard, result, {"handoff", "cycle"})
    assert session.model_calls < _CAP


async def next_turn(harness: Stage) -> None:
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


async def shadow_mode(harness: Stage) -> None:
    """In shadow mode the trip is recorded and the run is the same as without a guard."""
    spec = _looping(lambda n: {"doc": "invoice"})
    guard = harness.guard(mode="shadow")
    bare, watched = [await harness.session(spec, one).turn("parse it") for one in (None, guard)]
    assert bare.events == watched.events, "shadow mode changed the run"
    assert guard.trips, "shadow mode recorded no trip"
    assert not guard.trips[0].enforced


async def kill_switch(harness: Stage) -> None:
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


async def store_outage(harness: Stage) -> None:
    """A store that cannot be reached refuses the call, unless ``on_outage="open"``."""
    for on_outage, expected in (("closed", 0), ("open", 1)):
        guard = harness.guard(
            store="redis://127.0.0.1:9", store_timeout=0.2, on_outage=on_outage, max_usd=1, prices=_PRICES
        )
        session, _ = await harness.play(AgentSpec(lambda n, _: Reply("done")), guard)
        assert session.model_calls == expected, f"{session.model_calls} calls with on_outage={on_outage!r}"


async def paid_tool(harness: Stage) -> None:
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


async def last_answer(harness: Stage) -> None:
    """A stop ends with the agent's own answer: one call without tools, within the limits."""
    guard = harness.guard(final_answer=True, max_model_calls=4, max_usd=1, prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(
        _script(lambda n: Reply("what I have") if n == 4 else Reply(calls=[("search", {"n": n})])),
        tools={"search": lambda n: {"hit": n}},
    )
    session, result = await harness.play(spec, guard)
    assert result.error is None, f"the stop raised {result.error!r}"
    assert session.model_calls == 4, f"{session.model_calls} model calls were made, 4 are allowed"
    assert [trip.rule for trip in guard.trips] == ["model_calls"], "the run was not stopped by its limit"
    texts = [content for kind, _, content in result.events if kind == "text"]
    assert any("what I have" in content for content in texts), f"the agent's answer is missing: {result.events}"
    assert not result.open_calls, f"tool calls without an answer in the history: {result.open_calls}"
    await nothing_left(guard)


async def termination_condition(harness: Stage) -> None:
    """A termination condition ends the run before its next model call. It is not a trip, and the next turn works."""
    guard = harness.guard(termination_condition=MaxIterationsTermination(6))

    def step(n: int, newest: str) -> Reply:
        return Reply("hello") if newest == "good morning" else Reply(calls=[("page", {"n": n})])

    session, result = await harness.play(AgentSpec(step, tools={"page": lambda n: {"page": n}}), guard)
    assert result.error is None, f"the end raised {result.error!r}"
    assert session.model_calls == 3, f"{session.model_calls} model calls: each makes two events, six are allowed"
    assert not result.open_calls, f"tool calls without an answer in the history: {result.open_calls}"
    assert not guard.trips, "the end of the work was recorded as a trip"
    second = await session.turn("good morning")
    assert second.text == "hello", f"the next turn answered '{second.text}', {second.error!r}"


# ---- A turn that waits for a human.


def _asking(tool: str = "delete", executed: list[str] | None = None) -> AgentSpec:
    """An agent that asks a tool again and again, which a human must approve each time."""

    def delete(row: str) -> dict[str, str]:
        if executed is not None:
            executed.append(row)
        return {"deleted": row}

    script = _script(lambda n: Reply(calls=[(tool, {"row": f"row {n} of {id(executed)}"})]))
    return AgentSpec(script, tools={tool: delete}, approvals=[tool])


async def _approved_until_stopped(session: Session, result: TurnResult) -> TurnResult:
    for _ in range(12):
        assert result.error is None, f"the turn raised {result.error!r}"
        if not result.waits:
            break
        result = await session.turn(None)
    return result


async def approval(harness: Stage) -> None:
    """A turn that waits for a human's approval is one run: its limits count on, and none stays open."""
    executed: list[str] = []
    guard = harness.guard(max_model_calls=4)
    session = harness.session(_asking(executed=executed), guard)
    waiting = await session.turn("clean up")
    assert waiting.waits, f"the tool did not wait for an approval: {waiting.events}, {waiting.error!r}"
    assert not executed, "the tool was executed without an approval"
    assert not guard.guard.runs, "a run that waits is open"
    result = await _approved_until_stopped(session, waiting)
    assert session.model_calls == 4, f"{session.model_calls} model calls on a limit of 4 for the turn"
    assert len(executed) == 4, f"{len(executed)} of 4 approved calls were executed"
    await stopped(guard, result, {"model_calls"})


async def approval_elsewhere(harness: Stage) -> None:
    """A turn that waits goes on in another worker of the same store, with what it has used."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_model_calls": 4, "store": f"sqlite:///{Path(folder) / 'guard.db'}"}
        first, second = harness.guard(**settings), harness.guard(**settings)
        session = harness.session(_asking(), first)
        waiting = await session.turn("clean up")
        assert waiting.waits, f"the tool did not wait for an approval: {waiting.events}, {waiting.error!r}"
        assert first.flush(10), "the first worker could not write what it knows"
        elsewhere = session.moved(second)
        elsewhere.mode = session.mode
        result = await _approved_until_stopped(elsewhere, await elsewhere.turn(None))
        calls = session.model_calls + elsewhere.model_calls
        assert calls == 4, f"{calls} model calls on a limit of 4 for the turn"
        await stopped(second, result, {"model_calls"})
        for guard in (first, second):
            guard.flush(10)


async def approval_by_another_user(harness: Stage) -> None:
    """Whoever approves the turn of another user pays for it, and gets nothing of the other one's run."""
    guard = harness.guard(app="shop", prices=_PRICES, models=_LIMITS)
    session = harness.session(_asking(), guard)
    with block_of(user="ann"):
        assert (await session.turn("clean up")).waits, "the tool did not wait for an approval"
    with block_of(user="bob"):
        await session.turn(None)
    spent = {user: guard.spend(f"user:shop/{user}")["calls"] for user in ("ann", "bob")}
    assert spent == {"ann": 1, "bob": 1}, f"calls by user: {spent}"
    assert not guard.guard.runs, "a run was not ended"


async def waiting_tool(harness: Stage) -> None:
    """A tool that waits for an approval costs nothing before it is executed."""
    guard = harness.guard(tools={"delete": {"price": "0.4"}}, max_usd=1, prices=_PRICES, models=_LIMITS)
    session = harness.session(_asking(), guard)
    assert (await session.turn("clean up")).waits, "the tool did not wait for an approval"
    spend = guard.spend()
    assert (spend["tools_usd"], spend["reserved_usd"]) == (0, 0), f"a tool that waits was charged: {spend}"
    await session.turn(None)
    assert guard.spend()["tools_usd"] == Decimal("0.4"), "the executed tool was not charged"
    assert not guard.guard.runs, "a run was not ended"


# ---- Tools that fail in other ways than with a text.


async def _recognised(harness: Stage, spec: Callable[[], AgentSpec], most: int = 10) -> None:
    """An agent that fails again and again is stopped, unless the framework itself ends it with an error."""
    bare = await harness.session(spec(), None).turn("go")
    if bare.error is not None:
        return
    guard = harness.guard()
    session, result = await harness.play(spec(), guard)
    await stopped(guard, result, {"repetition", "stall", "tool_failures", "no_news", "unknown_tool"})
    assert session.model_calls <= most, f"{session.model_calls} model calls before the stop"


async def raising_tool(harness: Stage) -> None:
    """A tool that raises the same error for ever new arguments is stopped, where the framework goes on."""

    def look(page: str) -> str:
        raise ConnectionError("the database is down")

    await _recognised(
        harness, lambda: AgentSpec(_script(lambda n: Reply(calls=[("look", {"page": f"{n}"})])), tools={"look": look})
    )


async def retry_requests(harness: Stage) -> None:
    """A tool that asks the model to try again, for ever new arguments, is stopped."""

    def look(page: str) -> str:
        raise AskAgainError("name a page that exists")

    await _recognised(
        harness, lambda: AgentSpec(_script(lambda n: Reply(calls=[("look", {"page": f"{n}"})])), tools={"look": look})
    )


async def unknown_tool(harness: Stage) -> None:
    """A model that calls a tool which does not exist is stopped, where the framework goes on."""
    await _recognised(
        harness,
        lambda: AgentSpec(
            _script(lambda n: Reply(calls=[("grep", {"page": f"{n}"})])), tools={"look": lambda page: "a page"}
        ),
    )


async def wrong_arguments(harness: Stage) -> None:
    """A model whose arguments never validate is stopped, where the framework goes on."""

    def look(page: int) -> str:
        return f"page {page}"

    await _recognised(
        harness,
        lambda: AgentSpec(_script(lambda n: Reply(calls=[("look", {"page": f"page {n}"})])), tools={"look": look}),
        12,  # each of these texts quotes another value
    )


# ---- Who pays, and what a run has cost.


async def agents_in_a_pool(harness: Stage) -> None:
    """An agent that a tool starts in a thread pool belongs to the same run."""
    await _one_limit(harness, _delegating(pooled=True))


async def user_per_call(harness: Stage) -> None:
    """One guard for many users: each turn is charged to the user of its block, and each user has a budget."""
    guard = harness.guard(app="shop", budgets=[Budget(calls=2, per="user")])
    spec = AgentSpec(lambda n, _: Reply("done"))
    made = {}
    for user in ("ann", "bob"):
        sessions = [harness.session(spec, guard) for _ in range(4)]
        for session in sessions:
            with block_of(user=user):
                await session.turn("go")
        made[user] = sum(session.model_calls for session in sessions)
    assert made == {"ann": 2, "bob": 2}, f"calls by user on a budget of 2 each: {made}"


async def unnamed_user(harness: Stage) -> None:
    """A budget per user in a guard that never learned a user is an error at the first call, before anything is paid."""
    guard = harness.guard(app="shop", budgets=[Budget(calls=2, per="user")])
    session, result = await harness.play(AgentSpec(lambda n, _: Reply("done")), guard)
    assert isinstance(result.error, PolicyError), f"the turn ended with {result.error!r} and '{result.text}'"
    assert session.model_calls == 0, "a model was called"


async def bill(harness: Stage) -> None:
    """The result of a turn has the bill of its run, as the framework's users read it."""
    guard = harness.guard(prices=_PRICES, models=_LIMITS)
    result = await _two_calls(harness, guard)
    cost = Decimal(200) / 1_000_000
    assert result.spent is not None, "the result has no bill"
    assert (result.spent["model_calls"], result.spent["tokens"]) == (2, 2_200), f"the bill is {result.spent}"
    assert Decimal(result.spent["usd"]) == cost, f"the bill is {result.spent}"


async def bill_of_a_block(harness: Stage) -> None:
    """A block of ``runguard.run()`` has the bill of all turns in it."""
    guard = harness.guard(prices=_PRICES, models=_LIMITS)
    with block_of(user="ann", session="s") as block:
        await _two_calls(harness, guard)
    figures = (block.calls, block.tokens, block.usd)
    assert figures == (2, 2_200, Decimal(200) / 1_000_000), f"calls, tokens, dollars: {figures}"


async def _two_calls(harness: Stage, guard: Any) -> TurnResult:
    step = [Reply(calls=[("page", {"n": 1})]), Reply("done")]
    _, result = await harness.play(AgentSpec(lambda n, _: step[n - 1], tools={"page": lambda n: {"page": n}}), guard)
    assert result.text == "done", f"the turn ended with '{result.text}', {result.error!r}"
    return result


async def submitted_again(harness: Stage) -> None:
    """The same input again, after runs on it that were stopped, is refused where the settings say so."""
    guard = harness.guard(max_resubmissions=2)
    made = []
    for _ in range(5):
        session = harness.session(_looping(lambda n: {"doc": "invoice"}), guard)
        await session.turn("Read the invoice of the fourth of May and give me its total.")
        made.append(session.model_calls)
    assert made[0] > 1, f"model calls of each run: {made}"
    assert made[3:] == [0, 0], f"model calls of each run on the same input: {made}"
    assert guard.trips[-1].rule == "resubmission", f"trips: {[trip.rule for trip in guard.trips]}"
    other = harness.session(_looping(lambda n: {"doc": "invoice"}), guard)
    await other.turn("Read the invoice of the fifth of May and give me its total.")
    assert other.model_calls > 1, "a run on another input was refused"


async def large_request(harness: Stage) -> None:
    """Instructions and declarations of tools are reserved for like the messages."""
    many = "word " * 8_000  # 40 kB
    tools: Mapping[str, Callable[..., Any]] = {"page": lambda n: {"page": n}}
    for spec in (
        AgentSpec(lambda n, _: Reply("done"), tools=tools, instruction=many),
        AgentSpec(lambda n, _: Reply("done"), tools=tools, about={"page": many}),
    ):
        guard = harness.guard(max_tokens=10_000, models={MODEL: {"max_output_tokens": 100}})
        session, _ = await harness.play(spec, guard)
        assert session.model_calls == 0, "a request of 40 kB was sent on a budget of 10,000 tokens"


SCENARIOS: Final[dict[str, Callable[[Stage], Awaitable[None]]]] = {
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
        deep_delegation,
        paid_agent,
        hand_off_cycle,
        next_turn,
        shadow_mode,
        kill_switch,
        store_outage,
        paid_tool,
        last_answer,
        termination_condition,
        approval,
        approval_elsewhere,
        approval_by_another_user,
        waiting_tool,
        raising_tool,
        retry_requests,
        unknown_tool,
        wrong_arguments,
        agents_in_a_pool,
        user_per_call,
        unnamed_user,
        bill,
        bill_of_a_block,
        large_request,
        submitted_again,
    )
}
# A stream that breaks off needs a stream. What ends a model call in flight, or cancels it, needs an event loop.
ONLY: Final[Mapping[str, tuple[str, ...]]] = {
    "stream_cut": ("stream",),
    "cancellation": ("async", "stream"),
    "kill_switch": ("async", "stream", "thread"),
}

# ---- The conformance kit for adapters: ``await check(harness, name, mode)`` for each of ``CASES``.

CASES: Final = [(name, mode) for name in SCENARIOS for mode in ONLY.get(name, MODES)]


async def check(harness: Harness, name: str, mode: str = "async") -> None:
    """Play one scenario. Raises ``AssertionError`` when the adapter fails it, or passes one declared impossible."""
    reason = harness.reason(name, mode)
    try:
        await SCENARIOS[name](Stage(harness, mode))
    except AssertionError:
        if reason is None:
            raise
    else:
        assert reason is None, f"{harness.name} passes '{name}' ({mode}), which it declares impossible: {reason}"


def matrix(harnesses: Iterable[Harness]) -> str:
    """Return a Markdown table: which framework does what, in which modes, and why not."""
    columns = list(harnesses)
    notes: list[str] = []
    rows = []
    for name, scenario in SCENARIOS.items():
        modes = ONLY.get(name, MODES)
        cells = [_cell([harness.reason(name, mode) for mode in modes], modes, notes) for harness in columns]
        about = (scenario.__doc__ or "").strip().partition("\n")[0]
        rows.append(f"| **{name.replace('_', ' ')}** {about} | {' | '.join(cells)} |")
    head = f"| scenario | {' | '.join(harness.name for harness in columns)} |\n|---|{'---|' * len(columns)}"
    return "\n".join([head, *rows, *([""] if notes else []), *(f"{n}. {note}" for n, note in enumerate(notes, 1))])


def _cell(reasons: Sequence[str | None], modes: Sequence[str], notes: list[str]) -> str:
    """Return "yes", or the modes in which a scenario passes and the numbers of the notes that say why not in others."""
    for reason in reasons:
        if reason is not None and reason not in notes:
            notes.append(reason)
    passed = [mode for mode, reason in zip(modes, reasons, strict=True) if reason is None]
    why = sorted({notes.index(reason) + 1 for reason in reasons if reason is not None})
    return " ".join([", ".join(passed) if why and passed else "no" if why else "yes", *(f"[{n}]" for n in why)])
