"""Runs on which every fault is tried: healthy ones, and one of each way to be stopped.

A reference makes a ``Play``: agents, guard and all, ready to go, with a guard under the given policy or without one.
The budget of the user is generous in sum and tight at any moment, so that a reservation that is never closed keeps
later calls waiting.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from tempfile import mkdtemp
from typing import Any, Final

from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import InMemoryRunner, Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

import runguard
from runguard import Budget, BudgetPlugin, BudgetPolicy, ToolRule
from runguard.adk import ADKCostBreaker, GuardedLlm, RunGuardPlugin, TerminationPlugin, patching, terminate
from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, error_of
from runguard.calls.tool_calls import ToolUse
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy
from runguard.pricing.rates import Usage
from runguard.termination import (
    CostTermination,
    ExternalTermination,
    FunctionCallTermination,
    MaxIterationsTermination,
    MaxMessageTermination,
    NoProgressTermination,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
)
from runguard.testing import ScriptedModel, assert_calls_answered, call, text, transfer
from tests.kit.contents import parts
from tests.kit.optional import present
from tests.kit.topologies import step

MOST_CALLS: Final = 40  # a run that asks more often spins
CALL_USD: Final = 0.02
HELD_USD: Final = 0.085  # about what is held for one call
_TOLERATED_USD: Final = 0.055  # what one estimate may be off: less than what is held
PRICED: Final[dict[str, Any]] = {
    "prices": {"scripted-1": {"input": 10, "output": 40}},
    "models": {"scripted-1": {"max_output_tokens": 2_000, "context_window": 100_000}},
}
SSE: Final = RunConfig(streaming_mode=StreamingMode.SSE)
TURNS: Final = 2


class SpinningError(BaseException):
    """A model was asked again and again."""


@dataclass(slots=True)
class Play:
    """One conversation, ready to go.

    ``turn`` plays the user's next turn and tells what the caller saw; it says when everything is made that it
    needs. ``check`` looks at what is left.
    """

    guards: list[Guard]
    turn: Callable[[Callable[[], None]], Awaitable[Any]]
    check: Callable[[], Awaitable[None]]
    calls: Callable[[], int]  # that reached a model


@dataclass(slots=True)
class Reference:
    """``make(None)`` makes it without a guard."""

    name: str
    make: Callable[[dict[str, Any] | None], Play]
    stops: bool = False  # the policy stops it: what the caller sees depends on where the fault is


class Model(ScriptedModel):
    """Ends a run that spins."""

    def _step(self, number: int, request: LlmRequest) -> Any:
        if number > MOST_CALLS:
            raise SpinningError
        return super()._step(number, request)


async def wait_a_turn(n: int) -> dict[str, int]:
    """A tool that takes time."""
    await asyncio.sleep(0)
    return {"done": n}


# ---- on ADK ---------------------------------------------------------------------------------------------------------


class Cast:
    """Hands out agents and counts what reaches their models."""

    def __init__(self) -> None:
        self.models: list[Model] = []

    def model(self, script: Any, **options: Any) -> Model:
        self.models.append(Model(script, **options))  # type: ignore[call-arg]
        return self.models[-1]

    def agent(self, name: str, *script: Any, tools: tuple[Any, ...] = (), chunks: int = 1, **options: Any) -> LlmAgent:
        return LlmAgent(
            name=name, description=name, model=self.model(list(script), chunks=chunks), tools=list(tools), **options
        )


def _seen(events: list[Any]) -> list[Any]:
    """What an application sees of events, by author: the order between branches is a matter of timing."""
    by_author: dict[str, list[Any]] = {}
    for event in events:
        parts = (event.content.parts if event.content is not None else None) or []
        told = [
            (
                p.text,
                p.thought,
                (p.function_call.name, p.function_call.args) if p.function_call else None,
                (p.function_response.name, p.function_response.response) if p.function_response else None,
            )
            for p in parts
        ]
        by_author.setdefault(event.author, []).append(
            (event.partial, event.error_code, event.actions.transfer_to_agent, event.actions.escalate, told)
        )
    return sorted(by_author.items())


def _plugin(root: Any, settings: dict[str, Any]) -> tuple[list[Any], list[Guard]]:
    plugin = RunGuardPlugin(**settings)
    return [plugin], [plugin.guard]


def _breaker(root: Any, settings: dict[str, Any]) -> tuple[list[Any], list[Guard]]:
    patching.IN_USE.per_agent.clear()  # breakers of earlier runs that the collector has not found yet
    breaker = ADKCostBreaker(on_stop="stop", **settings)
    breaker.install_on_agent(root)
    return [], [breaker._plugin.guard]


def _budget_plugin(root: Any, settings: dict[str, Any]) -> tuple[list[Any], list[Guard]]:
    return [BudgetPlugin(BudgetPolicy(max_tokens=settings["max_tokens"]))], []


def _guarded_model(root: Any, settings: dict[str, Any]) -> tuple[list[Any], list[Guard]]:
    root.model = GuardedLlm(root.model, on_stop="stop", **settings)
    return [], [root.model.guard]


def _conditions(root: Any, settings: dict[str, Any]) -> tuple[list[Any], list[Guard]]:
    """Conditions around the run and around its loop that do not fire."""
    plugins, guards = _plugin(root, settings)
    never = (
        MaxMessageTermination(1_000) | TimeoutTermination(600) | TokenUsageTermination(10**9) | ExternalTermination()
    )
    terminate(
        root,
        MaxIterationsTermination(50) & NoProgressTermination()
        | TextMentionTermination("nobody says this")
        | TimeoutTermination(600),
    )
    return [
        *plugins,
        TerminationPlugin(never | CostTermination(10**6, prices=PRICED["prices"], model="scripted-1")),
    ], guards


def _ending_loop(root: Any, settings: dict[str, Any]) -> tuple[list[Any], list[Guard]]:
    """A condition ends the loop, then another one the run."""
    plugins, guards = _plugin(root, settings)
    terminate(root, MaxIterationsTermination(3) | TimeoutTermination(600))
    return [*plugins, TerminationPlugin(TextMentionTermination("enough") | ExternalTermination())], guards


def _ending_at_a_call(root: Any, settings: dict[str, Any]) -> tuple[list[Any], list[Guard]]:
    """A condition ends the run while a function call is open."""
    plugins, guards = _plugin(root, settings)
    terminate(root, FunctionCallTermination("step") | TimeoutTermination(600), scope="run")
    return plugins, guards


Guarding = Callable[[Any, dict[str, Any]], tuple[list[Any], list[Guard]]]


def _on_adk(
    build: Callable[[Cast], Any],
    *,
    sse: bool = False,
    guarding: Guarding = _plugin,
    stored: bool = False,
    **options: Any,
) -> Callable[[dict[str, Any] | None], Play]:
    def make(policy: dict[str, Any] | None) -> Play:
        cast = Cast()
        root, plugins, guards = build(cast), list[Any](), list[Guard]()
        if policy is not None:
            store = {"store": f"sqlite:///{mkdtemp()}/guard.db", "store_timeout": 5} if stored else {}
            plugins, guards = guarding(root, {**PRICED, **store, **options, **policy})
        service = InMemorySessionService()
        app = App(name="app", root_agent=root, plugins=plugins)
        runner = Runner(app=app, session_service=service)
        who: dict[str, Any] = {"user_id": "u1", "session_id": "s1"}

        async def turn(ready: Callable[[], None]) -> Any:
            ready()
            if await service.get_session(app_name="app", **who) is None:
                await service.create_session(app_name="app", **who)
            message = types.Content(role="user", parts=[types.Part(text="go")])
            run_config: dict[str, Any] = {"run_config": SSE} if sse else {}
            return _seen([event async for event in runner.run_async(**who, new_message=message, **run_config)])

        async def check() -> None:
            session = await service.get_session(app_name="app", **who)
            assert_calls_answered(session)

        return Play(guards, turn, check, lambda: sum(model.calls for model in cast.models))

    return make


def tool_loop(cast: Cast) -> Any:
    return cast.agent("solo", call("step", n=1), call("wait_a_turn", n=2), text("done"), tools=(step, wait_a_turn))


def two_steps(cast: Cast) -> Any:
    return cast.agent("solo", call("step", n=1), call("step", n=2), text("done"), tools=(step,))


def hand_over(cast: Cast) -> Any:
    child = cast.agent("child", call("step", n=1), transfer("lead"), text("child is done"), tools=(step,))
    return cast.agent("lead", transfer("child"), text("lead is done"), sub_agents=[child])


def branches(cast: Cast) -> Any:
    return ParallelAgent(
        name="par",
        sub_agents=[cast.agent(f"p{n}", call("step", n=n), text(f"p{n} is done"), tools=(step,)) for n in range(3)],
    )


def nested(cast: Cast) -> Any:
    inner = cast.agent("inner", call("step", n=1), text("inner is done"), tools=(step,))
    return cast.agent("outer", call("inner", request="one"), text("outer is done"), tools=(AgentTool(inner),))


def streamed(cast: Cast) -> Any:
    return cast.agent("solo", call("step", n=1), text("done"), tools=(step,), chunks=3)


def single_turn(cast: Cast) -> Any:
    helper = cast.agent("helper", text("helped"), mode="single_turn")
    return cast.agent("lead", call("helper", request="room 1"), text("lead is done"), sub_agents=[helper])


def graph(cast: Cast) -> Any:
    first, second = (
        cast.agent("first", text("first is done")),
        cast.agent("second", call("step", n=1), text("second is done"), tools=(step,)),
    )
    return Workflow(name="wf", edges=[("START", first), (first, second)])


def consulting(cast: Cast) -> Any:
    """A tool asks a model by itself: no hook announces that call."""
    adviser = cast.model([text("advice")])

    async def consult(question: str) -> dict[str, str]:
        request = LlmRequest(
            model=adviser.model, contents=[types.Content(role="user", parts=[types.Part(text=question)])]
        )
        return {
            "advice": "".join([parts(r.content)[0].text or "" async for r in adviser.generate_content_async(request)])
        }

    return cast.agent("solo", call("consult", question="how?"), text("done"), tools=(consult,))


def endless_tools(cast: Cast) -> Any:
    return LlmAgent(
        name="solo", model=cast.model(lambda n, _: call("step", n=n) if n % 9 else text("enough")), tools=[step]
    )


def repeating(cast: Cast) -> Any:
    return LlmAgent(
        name="solo", model=cast.model(lambda n, _: call("step", n=1) if n % 9 else text("enough")), tools=[step]
    )


def endless_loop(cast: Cast) -> Any:
    return LoopAgent(name="loop", max_iterations=8, sub_agents=[cast.agent("member", text("again"))])


def short_loop(cast: Cast) -> Any:
    return LoopAgent(
        name="loop",
        max_iterations=2,
        sub_agents=[cast.agent("member", call("step", n=1), text("again"), text("once more"), tools=(step,))],
    )


def endless_graph(cast: Cast) -> Any:
    writer = cast.agent("writer", text("a draft"))
    rounds = 0

    def review(node_input: Any) -> Any:
        nonlocal rounds
        rounds += 1
        from google.adk.events import Event

        return Event(route="again" if rounds % 9 else "good", output="reviewed")

    def publish(node_input: Any) -> str:
        return "published"

    return Workflow(
        name="wf", edges=[("START", writer), (writer, review), (review, {"again": writer, "good": publish})]
    )


def endless_branches(cast: Cast) -> Any:
    def one(name: str) -> LlmAgent:
        return LlmAgent(
            name=name, model=cast.model(lambda n, _: call("step", n=n) if n % 6 else text("enough")), tools=[step]
        )

    return ParallelAgent(name="par", sub_agents=[one("p1"), one("p2")])


def endless_nested(cast: Cast) -> Any:
    inner = LlmAgent(
        name="inner",
        description="inner",
        model=cast.model(lambda n, _: call("step", n=n) if n % 6 else text("enough")),
        tools=[step],
    )
    return cast.agent("outer", call("inner", request="one"), text("outer is done"), tools=(AgentTool(inner),))


# ---- functions ------------------------------------------------------------------------------------------------------

USAGE: Final = {"model": "scripted-1", "usage": {"input_tokens": 1_000, "output_tokens": 250}}


class _StreamManager:
    """Has to be entered to get a stream, as those of Anthropic and OpenAI have."""

    def __init__(self, pieces: Any) -> None:
        self.pieces = pieces

    def __enter__(self) -> Any:
        return self.pieces

    def __exit__(self, *error: object) -> None:
        self.pieces.close()


class _AsyncStreamManager:
    def __init__(self, pieces: Any) -> None:
        self.pieces = pieces

    async def __aenter__(self) -> Any:
        return self.pieces

    async def __aexit__(self, *error: object) -> None:
        await self.pieces.aclose()


def _read_all(manager: Any) -> list[Any]:
    with manager as stream:
        return list(stream)


async def _in_thread(do: Callable[[], Any]) -> Any:
    """In a thread of its own: one that was there before is not traced."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, do)


