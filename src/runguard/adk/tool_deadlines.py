"""Deadlines of tools: an async call is ended when its time is up, a sync one is judged when it returns.

The tool's own ``run_async`` is wrapped once per tool object, when a limit first applies to it; the call's frame tells
whose limit holds, so nothing of a run is kept on the tool. Nothing else can end one call without cancelling the run
around it.
"""

import asyncio
import inspect
from typing import Any

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext

from runguard.adk.invocations import FRAME, Frame
from runguard.core.events import Outcome

_MARK = "_runguard_timed"


def limit_time(tool: BaseTool) -> None:
    """See that calls of this tool can be ended; a sync function cannot be, only judged on return."""
    if getattr(tool, _MARK, False):
        return
    function = getattr(tool, "func", None)
    if function is not None and not (
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    ):
        return
    original = tool.run_async

    async def run_async(*, args: dict[str, Any], tool_context: ToolContext) -> Any:
        frame, left = FRAME.get(), None
        try:
            left = _left(frame) if frame is not None and frame.call_id == tool_context.function_call_id else None
        except Exception as fault:
            if frame is not None:
                frame.guard.fault("tool time", fault, frame.invocation.run.info.run)
        if frame is None or left is None:
            return await original(args=args, tool_context=tool_context)
        try:
            async with asyncio.timeout(max(left, 0.0)) as limit:
                return await original(args=args, tool_context=tool_context)
        except TimeoutError:
            if not limit.expired():
                raise  # the tool's own timeout, not ours
            frame.guard.faults.attempt("tool time", timed_out, frame)
            return {
                "error": (
                    f"'{tool.name}' took too long and was ended. Do not call it again in the same way in this turn."
                )
            }

    tool.run_async = run_async  # type: ignore[method-assign]
    setattr(tool, _MARK, True)


def timed_out(frame: Frame) -> None:
    call = frame.invocation.calls.get(frame.call_id)
    if call is not None and call.outcome is None:
        call.outcome, call.error = Outcome.TIMEOUT, "timed out"
        frame.guard.report_failure(frame.invocation.run, call.tool, frame.call_id)


def _left(frame: Frame) -> float | None:
    guard, rule = frame.guard, frame.guard.tool_rule(frame.tool)
    left = rule.max_seconds if rule is not None else None
    if guard.policy.max_seconds is not None:
        run_left = frame.invocation.run.started + guard.policy.max_seconds - guard.clock()
        left = run_left if left is None else min(left, run_left)
    return left
