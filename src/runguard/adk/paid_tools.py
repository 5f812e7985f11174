"""Tools with a price on ADK: the price is reserved in the hook before the tool and settled in the one after it.

ADK calls the hook after a tool also where a callback or another plugin answered instead of it. So the tool's own
``run_async`` is wrapped, once per tool object, to see whether the tool was executed.
"""

import asyncio
from typing import Any, Final

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext

from runguard.adk.context import HERE
from runguard.adk.invocation_state import Invocation, OpenToolCall
from runguard.core.decision import Decision
from runguard.core.events import ToolCall
from runguard.engine.charges import OWNERS
from runguard.engine.guard import Guard

_MARK: Final = "_runguard_priced"


async def reserve_price(guard: Guard, invocation: Invocation, tool: BaseTool, event: ToolCall, args: Any) -> Decision:
    """Hold the price of a call that the rules have allowed. Calls inside of the tool do not wait for this hold."""
    _watch(tool)
    decision = await guard.reserve_tool(invocation.run, event, args)
    charge = guard.tool_prices.charge_of(invocation.run, event.id)
    if charge is not None:
        OWNERS.set((*(owner for owner in OWNERS.get() if not owner.over), charge))
    return decision


def settle_price(
    guard: Guard, invocation: Invocation, tool: BaseTool, context: ToolContext, args: Any, answer: object
) -> None:
    """The hook after a tool: ``answer`` is its result, or the exception that it raised."""
    call_id = context.function_call_id or ""
    call = invocation.calls.get(call_id)
    actions = context.actions
    waits = call_id in (actions.requested_tool_confirmations or ()) or call_id in (actions.requested_auth_configs or ())
    if waits or not _was_executed(call, invocation) or _lacks_arguments(tool, answer):
        guard.release_tool(invocation.run, call_id)
    elif isinstance(answer, asyncio.CancelledError):
        guard.tool_prices.settle_unknown(invocation.run, call_id)
    else:
        guard.settle_tool(invocation.run, call_id, args, answer)


def _was_executed(call: OpenToolCall | None, invocation: Invocation) -> bool:
    # a live model's streaming tools are not called through run_async
    return invocation.live or (call is not None and call.executed)


def _lacks_arguments(tool: BaseTool, answer: object) -> bool:
    """Whether ADK answered in the tool's place, because the model left out arguments."""
    error = answer.get("error") if isinstance(answer, dict) and len(answer) == 1 else None
    return isinstance(error, str) and error.startswith(f"Invoking `{tool.name}()` failed as the following mandatory")


def _watch(tool: BaseTool) -> None:
    if getattr(tool, _MARK, False):
        return
    original = tool.run_async

    async def run_async(*, args: dict[str, Any], tool_context: ToolContext) -> Any:
        around = HERE.get().tool
        if around is not None and around.call_id == tool_context.function_call_id:
            call = around.invocation.calls.get(around.call_id)
            if call is not None:
                call.executed = True
        return await original(args=args, tool_context=tool_context)

    tool.run_async = run_async  # type: ignore[method-assign]
    setattr(tool, _MARK, True)
