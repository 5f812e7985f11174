"""The last answer of an agent: after a stop, one model call without tools."""

import asyncio
from typing import TYPE_CHECKING, Any, Final

from runguard.adapters.model_calls import ModelRequest, Permission
from runguard.core.decision import Trip
from runguard.providers.sizes import UPPER

if TYPE_CHECKING:
    from runguard.adapters.agent_run import AgentRun

_INSTRUCTION_TOKENS: Final = 64  # what a framework adds around the instruction


async def last_permission(
    run: "AgentRun", request: ModelRequest, trip: Trip, task: "asyncio.Task[Any] | None"
) -> Permission | None:
    """Permission for the last call of a run that was stopped. None: the run ends with the stop.

    Runs around this one have not allowed the call, and an error in place of the stop would hide the answer.
    """
    if len(run.layers) != 1:  # none: the run could not be started
        return None
    layer = run.layers[0]
    guard, state, lane = layer
    last = guard.last_answers
    if last is None or guard.policy.on_stop == "raise":
        return None
    event = run.model_call(layer, request, no_loop=task is None)
    event.input_tokens += -(-len(last.instruction.encode()) // UPPER) + _INSTRUCTION_TOKENS
    if not last.may_answer(state, state.lane(lane), event, trip):
        return None
    if await last.take(state, event) is None:
        return None
    permission = Permission(run, task)
    permission.add(layer, event)
    permission.notice, permission.last_after = last.instruction, trip
    return permission
