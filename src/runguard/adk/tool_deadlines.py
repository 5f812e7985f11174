"""Deadlines of tools: an async call is ended when its time is up, a sync one is judged when it returns.

The tool's own ``run_async`` is wrapped once per tool object, when a limit first applies to it; the context
names the limit that applies, so the tool keeps nothing of a run. Nothing else can end one call without cancelling the
run around it.
"""

import asyncio
import inspect
from typing import Any

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext

from runguard.adk.context import HERE, EnclosingTool
from runguard.core.events import Outcome

_MARK = "_runguard_timed"


def limit_time(tool: BaseTool) -> None:
    """Make calls of this tool end at their deadline. A sync function cannot be ended: it is judged when it returns."""
    if getattr(tool, _MARK, False):
        return
    function = getattr(tool, "func", None)
    if function is not None and not (
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    ):
        return
    original = tool.run_async

    async def run_async(*, args: dict[str, Any], tool_context: ToolContext) -> Any:
        around, left = HERE.get().tool, None
        try:
            left = _left(around) if around is not None and around.call_id == tool_context.function_call_id else None
        except Exception as fault:
            if around is not None:
                around.guard.fault("tool time", fault, around.invocation.run.info.run)
        if around is None or left is None:
            return await original(args=args, tool_context=tool_context)
        try:
            async with asyncio.timeout(max(left, 0.0)) as limit:
                return await original(args=args, tool_context=tool_context)
        except TimeoutError:
            if not limit.expired():
                raise  # the tool's own timeout, not ours
            around.guard.faults.attempt("tool time", timed_out, around)
            return {
                "error": (
                    f"'{tool.name}' took too long and was ended. Do not call it again in the same way in this turn."
                )
            }

    tool.run_async = run_async  # type: ignore[method-assign]
    setattr(tool, _MARK, True)


def timed_out(around: EnclosingTool) -> None:
    call = around.invocation.calls.get(around.call_id)
    if call is not None and call.outcome is None:
        call.outcome, call.error = Outcome.TIMEOUT, "timed out"
        around.guard.report_failure(around.invocation.run, call.tool, around.call_id)


def _left(around: EnclosingTool) -> float | None:
    guard, rule = around.guard, around.guard.tool_rule(around.name)
    left = rule.max_seconds if rule is not None else None
    if guard.policy.max_seconds is not None:
        run_left = around.invocation.run.started + guard.policy.max_seconds - guard.clock()
        left = run_left if left is None else min(left, run_left)
    return left