def _functions(kind: str, *, in_run: bool = False) -> Callable[[dict[str, Any] | None], Play]:
    def make(policy: dict[str, Any] | None) -> Play:
        made = 0

        async def ask(**request: Any) -> dict[str, Any]:
            nonlocal made
            made += 1
            await asyncio.sleep(0)
            return {"answer": made, **USAGE}

        def ask_sync(**request: Any) -> dict[str, Any]:
            nonlocal made
            made += 1
            return {"answer": made, **USAGE}

        async def pieces(**request: Any) -> AsyncIterator[dict[str, Any]]:
            nonlocal made
            made += 1
            for n in range(3):
                await asyncio.sleep(0)
                yield {"piece": n}
            yield {"piece": 3, **USAGE}

        def pieces_sync(**request: Any) -> Iterator[dict[str, Any]]:
            nonlocal made
            made += 1
            for n in range(3):
                yield {"piece": n}
            yield {"piece": 3, **USAGE}

        async def entered(**request: Any) -> Any:
            return _AsyncStreamManager(pieces(**request))

        def entered_sync(**request: Any) -> Any:
            return _StreamManager(pieces_sync(**request))

        ways = {
            "async": ask,
            "sync": ask_sync,
            "async pieces": pieces,
            "pieces": pieces_sync,
            "async entered": entered,
            "entered": entered_sync,
        }
        plain: Any = ways[kind]
        wrap = runguard.guard_async if "async" in kind else runguard.guard
        fn: Any = (
            plain if policy is None else wrap(plain, loop={"repeats": 50}, breaker={"failures": 5}, **PRICED, **policy)
        )
        request = {"model": "scripted-1", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 2_000}

        guards = [fn.__runguard__.guard] if policy is not None else []

        async def turn(ready: Callable[[], None]) -> Any:
            with ExitStack() as around:
                if in_run and policy is not None and not made:
                    run = around.enter_context(runguard.run(user="u1", budget={"max_usd": 10}, **PRICED))
                    guards.append(present(run.caller).guard)
                ready()
                return await three_calls()

        async def three_calls() -> Any:
            seen: list[Any] = []
            for _ in range(3):
                if kind == "async":
                    seen.append(await fn(**request))
                elif kind == "sync":
                    seen.append(await _in_thread(lambda: fn(**request)))
                elif kind == "async pieces":
                    seen.append([piece async for piece in fn(**request)])
                elif kind == "async entered":
                    async with await fn(**request) as stream:
                        seen.append([piece async for piece in stream])
                elif kind == "entered":
                    seen.append(await _in_thread(lambda: _read_all(fn(**request))))
                else:
                    seen.append(await _in_thread(lambda: list(fn(**request))))
            return seen

        async def check() -> None:
            return None

        return Play(guards, turn, check, lambda: made)

    return make


