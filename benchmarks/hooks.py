"""What RunGuard's hooks cost above a plugin that does nothing, on real ADK objects. CPU time, interleaved, medians.

    python benchmarks/hooks.py [--quick] [--json]

Direct: the hooks are called in ADK's order with a real InvocationContext, tool hooks in a task of their own, so that
microseconds show. End to end: a real Runner with a scripted model, 50 model and tool steps.
"""

import argparse
import asyncio
import gc
import inspect
import json
import logging
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

import runguard
from runguard import testing
from runguard.adk import RunGuardPlugin
from runguard.policy.keywords import PolicySettings

TARGETS = {"model": 10.0, "tool": 18.0}
CALLS_GOAL = 120  # Python calls of RunGuard in the hooks of a model and tool step
BLOCK = 200  # steps measured in one go
# the counters stay on, only the default ends are moved away
UNLIMITED: PolicySettings = {"max_model_calls": 10**9, "max_tool_calls": 10**9, "rules": {"talk": {"stop": 10**9}}}
logging.getLogger("runguard").setLevel(logging.ERROR)


class NoOpPlugin(BasePlugin):
    """Overrides every hook and does nothing in it."""


async def _nothing(self: BasePlugin, **_: Any) -> None:
    return None


for _name, _ in inspect.getmembers(BasePlugin, inspect.iscoroutinefunction):
    setattr(NoOpPlugin, _name, _nothing)


def lookup(query: str, page: int) -> dict[str, Any]:
    """Look something up."""
    return flat(page)


def flat(n: int) -> dict[str, Any]:
    """1 kB of text, as ADK carries a tool's string."""
    return {"result": f"record {n}: " + "the quick brown fox jumps over the lazy dog; " * 22}


def structured(n: int) -> dict[str, Any]:
    """1 kB of fields."""
    items = [
        {"id": n * 100 + k, "name": f"item number {n} {k}", "price": k * 1.5, "tags": ["a", "b"], "ok": True}
        for k in range(12)
    ]
    return {"status": "ok", "query": f"q{n}", "total": 12, "items": items}


SHAPES = {"flat text": flat, "structured": structured}


# ---- direct ---------------------------------------------------------------------------------------------------------


class Drive:
    """One run in which a plugin's hooks are called step after step.

    Objects are made once and changed outside the measured time.
    """

    def __init__(self, plugin: BasePlugin, session: Any, service: Any, shape: str, invocation_id: str) -> None:
        self.plugin, self.answer = plugin, SHAPES[shape]
        self.agent = LlmAgent(name="worker", model="scripted-1", tools=[lookup])
        self.tool = FunctionTool(lookup)
        self.context = InvocationContext(
            invocation_id=invocation_id,
            agent=self.agent,
            session=session,
            session_service=service,
            run_config=RunConfig(),
            plugin_manager=PluginManager([plugin]),
        )
        self.step = 0
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=1000, candidates_token_count=250, total_token_count=1250
        )
        self.call = types.FunctionCall(id="", name="lookup", args={})
        self.response = types.FunctionResponse(id="", name="lookup", response={})
        content = types.Content(role="model", parts=[types.Part(function_call=self.call)])
        reply = types.Content(role="user", parts=[types.Part(function_response=self.response)])
        self.request = LlmRequest(
            model="scripted-1", contents=[types.Content(role="user", parts=[types.Part(text="go")])]
        )
        self.answered = LlmResponse(content=content, usage_metadata=usage, partial=False)
        self.asked_event = Event(invocation_id=invocation_id, author="worker", content=content, usage_metadata=usage)
        self.answer_event = Event(invocation_id=invocation_id, author="worker", content=reply)
        self.words = types.Part(text="hm")
        said = types.Content(role="model", parts=[self.words])
        self.said = LlmResponse(content=said, usage_metadata=usage, partial=False)
        self.said_event = Event(invocation_id=invocation_id, author="worker", content=said, usage_metadata=usage)
        self.model_context, self.tool_context = (
            CallbackContext(self.context),
            ToolContext(self.context, function_call_id="call-0"),
        )
        # pydantic copies neither: what the events hold is what is changed below
        (self.call,), (self.response,) = (
            self.asked_event.get_function_calls(),
            self.answer_event.get_function_responses(),
        )

    async def begin(self) -> "Drive":
        await self.plugin.before_run_callback(invocation_context=self.context)
        await self.plugin.before_agent_callback(agent=self.agent, callback_context=CallbackContext(self.context))
        return self

    async def end(self) -> None:
        await self.plugin.after_run_callback(invocation_context=self.context)

    async def block(self, steps: int, samples: dict[str, list[float]] | None = None) -> None:
        """So many steps of a model call and a tool call, then as many model calls alone; CPU seconds per step
        go to ``samples``.

        Time is taken once per block: a clock between the hooks would cost more than they do. Changing the
        objects is in it for every plugin alike and falls out of the difference.
        """
        plugin, context, clock = self.plugin, self.context, time.process_time
        gc.disable()  # a collection walks all of ADK's objects: whose step it falls into is chance
        start = clock()
        await self.steps(steps)
        both = clock() - start
        start = clock()
        for _ in range(steps):
            self._next()
            await plugin.before_model_callback(callback_context=self.model_context, llm_request=self.request)
            await plugin.after_model_callback(callback_context=self.model_context, llm_response=self.said)
            await plugin.on_event_callback(invocation_context=context, event=self.said_event)
        model = clock() - start
        gc.enable()
        if samples is not None:
            samples["model"].append(model / steps)
            samples["tool"].append((both - model) / steps)

    async def steps(self, count: int) -> None:
        """So many steps of a model call and a tool call."""
        plugin, context = self.plugin, self.context
        for _ in range(count):
            self._next()
            await plugin.before_model_callback(callback_context=self.model_context, llm_request=self.request)
            await plugin.after_model_callback(callback_context=self.model_context, llm_response=self.answered)
            await plugin.on_event_callback(invocation_context=context, event=self.asked_event)
            await asyncio.create_task(self._tool_hooks())  # as ADK does: a task for each call
            await plugin.on_event_callback(invocation_context=context, event=self.answer_event)

    def _next(self) -> None:
        self.step += 1
        self.words.text = f"hm {self.step}"  # the same words again would be a loop
        n = self.step
        self.call.id = self.response.id = self.tool_context.function_call_id = f"call-{n}"
        self.call.args = {"query": f"records about topic {n}", "page": n}
        self.response.response = self.answer(n)
        self.asked_event.id, self.answer_event.id = f"ask-{n}", f"answer-{n}"

    async def _tool_hooks(self) -> None:
        plugin, call, context = self.plugin, self.call, self.tool_context
        await plugin.before_tool_callback(tool=self.tool, tool_args=call.args or {}, tool_context=context)
        await plugin.after_tool_callback(
            tool=self.tool, tool_args=call.args or {}, tool_context=context, result=self.response.response or {}
        )


