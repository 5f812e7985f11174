"""Calls that reach a model: which hooks announced them, and who makes a call that no hook announced."""

from collections.abc import Iterable
from typing import Final

from google.adk.models.llm_request import LlmRequest

from runguard.adk.call_accounts import CallAccount
from runguard.adk.context import ANNOUNCED, HERE
from runguard.adk.invocation_state import Invocation
from runguard.engine.guard import Guard

_DIRECT: Final = "(direct)"  # the agent of a call that no agent's hook announced
_AGENT_LABEL: Final = "adk_agent_name"


def announced_accounts(request: LlmRequest) -> list[CallAccount]:
    """The accounts that hooks have opened for this call."""
    found: list[CallAccount] = []
    for guard, invocation, flight in ANNOUNCED.get():
        if (
            flight.charge is None
            or flight.left
            or flight.answered
            or flight.charge.over
            or flight.request() is not request
        ):
            continue
        found.append(CallAccount(guard, flight.charge, invocation, flight, usage=flight.usage))
        flight.left = True  # last: the after-hook settles the others
    if found:
        announced = ANNOUNCED.get()
        ANNOUNCED.set(tuple([e for e in announced if not e[2].left]) if len(announced) > len(found) else ())
    return found


def callers(request: LlmRequest) -> Iterable[tuple[Guard, Invocation, str, str, str, bool]]:
    """Who makes a call that no hook announced: the guarded models around it; the tool call that it is in, or else the
    Runner at work.

    Yields guard, invocation, lane, agent, tool, and whether it is a guarded model.
    """
    child = _child_agent(request)
    for layer in HERE.get().layers:
        yield layer.guard, layer.invocation, layer.lane, layer.agent, "", True
    tool, seen = HERE.get().tool, set()
    while tool is not None:
        run = tool.invocation.run
        if tool.guard not in seen and tool.guard.runs.get(run.info.run) is run:
            seen.add(tool.guard)
            agent = child or (tool.path[-1] if tool.path else _DIRECT)
            yield tool.guard, tool.invocation, tool.lane, agent, tool.name, False
        tool = tool.outer
    stream = HERE.get().stream
    while stream is not None and stream.registry is None:  # a Runner without a guard inside of one that has a guard
        stream = stream.outer
    if seen or stream is None or stream.registry is None:
        return
    for invocation_id in reversed(stream.invocation_ids):
        invocation = stream.registry.find(invocation_id)
        if invocation is not None:
            yield stream.registry.guard, invocation, invocation.lane, child or _DIRECT, "", False
            return


def _child_agent(request: LlmRequest) -> str:
    """The agent that makes this call in a Runner without a guard: ADK labels each request with its name. Empty for a
    call that no agent makes.
    """
    labels = request.config.labels if request.config is not None else None
    named = labels.get(_AGENT_LABEL) if labels else None
    if named:
        return named
    stream = HERE.get().stream
    return stream.agent if stream is not None and stream.registry is None else ""
