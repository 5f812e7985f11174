"""Deadlines of tools: an async call is ended when its time is up, a sync one is judged when it returns.

The tool's own ``run_async`` is wrapped once per tool object, when a limit first applies to it; without a limit for the current
call the wrapper only passes through. Nothing else can end one call without cancelling the run around it.
"""

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext

from runguard.adk.chain import Invocation
from runguard.events import Outcome

if TYPE_CHECKING:
    from runguard.adk.plugin import RunGuardPlugin

_MARK = "_runguard_timed"


def limit_time(tool: BaseTool, plugin: "RunGuardPlugin", invocation: Invocation, tool_seconds: float | None) -> None:
    """Note the time this call may take; the wrapper below reads it."""
    deadlines: dict[str, tuple[Invocation, RunGuardPlugin, float | None]] | None = getattr(tool, _MARK, None)
    if deadlines is None:
        deadlines = _wrap(tool)
        if deadlines is None:
            return
    deadlines[invocation.id] = (invocation, plugin, tool_seconds)
    if len(deadlines) > 1_000:
        deadlines.pop(next(iter(deadlines)))


def _wrap(tool: BaseTool) -> "dict[str, tuple[Invocation, RunGuardPlugin, float | None]] | None":
    original = tool.run_async
    function = getattr(tool, "func", None)
    if function is not None and not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)):
        return None  # a sync function cannot be interrupted, only judged on return
    deadlines: dict[str, tuple[Invocation, RunGuardPlugin, float | None]] = {}

    async def run_async(*, args: dict[str, Any], tool_context: ToolContext) -> Any:
        found = deadlines.get(tool_context.invocation_id)
        if found is None:
            return await original(args=args, tool_context=tool_context)
        invocation, plugin, tool_seconds = found
        left = tool_seconds
        if plugin.guard.policy.max_seconds is not None:
            run_left = invocation.run.started + plugin.guard.policy.max_seconds - plugin.guard.clock()
            left = run_left if left is None else min(left, run_left)
        try:
            async with asyncio.timeout(max(left or 0.0, 0.0)) as limit:
                return await original(args=args, tool_context=tool_context)
        except TimeoutError:
            if not limit.expired():
                raise  # the tool's own timeout, not ours
            call = invocation.calls.get(tool_context.function_call_id or "")
            if call is not None:
                call.outcome, call.error = Outcome.TIMEOUT, "timed out"
                plugin.guard.report_failure(invocation.run, call.tool, tool_context.function_call_id or "")
            return {"error": f"'{tool.name}' took too long and was ended. Do not call it again in the same way."}

    tool.run_async = run_async  # type: ignore[method-assign]
    setattr(tool, _MARK, deadlines)
    return deadlines
