"""What the plugin does before and after a tool call: check it, refuse it, time it, and record how it failed."""

import asyncio
from typing import Any, Final

from google.adk.agents import BaseAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext

from runguard.adk.classifiers import app_verdict
from runguard.adk.context import HERE, enclosing_of, here_of
from runguard.adk.declared_arguments import declared_by
from runguard.adk.invocation_state import Invocation, OpenToolCall
from runguard.adk.invocations import Invocations
from runguard.adk.lanes import depth_of, lane_of
from runguard.adk.paid_tools import reserve_price, settle_price
from runguard.adk.run_start import RunStarter
from runguard.adk.stop_events import refusal
from runguard.adk.stop_owners import announce
from runguard.adk.stops import Stopper
from runguard.adk.tool_deadlines import limit_time, timed_out
from runguard.core.decision import PART_STOPPED, STOPPED, Action
from runguard.core.errors import RunStoppedError
from runguard.core.events import AgentEntered, Outcome, ToolCall
from runguard.core.outcomes import says_missing, was_done
from runguard.engine.guard import Guard
from runguard.providers.messages import FRAMEWORK_TOOLS, TRANSFER

_BLOCK: Final = Action.BLOCK
_ERROR, _TIMEOUT, _UNKNOWN_TOOL = Outcome.ERROR, Outcome.TIMEOUT, Outcome.UNKNOWN_TOOL
_TOOLS_KEPT: Final = 4_096