async def direct(rounds: int, far: int) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """shape -> where -> microseconds above the no-op plugin per model call and per tool call."""
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="u")
    guard, noop = RunGuardPlugin(**UNLIMITED), NoOpPlugin(name="noop")
    out: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for shape in SHAPES:
        samples: dict[str, dict[str, list[float]]] = {
            where: {"model": [], "tool": []} for where in ("noop", "near", "far")
        }
        idle = await Drive(noop, session, service, shape, "noop").begin()
        long = await Drive(guard, session, service, shape, f"far-{shape}").begin()
        await idle.block(BLOCK)
        await long.block(far)
        for number in range(rounds):
            near = await Drive(guard, session, service, shape, f"near-{shape}-{number}").begin()
            await near.block(100)
            await idle.block(BLOCK, samples["noop"])
            await near.block(BLOCK, samples["near"])
            await idle.block(BLOCK, samples["noop"])
            await long.block(BLOCK, samples["far"])
            await near.end()
        await long.end()
        out[shape] = {
            where: {kind: above(samples[where][kind], samples["noop"][kind]) for kind in TARGETS}
            for where in ("near", "far")
        }
    assert not guard.snapshot()["guard_errors"], "the guard failed on these objects: nothing was measured"
    assert not guard.trips, "the guard stopped the run: nothing was measured"
    return out


async def python_calls(steps: int = 40) -> dict[str, float]:
    """shape -> Python calls of RunGuard in the hooks of one step. The load of the machine does not move this figure."""
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="u")
    package = str(Path(runguard.__file__).parent)
    out: dict[str, float] = {}
    for shape in SHAPES:
        drive = await Drive(RunGuardPlugin(**UNLIMITED), session, service, shape, f"calls-{shape}").begin()
        await drive.steps(100)
        total = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal total
            total += event == "call" and frame.f_code.co_filename.startswith(package)

        sys.setprofile(count)
        try:
            await drive.steps(steps)
        finally:
            sys.setprofile(None)
        out[shape] = total / steps
        await drive.end()
    return out


def above(guarded: list[float], idle: list[float]) -> dict[str, float]:
    """Microseconds: the median, and the fastest tenth, which other work on the machine disturbs least."""
    fastest = sorted(guarded)[len(guarded) // 10] - sorted(idle)[len(idle) // 10]
    return {"median": 1e6 * (median(guarded) - median(idle)), "fastest": 1e6 * fastest}


async def memory(far: int) -> dict[str, dict[str, float]]:
    """shape -> kB that one run holds after 100 steps, after ``far`` steps, and after it ended."""
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="u")
    out: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        guard = RunGuardPlugin(**UNLIMITED)
        warm = await Drive(guard, session, service, shape, "warm").begin()
        await warm.block(10)
        await warm.end()
        drive = Drive(guard, session, service, shape, "run")
        gc.collect()
        tracemalloc.start()
        await drive.begin()
        held = {}
        await drive.block(100)
        held["near"] = _held()
        await drive.block(far - 100)
        held["far"] = _held()
        await drive.end()
        await asyncio.sleep(0)  # lets go of the last tool task, whose context names the run
        held["ended"] = _held()
        tracemalloc.stop()
        out[shape] = held
    return out