# ---- adapters -------------------------------------------------------------------------------------------------------


def _adapter(kind: str, *, inside: str = "") -> Callable[[dict[str, Any] | None], Play]:
    """An agent of a framework: a model call, its tool, and a last answer.

    ``inside``: its tool starts an agent, of the same framework or of ADK without a guard.
    """

    def make(policy: dict[str, Any] | None) -> Play:
        made, cast = 0, Cast()
        helper = cast.agent("adk_helper", text("helped"))

        def answer(step: int) -> dict[str, Any]:
            nonlocal made
            made += 1
            return {"said": f"step {step}", "tool": "look" if step == 1 else "", **USAGE}

        async def ask(step: int) -> dict[str, Any]:
            await asyncio.sleep(0)
            return answer(step)

        async def ask_in_pieces(step: int) -> AsyncIterator[dict[str, Any]]:
            yield {"said": "…"}
            await asyncio.sleep(0)
            yield answer(step)

        guard = (
            Guard(Policy.build(**{**PRICED, "tools": {"look": ToolRule(price=0.0001)}, **policy})) if policy else None
        )
        describe = partial(ModelRequest.of, "scripted-1", ["x" * 400], 2_000)

        async def model_call(run: AgentRun | None, step: int) -> dict[str, Any]:
            if run is None:
                return await ask(step)
            reply = await run.ask(describe) if kind != "sync" else await _in_thread(lambda: run.ask_now(describe))
            if not isinstance(reply, Permission):
                raise error_of(reply)
            try:
                if kind == "pieces":
                    async with aclosing(reply.pieces(ask_in_pieces(step))) as pieces:
                        said = [piece async for piece in pieces][-1]
                else:
                    said = await reply.during(ask(step)) if kind != "sync" else answer(step)
            except BaseException as error:
                reply.fail(error)
                raise
            finally:
                if reply.interrupted is not None:
                    raise error_of(reply.interrupted) from None
            tools = [ToolUse("call", said["tool"], {"at": 1})] if said["tool"] else []
            reply.read(lambda one, got: one.settle(Usage(1_000, 250), calls=tools, text=got["said"]), said)
            return said

        async def tool_call(run: AgentRun, use: ToolUse) -> str:
            refused = (
                await run.tools.check(use) if kind != "sync" else await _in_thread(lambda: run.tools.check_now(use))
            )
            if refused is not None:
                return refused
            with run.tools.inside(use):
                said = await tool(run.agent)
            return run.tools.answered(use, said) or said

        async def tool(agent_name: str) -> str:
            if agent_name != "clerk" or not inside:
                return "found"
            if inside == "same":
                return await agent("helper")
            runner = InMemoryRunner(helper, app_name="app")
            session = await runner.session_service.create_session(app_name="app", user_id="u1")
            message = types.Content(role="user", parts=[types.Part(text="go")])
            events = runner.run_async(user_id="u1", session_id=session.id, new_message=message)
            return str(_seen([event async for event in events]))

        async def agent(name: str) -> str:
            run: AgentRun | None = None
            if guard is not None and kind == "paused":
                run = await AgentRun.resume(guard, name, ["approval"], app="shop", user="u1")
            elif guard is not None:
                run = AgentRun.start(guard, name, app="shop", user="u1")
            try:
                if run is not None and (trip := run.enter()) is not None:
                    raise error_of(trip)
                first = await model_call(run, 1)
                use = ToolUse("call", first["tool"], {"at": 1})
                looked = await tool(name) if run is None else await tool_call(run, use)
                last = await model_call(run, 2)
                return f"{first['said']}, {looked}, {last['said']}"
            finally:
                if run is not None:
                    run.pause(["approval"]) if kind == "paused" else run.end()

        async def turn(ready: Callable[[], None]) -> Any:
            ready()
            return await agent("clerk")

        async def check() -> None:
            return None

        return Play(
            [guard] if guard is not None else [], turn, check, lambda: made + sum(one.calls for one in cast.models)
        )

    return make


