"""The guard around function tools: the SDK's own guardrails, before a tool runs and after it has answered.

A guardrail refuses with a text and leaves approvals alone. ``agents`` puts them on each tool that an agent offers.
"""

import copy
from functools import update_wrapper
from operator import is_not
from typing import Any, Final

from agents import (
    FunctionTool,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    ToolInputGuardrailData,
    ToolOutputGuardrail,
    ToolOutputGuardrailData,
)

from runguard.calls.run import AgentRun
from runguard.calls.tool_calls import ToolUse, left_out
from runguard.openai_agents.turns import TURN, Turn, as_failure
from runguard.providers.messages import arguments


def guarded_tools(tools: list[Any], turn: Turn | None) -> list[Any]:
    """Return copies of function tools that ask the guard. A turn copies each tool once: its schema is copied, too."""
    made = []
    for tool in tools:
        values = tuple(vars(tool).values()) if turn is not None and isinstance(tool, FunctionTool) else ()
        known = turn.tools.get(id(tool)) if turn is not None else None
        if known is None or len(known[1]) != len(values) or any(map(is_not, known[1], values)):
            known = tool, values, _guarded(tool)
            if turn is not None and values:
                turn.tools[id(tool)] = known
        made.append(known[2])
    return made


def _guarded(tool: Any) -> Any:
    """Return a copy of a function tool that asks the guard. Tools that OpenAI hosts are executed elsewhere."""
    if not isinstance(tool, FunctionTool) or _BEFORE in (tool.tool_input_guardrails or ()):
        return tool
    made = copy.copy(tool)
    made.tool_input_guardrails = [*(tool.tool_input_guardrails or ()), _BEFORE]
    made.tool_output_guardrails = [*(tool.tool_output_guardrails or ()), _AFTER]
    invoke = getattr(made.on_invoke_tool, _RAISES, None)
    if invoke is not None:  # else a failure is known by its text
        invoker: Any = copy.copy(made.on_invoke_tool)
        setattr(invoker, _RAISES, _noting(invoke))
        made.on_invoke_tool = invoker
    return made


_RAISES: Final = "_invoke_tool_impl"  # of the SDK's own invokers: raises what the tool raises


def _noting(invoke: Any) -> Any:
    """Return the invoker. It notes what the tool raises, before the SDK turns it into a text for the model."""

    async def noting(context: Any, args: str) -> Any:
        try:
            return await invoke(context, args)
        except BaseException as error:
            if (turn := TURN.get()) is not None:
                turn.errors[context.tool_call_id] = error
            raise

    return update_wrapper(noting, invoke)


async def _run_of(data: ToolInputGuardrailData) -> tuple[Turn, AgentRun] | None:
    turn = TURN.get()
    if turn is None:
        return None
    if turn.run is None and hasattr(data.agent, "runguard_all"):  # the turn goes on after an approval
        agent: Any = data.agent
        await turn.work(agent, data.context)
    return None if turn.run is None else (turn, turn.run)


def _use(data: ToolInputGuardrailData, turn: Turn) -> ToolUse:
    context = data.context
    received = turn.offered.get(context.tool_name)
    return ToolUse(context.tool_call_id, context.tool_name, arguments(context.tool_arguments), received)


def received_by(tool: Any) -> frozenset[str] | None:
    """Return the names of the arguments that the SDK passes on to a function; None for other tools, which get all."""
    invoke = getattr(tool, "on_invoke_tool", None)
    made_by = getattr(getattr(invoke, _RAISES, invoke), "__qualname__", "")
    return frozenset(tool.params_json_schema.get("properties", ())) if made_by.startswith(_OF_A_FUNCTION) else None


_OF_A_FUNCTION: Final = "function_tool.<locals>"  # where the SDK makes what calls a function


async def _before(data: ToolInputGuardrailData) -> ToolGuardrailFunctionOutput:
    """Refuse a call, or open the place in which the tool runs: the SDK runs each call in a task of its own."""
    found = await _run_of(data)
    if found is None:
        return ToolGuardrailFunctionOutput.allow()
    turn, run = found
    use = _use(data, turn)
    refusal = await run.tools.check(use)
    if refusal is not None:
        return ToolGuardrailFunctionOutput.reject_content(refusal)
    turn.errors.pop(use.id, None)
    run.tools.inside(use).__enter__()
    return ToolGuardrailFunctionOutput.allow()


async def _after(data: ToolOutputGuardrailData) -> ToolGuardrailFunctionOutput:
    """Report the answer. One that is too large is left out."""
    found = await _run_of(data)
    if found is None:
        return ToolGuardrailFunctionOutput.allow()
    turn, run = found
    use, raised = _use(data, turn), turn.errors.pop(data.context.tool_call_id, None)
    error = as_failure(raised, data.output) if raised is not None else None
    if error is not None:
        run.tools.raised(use, error)
        note = run.guard.faults.attempt("adapter", left_out, run.layers, use, data.output)
    else:
        note = run.tools.answered(use, data.output if raised is None else f"Error: {raised}")
    return ToolGuardrailFunctionOutput.allow() if note is None else ToolGuardrailFunctionOutput.reject_content(note)


_BEFORE: Final = ToolInputGuardrail[Any](_before, name="runguard")
_AFTER: Final = ToolOutputGuardrail[Any](_after, name="runguard")