def _held() -> float:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1024


# ---- end to end -----------------------------------------------------------------------------------------------------


def script(steps: int) -> Any:
    return lambda n, request: testing.call("lookup", query=f"topic {n}", page=n) if n <= steps else testing.text("done")


async def one_run(plugins: list[BasePlugin], steps: int) -> float:
    agent = LlmAgent(name="worker", model=testing.ScriptedModel(script(steps)), tools=[lookup])
    service = InMemorySessionService()
    runner = Runner(app=App(name="app", root_agent=agent, plugins=plugins), session_service=service)
    gc.collect()
    start = time.process_time()
    recording = await testing.run(agent, runner=runner)
    spent = time.process_time() - start
    assert recording.texts == ["done"], "the run was disturbed"
    return spent


async def end_to_end(rounds: int, steps: int = 50) -> dict[str, float]:
    """Median CPU microseconds per model and tool step, and the median of the ratios within a round."""
    kinds: dict[str, Callable[[], list[BasePlugin]]] = {
        "no plugin": list,
        "no-op plugin": lambda: [NoOpPlugin(name="noop")],
        "RunGuard": lambda: [RunGuardPlugin()],
    }
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind in (*kinds,) if number % 2 else reversed(kinds):
            seconds = await one_run(kinds[kind](), steps)
            if number:  # the first round warms up
                spent[kind].append(1e6 * seconds / steps)
    out = {kind: median(values) for kind, values in spent.items()}
    pairs = list(zip(spent["RunGuard"], spent["no-op plugin"], spent["no plugin"], strict=True))
    out["RunGuard / no-op"] = median(g / n for g, n, _ in pairs)
    out["RunGuard / none"] = median(g / n for g, _, n in pairs)
    out["RunGuard - no-op"] = median(g - n for g, n, _ in pairs)
    return out


# ---- report ---------------------------------------------------------------------------------------------------------


def lines(result: dict[str, Any], far: int) -> Iterator[str]:
    yield (
        "CPU microseconds of RunGuard's hooks above a no-op plugin, 1 kB answers, new arguments each time: median "
        "(fastest tenth)"
    )
    yield "| answer | at step | per model call (target <= 10) | per tool call (target <= 18) |\n|---|---|---|---|"
    for shape, places in result["direct"].items():
        for where, step in (("near", 100), ("far", far)):
            cells = [
                f"{c['median']:.1f} ({c['fastest']:.1f}){'' if c['median'] <= TARGETS[kind] else ' over'}"
                for kind, c in places[where].items()
            ]
            yield f"| {shape} | {step:,} | {' | '.join(cells)} |"
    counted = ", ".join(f"{calls:.0f} ({shape})" for shape, calls in result["python_calls"].items())
    yield f"\nPython calls of RunGuard in the hooks of a model and tool step: {counted}; goal {CALLS_GOAL}"
    yield "\nMemory that one run holds (kB)"
    yield f"| answer | after 100 steps | after {result['memory_steps']:,} steps | after its end |\n|---|---|---|---|"
    for shape, held in result["memory"].items():
        yield f"| {shape} | {held['near']:.0f} | {held['far']:.0f} | {held['ended']:.0f} |"
    total = result["end_to_end"]
    yield "\nA real Runner with a scripted model, 50 model and tool steps: CPU microseconds per step (medians)"
    yield (
        "| no plugin | no-op plugin | RunGuard | RunGuard - no-op | RunGuard / no-op | RunGuard / no plugin "
        "|\n|---|---|---|---|---|---|"
    )
    ratios = f"{total['RunGuard / no-op']:.3f} | {total['RunGuard / none']:.3f}"
    yield (
        f"| {total['no plugin']:.0f} | {total['no-op plugin']:.0f} | {total['RunGuard']:.0f} | "
        f"{total['RunGuard - no-op']:.0f} "
        f"| {ratios} |"
    )


async def measure(quick: bool) -> dict[str, Any]:
    far, memory_steps = (5_000, 2_000) if quick else (100_000, 20_000)
    gc.collect()
    gc.freeze()
    return {
        "direct": await direct(5 if quick else 20, far),
        "python_calls": await python_calls(),
        "memory": await memory(memory_steps),
        "end_to_end": await end_to_end(3 if quick else 25),
        "far": far,
        "memory_steps": memory_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, step 5,000 instead of 100,000")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    result = asyncio.run(measure(options.quick))
    print(json.dumps(result, indent=1) if options.json else "\n".join(lines(result, result["far"])))


if __name__ == "__main__":
    main()