class ToolHooks:
    """Tool calls of one plugin."""

    def __init__(self, guard: Guard, invocations: Invocations, starter: RunStarter, stopper: Stopper) -> None:
        self._guard, self._invocations, self._starter, self._stopper = guard, invocations, starter, stopper
        self._known_tools: set[str] = set()
        self._limits_time = False  # some call had a deadline

    async def before(
        self, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        ic = tool_context._invocation_context
        if self._stopper.gave_up(ic.invocation_id) is not None:
            return refusal(STOPPED)
        try:
            invocation = self._invocations.find(ic.invocation_id)
            if invocation is None or invocation.nested:
                invocation = await self._starter.invocation_of(ic)
            guard, run, name, agent = self._guard, invocation.run, tool.name, ic.agent
            agent_name = agent.name if agent is not None else ""
            lane = lane_of(guard, invocation, ic.branch, ic.isolation_scope)
            call_id = tool_context.function_call_id or ""
            call = invocation.calls.get(call_id)
            if call is None:
                call = OpenToolCall(name, tool_args, lane, invocation.batches.get(lane, ""), agent=agent_name)
                invocation.remember(call_id, call)
            call.lane, call.running, call.task = lane, True, asyncio.current_task()
            if tool.is_long_running:
                invocation.ask([call_id])
            if name not in self._known_tools:
                self._learn_tool(tool)
            depth = depth_of(agent, invocation, lane) if isinstance(agent, BaseAgent) else invocation.depth
            here, path = HERE.get(), (*run.lanes[lane].path, agent_name)
            around = enclosing_of((guard, invocation, call_id, name, lane, depth, path, here.tool, here.stream))
            HERE.set(here_of((around, here.stream, here.layers, here.conditions, here.model_call)))
            if name in FRAMEWORK_TOOLS:
                return self._check_transfer(tool_args, ic, invocation, lane, agent_name) if name == TRANSFER else None
            call.fingerprint = guard.fingerprint(name, tool_args)
            below = 0
            if AgentTool in type(tool).__mro__:  # ``isinstance`` asks the metaclass
                below = depth + 1
                beside = sum(
                    1 for other in invocation.calls.values() if other.batch == call.batch and other.tool == name
                )
                # a stop shows at the next check
                guard.check(AgentEntered(run.info.run, lane, agent_name, guard.clock(), 0, beside))
            known = guard.tools.known
            rule = known[name] if name in known else guard.tool_rule(name)
            if rule is not None and rule.once:
                call.once = guard.tools.once_identity(name, tool_args, declared_by(tool))
            if guard.accounts.ledger.is_shared:
                await guard.prepare_tool(run, name, call.once, call_id)
            now, fingerprint = guard.clock(), call.fingerprint
            event = ToolCall(
                run.info.run, lane, agent_name, now, name, fingerprint, call.batch, call_id, below, call.once
            )
            decision = guard.check(event)
            if rule is not None and rule.price is not None and not (decision.action >= _BLOCK and decision.enforced):
                decision = await reserve_price(guard, invocation, tool, event, tool_args)
            if decision.action >= _BLOCK and decision.enforced:
                call.refused = True
                if decision.trip is not None:
                    announce(decision.trip, self._invocations)
                    # a Workflow's tool node has no model that would read the refusal
                    if not isinstance(agent, BaseAgent):
                        call.running = False
                        await self._stopper.at_tool_node(ic, name, decision.trip, invocation, lane)
                return refusal(decision.for_model)
            seconds = rule.max_seconds if rule is not None else None
            if guard.policy.max_seconds is not None or seconds is not None:
                self._limits_time = True
                limit_time(tool)
                call.deadline = guard.clock() + seconds if seconds is not None else 0.0
            return None
        except Exception as error:
            return refusal(STOPPED) if self._stopper.fault("before_tool", error, ic) is not None else None

    def _check_transfer(
        self, args: dict[str, Any], ic: InvocationContext, invocation: Invocation, lane: str, agent: str
    ) -> dict[str, Any] | None:
        """Refuse a hand-off that goes too deep, where the model can still read the refusal. Hand-off circles are
        judged on the event.
        """
        root = getattr(ic.agent, "root_agent", None)
        target = root.find_agent(args.get("agent_name")) if root is not None else None
        if target is None:
            return None
        event = AgentEntered(
            invocation.run.info.run, lane, agent, self._guard.clock(), depth_of(target, invocation, lane)
        )
        decision = self._guard.check(event)
        return refusal(decision.for_model) if decision.action >= _BLOCK and decision.enforced else None

    def _learn_tool(self, tool: BaseTool) -> None:
        """Declare the rule that ``@runguard.tool`` put beside the tool's code, once."""
        if len(self._known_tools) < _TOOLS_KEPT:
            self._known_tools.add(tool.name)
        rule = getattr(getattr(tool, "func", None), "__runguard_tool__", None) or getattr(
            tool, "__runguard_tool__", None
        )
        if rule is not None:
            self._guard.declare(tool.name, rule)

    def after(
        self, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, result: dict[str, Any]
    ) -> None:
        ic = tool_context._invocation_context
        try:
            if self._guard.tool_prices.is_used and (paying := self._invocations.find(ic.invocation_id)) is not None:
                settle_price(self._guard, paying, tool, tool_context, tool_args, result)
            if self._limits_time:
                self.judge_time()
            verdict = app_verdict(tool, tool_args, tool_context, result)
            if verdict is not None and (known := self._invocations.find(ic.invocation_id)) is not None:
                answered = known.calls.get(tool_context.function_call_id or "")
                if answered is not None and not answered.refused:
                    answered.verdict = verdict
            is_node = not isinstance(ic.agent, BaseAgent)
            if not tool.is_long_running and not is_node:
                return
            # A long-running tool's answer comes later or never, and a Workflow's tool node yields no function
            # response: the event reader will not see an answer.
            invocation = self._invocations.find(ic.invocation_id)
            call = invocation.calls.get(tool_context.function_call_id or "") if invocation is not None else None
            if invocation is None or call is None:
                return
            call.running = False
            if call.once and not call.refused and call.outcome is None and (not result or is_node):
                # What a long-running tool started counts as done: it must not start again.
                self._guard.settle_once(invocation.run, call.once, not is_node or was_done(result))
        except Exception as error:
            self._stopper.fault("after_tool", error, ic)

    def judge_time(self) -> None:
        """A call has returned. A sync tool that took too long shows only now."""
        tool = HERE.get().tool
        call = tool.invocation.calls.get(tool.call_id) if tool is not None and tool.guard is self._guard else None
        if tool is not None and call is not None and call.deadline and self._guard.clock() > call.deadline:
            timed_out(tool)

    def failed(self, tool: BaseTool, tool_context: ToolContext, error: BaseException) -> dict[str, Any] | None:
        """The tool raised an error. Returns the answer to its call where the run is stopped."""
        ic = tool_context._invocation_context
        try:
            call_id = tool_context.function_call_id or ""
            invocation = self._invocations.find(ic.invocation_id)
            call = invocation.calls.get(call_id) if invocation is not None else None
            if invocation is None or call is None:
                return None
            if invocation.run.bills is not None and type(tool) is not BaseTool:
                settle_price(self._guard, invocation, tool, tool_context, call.args, error)
            if isinstance(error, asyncio.CancelledError):
                call.running = False
                return None
            unknown = type(tool) is BaseTool
            call.outcome = _UNKNOWN_TOOL if unknown else _TIMEOUT if isinstance(error, TimeoutError) else _ERROR
            call.error = error_text(error)
            # a missing item is not a tool failure
            if call.outcome is not _UNKNOWN_TOOL and not says_missing(call.error):
                self._guard.report_failure(invocation.run, call.tool, call_id)
            if call.once and not isinstance(ic.agent, BaseAgent):  # a Workflow's tool node yields no function response
                self._guard.settle_once(invocation.run, call.once, False)
            if isinstance(tool, AgentTool) or isinstance(error, RunStoppedError):
                # It kept asking for a model, or the nested run was stopped and its empty answer does not fit a schema:
                # answer the call.
                return refusal(PART_STOPPED) if invocation.stop_in(call.lane) is not None else None
        except Exception as fault:
            self._stopper.fault("on_tool_error", fault, ic)
        return None


def error_text(error: BaseException) -> str:
    """An exception's type and text arguments, without running its ``__str__``."""
    words = " ".join(arg for arg in error.args if type(arg) is str)
    return f"{type(error).__name__}: {words}"
