"""The collector runs finalizers in the middle of any other code, also inside of our locks.

So a finalizer, a ``__del__`` and the end of a generator that is closed take no lock and do no work. They leave a job to
``runguard.background.FINALIZED``.
"""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import runguard

SOURCE = Path(runguard.__file__).parent
NOTE: Final = "FINALIZED.put"
HARMLESS: Final = {NOTE, "partial", "any", "self.__dict__.get"}
# Generators that are suspended inside of a ``try`` or a ``with`` which does something when they are closed. Each is
# entered and left within one call of ours, belongs to a command or to replay, or only undoes a variable.
CLOSED_SAFELY: Final = {
    "adk/patching.py:shield": "one block of a function, in which nothing is yielded",
    "adk/runs.py:within": "resets a variable",
    "adk/runner.py:run": "forgets an entry of a dict",
    "calls/functions.py:run": "leaves a job when it is closed",
    "calls/streams.py:_asking": "one call of the provider's library",
    "langchain/chat_model.py:_stream": "leaves a job when it is closed",
    "langchain/turns.py:_where_it_began": "resets a variable",
    "ledger/ledger.py:store_faults": "one operation of a store",
    "ledger/postgres.py:_until": "one operation of a store",
    "ledger/postgres.py:_mapped_errors": "one operation of a store",
    "ledger/sqlite.py:mapped_errors": "one operation of a store",
    "ledger/sqlite.py:_write": "one operation of a store",
    "openai_agents/runner.py:_as": "resets a variable",
    "agent_framework.py:_at_work": "resets a variable",
    "gateway/launch.py:_forwarding": "a with block of one function, which waits for the program, is its only caller",
    "gateway/serving.py:capture_signals": "the server enters it in a with block for as long as it serves",
    "gateway/serving.py:served_in_background": "commands enter it in a with block for as long as they run",
    "core/identity.py:stored_attributes": "catches what reading an attribute raises",
}
OUTSIDE: Final = ("cli/", "replay/", "gate/", "calibrate/", "view/", "testing/")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def work_in_finalizers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            called = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
            if called - HARMLESS or any(isinstance(one, ast.With) for one in ast.walk(node)):
                yield f"line {node.lineno}: __del__ does {sorted(called - HARMLESS) or 'with'}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("weakref.")
            target = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
            if name == "finalize" and target != NOTE:
                yield f"line {node.lineno}: finalize calls {target}"
            if name in ("ref", "proxy", "WeakMethod") and target and target != NOTE:
                yield f"line {node.lineno}: a weak reference calls {target}"


def suspended(tree: ast.Module) -> Iterator[str]:
    """Synchronous generator functions that yield inside of a ``try`` or a ``with``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        pending, blocks = list[ast.AST](node.body), list[ast.Try | ast.With]()
        while pending:
            one = pending.pop()
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                continue
            if isinstance(one, ast.Try | ast.With):
                blocks.append(one)
            pending += ast.iter_child_nodes(one)
        inside = (each for block in blocks for part in block.body for each in ast.walk(part))
        if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in inside):
            yield node.name


def test_no_finalizer_does_work() -> None:
    assert [f"{name}: {what}" for name, tree in modules() for what in work_in_finalizers(tree)] == []


def test_every_generator_that_can_be_closed_in_the_middle_is_known() -> None:
    found = {f"{name}:{function}" for name, tree in modules() for function in suspended(tree)}
    assert {one for one in found if not one.startswith(OUTSIDE)} == set(CLOSED_SAFELY)


@pytest.mark.parametrize(
    "bad",
    [
        "class A:\n    def __del__(self):\n        self.lock.acquire()",
        "import weakref\nweakref.finalize(run, forget, key)",
        "import weakref\nkept = weakref.ref(run, forget)",
    ],
)
def test_the_check_sees_work(bad: str) -> None:
    assert list(work_in_finalizers(ast.parse(bad)))


RUNS: Final = 3_000 if os.environ.get("RUNGUARD_FAULTS") == "long" else 150
FUNCTIONS: Final = """
    def answer(**_):
        raise ConnectionError("down")

    def pieces(**_):
        yield {"piece": 1}
        yield {"piece": 2, "usage": {"input_tokens": 10, "output_tokens": 5}, "model": "m"}

    options = {"prices": {"m": {"input": 1, "output": 1}}, "max_usd": 1_000}
    request = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10}
    ask, stream = runguard.guard(answer, **options), runguard.guard(pieces, **options)

    def inside():
        with runguard.run(user="u"):
            yield from stream(**request)

    for number in range(RUNS):
        try:
            ask(**request)
        except ConnectionError:
            pass
        keep = stream(**request)
        next(keep)
        keep.me = [keep]  # a cycle: the collector finds it
        left = inside()
        next(left)
        del keep, left
    gc.collect()
    assert ask.flush(10) and stream.flush(10)
    assert stream.spend()["reserved_usd"] == 0, stream.spend()
    assert len(stream.__runguard__.guard.runs) <= 1, stream.__runguard__.guard.runs
"""
ADK: Final = """
    import asyncio
    from google.adk.agents import LlmAgent
    from google.adk.apps import App
    from google.adk.runners import Runner
    from google.adk.sessions import InMemorySessionService
    from google.genai import types
    from runguard.adk import RunGuardPlugin
    from runguard.testing import ScriptedModel, text

    def script(number, request):
        if number % 3 == 1:
            raise ConnectionError("down")
        return text("done")

    plugin = RunGuardPlugin(max_usd=1_000, prices={"scripted-1": {"input": 1, "output": 1}})
    agent = LlmAgent(name="a", model=ScriptedModel(script))
    runner = Runner(app=App(name="app", root_agent=agent, plugins=[plugin]), session_service=InMemorySessionService())

    async def one(number):
        session = await runner.session_service.create_session(app_name="app", user_id="u")
        message = types.Content(role="user", parts=[types.Part(text="go")])
        events = runner.run_async(user_id="u", session_id=session.id, new_message=message)
        try:
            if number % 3 == 0:
                await anext(events)  # left open: the loop closes it
            elif number % 3 == 1:
                task = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                task.cancel()
                await task
            else:
                async for _ in events:
                    pass
        except (ConnectionError, asyncio.CancelledError, StopAsyncIteration):
            pass

    async def main():
        for number in range(RUNS // 3):
            await one(number)
        gc.collect()
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert not plugin.guard.runs, plugin.guard.runs
    assert plugin.spend()["reserved_usd"] == 0
"""


@pytest.mark.parametrize("code", [FUNCTIONS, ADK], ids=["functions", "adk"])
def test_runs_that_fail_or_are_dropped_end_without_a_hang(code: str) -> None:
    """In a process of its own, which a hang cannot outlive, and with the collector at work in every other line."""
    head = f"import faulthandler, gc, runguard\nfaulthandler.dump_traceback_later({45 * RUNS / 150}, exit=True)\n"
    begin = f"RUNS = {RUNS}\ngc.collect(); gc.freeze(); gc.set_threshold(1)\n"
    command = [sys.executable, "-W", "ignore", "-c", head + begin + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]
