"""A model call that the kill switch ends: it runs in the task of its caller, and the task is left as it was."""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun
from runguard.engine.guard import Guard
from runguard.policy import Policy

SEEN: ContextVar[str] = ContextVar("SEEN", default="")


async def _permission() -> tuple[AgentRun, Permission]:
    run = AgentRun.start(Guard(Policy.build()), "worker")
    permission = await run.ask(ModelRequest)
    assert isinstance(permission, Permission)
    return run, permission


def _stop(run: AgentRun) -> None:
    """The kill switch. It ends calls in flight."""
    assert len(run.layers[0].run.in_flight) == 1
    run.guard.operator_stops.throw("all", "me", "test")


async def _call(run: AgentRun, *, ignores: bool = False) -> str:
    _stop(run)
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        if not ignores:
            raise
    return "answer"


def _cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def _ended(call: Coroutine[Any, Any, Any], permission: Permission) -> None:
    with pytest.raises(asyncio.CancelledError):
        await permission.during(call)


async def test_a_stop_ends_the_call_and_not_its_task() -> None:
    run, permission = await _permission()
    await _ended(_call(run), permission)
    assert permission.interrupted is not None
    assert _cancelling() == 0
    async with asyncio.timeout(30):  # a task that counts as cancelled would not get through
        await asyncio.sleep(0)
    run.end()


async def test_a_call_that_ignores_its_end_keeps_its_answer() -> None:
    run, permission = await _permission()
    assert await permission.during(_call(run, ignores=True)) == "answer"
    assert (permission.interrupted, _cancelling()) == (None, 0)
    run.end()


async def test_a_task_that_is_cancelled_as_well_ends() -> None:
    run, permission = await _permission()

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await _ended(_call(run), permission)
        assert (permission.interrupted, task.cancelling()) == (None, 1)

    await asyncio.create_task(work())
    run.end()


async def test_an_end_that_comes_too_late_cancels_nothing() -> None:
    run, permission = await _permission()

    async def call() -> str:
        _stop(run)  # it takes effect in the next round of the event loop, and by then the call has answered
        return "answer"

    assert await permission.during(call()) == "answer"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (permission.interrupted, _cancelling()) == (None, 0)
    run.end()


async def test_a_context_variable_that_a_call_sets_is_seen_by_its_caller_as_without_a_guard() -> None:
    run, permission = await _permission()

    async def call() -> None:
        SEEN.set("set by the call")

    await permission.during(call())
    assert SEEN.get() == "set by the call"
    run.end()