# ---- all of them ----------------------------------------------------------------------------------------------------

_RULES: Final[dict[str, Any]] = {"tools": {"wait_a_turn": ToolRule(max_seconds=30)}}

REFERENCES: Final = [
    Reference("tool loop", _on_adk(tool_loop, **_RULES)),
    Reference("transfer", _on_adk(hand_over)),
    Reference("parallel", _on_adk(branches)),
    Reference("agent tool", _on_adk(nested)),
    Reference("streaming", _on_adk(streamed, sse=True)),
    Reference("single turn", _on_adk(single_turn)),
    Reference("workflow", _on_adk(graph)),
    Reference("model in a tool", _on_adk(consulting)),
    Reference("a store", _on_adk(tool_loop, stored=True, **_RULES)),
    Reference("cost breaker", _on_adk(tool_loop, guarding=_breaker)),
    Reference("budget plugin", _on_adk(tool_loop, guarding=_budget_plugin, max_tokens=100_000)),
    Reference("conditions", _on_adk(short_loop, guarding=_conditions)),
    Reference("guarded model", _on_adk(two_steps, guarding=_guarded_model)),
    Reference("guard_async", _functions("async")),
    Reference("guard_async in pieces", _functions("async pieces")),
    Reference("guard_async, entered", _functions("async entered")),
    Reference("guard", _functions("sync")),
    Reference("guard in pieces", _functions("pieces")),
    Reference("guard, entered", _functions("entered")),
    Reference("guard in a run", _functions("sync", in_run=True)),
    Reference("adapter", _adapter("async")),
    Reference("adapter in pieces", _adapter("pieces")),
    Reference("adapter without a loop", _adapter("sync")),
    Reference("adapter that pauses", _adapter("paused")),
    Reference("adapter in a tool", _adapter("async", inside="same")),
    Reference("ADK in a tool", _adapter("async", inside="ADK")),
    Reference("stopped agent", _on_adk(endless_tools, max_model_calls=4), stops=True),
    Reference("stopped budget plugin", _on_adk(endless_loop, guarding=_budget_plugin, max_tokens=4_000), stops=True),
    Reference("ended loop", _on_adk(endless_loop, guarding=_ending_loop), stops=True),
    Reference("ended at a call", _on_adk(endless_tools, guarding=_ending_at_a_call), stops=True),
    Reference("stopped repetition", _on_adk(repeating), stops=True),
    Reference("stopped loop", _on_adk(endless_loop, max_model_calls=4), stops=True),
    Reference("stopped workflow", _on_adk(endless_graph, max_model_calls=4), stops=True),
    Reference("stopped branches", _on_adk(endless_branches, max_model_calls=6), stops=True),
    Reference("stopped agent tool", _on_adk(endless_nested, max_model_calls=4), stops=True),
]


def budget_for(calls: int, *, tight: bool) -> dict[str, Any]:
    """Enough for so many calls one after the other.

    Tight: a hold that stays takes the place of a call; else all may be booked as they were held.
    """
    spent = (CALL_USD if tight else HELD_USD) * (calls - 1)
    return {"budgets": [Budget(usd=round(spent + HELD_USD + _TOLERATED_USD, 4), per="app")]}
