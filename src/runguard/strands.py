"""RunGuard for Strands Agents: ``Agent(plugins=[RunGuard(max_usd=1.50)])``.

Strands calls its hooks and middleware. They ask ``calls/run`` before every model call and tool call.
"""

import copy
from collections.abc import AsyncGenerator, Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, Unpack

if find_spec("strands") is None:
    raise ImportError("runguard.strands needs strands-agents: pip install 'runguard-agents[strands]'")

from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, BeforeInvocationEvent
from strands.middleware import ExecuteToolStage, InvokeModelStage
from strands.plugins import Plugin
from strands.tools.decorator import DecoratedFunctionTool
from strands.types.events import ModelStopReason, ToolResultEvent

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, Whom, asked_of, fitting, guard_of, last_words
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import METADATA_KEY, Trip
from runguard.core.events import Outcome
from runguard.engine.guard import Controls
from runguard.policy.keywords import PolicySettings
from runguard.pricing.rates import Usage
from runguard.providers.messages import read_options
from runguard.providers.usage import GrowingPrompts, name_of_tool, size_of
from runguard.termination.conditions import Ended, TerminationCondition

__all__ = ["RunGuard"]

_RUNS: Final = "runguard_runs"  # in the state of an invocation: the run of each agent that shares it, by guard
# Where the models of Strands keep their output limit, by the module of their class.
_LIMITS: Final = {
    "strands.models.anthropic": ("max_tokens",),
    "strands.models.bedrock": ("max_tokens",),
    "strands.models.gemini": ("params", "max_output_tokens"),
    "strands.models.litellm": ("params", "max_tokens"),
    "strands.models.mistral": ("max_tokens",),
    "strands.models.ollama": ("max_tokens",),
    "strands.models.openai": ("params", "max_tokens"),
    "strands.models.openai_responses": ("params", "max_output_tokens"),
}


class RunGuard(Controls, Plugin):
    """``Agent(model=…, plugins=[RunGuard(max_usd=1.50)])``.

    The keywords are those of ``RunGuardPlugin``. A stop ends the agent with a text; the message carries the trip in
    ``metadata["custom"]["runguard"]``. ``result.state["runguard"]`` is the bill of the run. With structured output, or
    with ``on_stop="raise"``, Strands raises an ``EventLoopException`` whose ``original_exception`` is the typed error.
    Give the same instance to sub-agents: a sub-agent that a tool calls joins the run of its caller.
    """

    name = "runguard"

    def __init__(
        self,
        *,
        app: str = "",
        user: str | Callable[[Any], str] = "",
        session: str | Callable[[Any], str] = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app``, ``user`` and ``session``: whom budgets per app, per user and per session are for.

        ``user`` and ``session`` may be functions of the state of an invocation. ``termination_condition`` ends a run,
        of the first agent that has this plugin, when it fires.
        """
        Plugin.__init__(self)
        self._whom = Whom(app, user, session)
        self.guard = guard_of(policy, gives_last_answers=True)
        self._condition = fitting(termination_condition, "Strands", has_hand_offs=False)
        self._last_messages: dict[int, tuple[Any, Any]] = {}  # by agent: the message that ends it, and why

    def init_agent(self, agent: Any) -> None:
        if self.guard.policy.mode == "off":
            return
        agent.add_hook(self._begin, BeforeInvocationEvent)
        agent.add_hook(self._finish, AfterInvocationEvent)
        agent.add_hook(self._explain, AfterModelCallEvent)
        agent.add_middleware(InvokeModelStage, self._model)
        agent.add_middleware(ExecuteToolStage, self._tool)

    # ---- the agent's run --------------------------------------------------------------------------------------------

    async def _begin(self, event: BeforeInvocationEvent) -> None:
        whom = self._whom.of(self.guard, event.invocation_state)
        waiting = _waiting_calls(event.agent)
        if not waiting:
            asked = [block.get("text") for message in event.messages or () for block in message["content"]]
            whom |= asked_of(self.guard, event.agent.name, asked, goes_on=bool(event.agent.messages))
        runs = event.invocation_state.setdefault(_RUNS, {})
        whom["others"] = [run for (_, agent), run in runs.items() if agent == id(event.agent)]
        run = await AgentRun.resume(self.guard, event.agent.name, waiting, condition=self._condition, **whom)
        runs[id(self), id(event.agent)] = run
        if (trip := run.enter()) is not None:
            event.cancel = self.guard.stop_text(trip)

    async def _finish(self, event: AfterInvocationEvent) -> None:
        runs = event.invocation_state.get(_RUNS, {})
        run = runs.pop((id(self), id(event.agent)), None)
        if run is None:
            return
        if not runs:
            event.invocation_state.pop(_RUNS, None)
        result = event.result
        if result is not None and isinstance(result.state, dict):
            result.state[METADATA_KEY] = run.spent.to_dict()
        if result is not None and result.stop_reason == "interrupt":
            run.pause(_waiting_calls(event.agent))
        else:
            run.end()

    def _explain(self, event: AfterModelCallEvent) -> None:
        """Put the reason of a stop into its message. Strands has replaced the metadata that the message came with."""
        message, about = self._last_messages.pop(id(event.agent), (None, None))
        if event.stop_response is not None and event.stop_response.message is message:
            event.stop_response.message["metadata"]["custom"] = about

    def _run_of(self, context: Any) -> AgentRun | None:
        """Return the run of the agent that a middleware works for. Nodes of a graph share one state."""
        run: AgentRun | None = context.invocation_state.get(_RUNS, {}).get((id(self), id(context.agent)))
        return run

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def _model(self, context: Any, next_fn: Any) -> AsyncGenerator[Any, None]:
        if (run := self._run_of(context)) is None:
            async for event in next_fn(context):
                yield event
            return
        reply = await run.ask(lambda: _asked(run.prompts, context))
        if not isinstance(reply, Permission):
            yield self._last(reply, context)
            return
        asked, streamed = reply.changed(_changed, context), 0
        try:
            async for event in reply.pieces(next_fn(asked)):
                if isinstance(event, ModelStopReason):
                    reply.read(_settle, event)
                else:
                    streamed += len(str(event.get("data", "")).encode())
                yield event
        except BaseException as error:
            reply.fail(error, streamed, streaming=True)
            if (end := reply.interrupted) is None:
                raise
            yield self._last(end, context)
        else:
            reply.fail(None, streamed, streaming=True)  # it ended without its last event
            if (end := reply.interrupted) is not None:
                yield self._last(end, context)

    def _last(self, end: Trip | Ended, context: Any) -> ModelStopReason:
        """End the agent with a text. With structured output no text can end it, so the typed error is raised."""
        words = last_words(self.guard, end, takes_text=context.structured_output_model is None)
        message: Any = {
            "role": "assistant",
            "content": [{"text": words}],
            "metadata": {"custom": {METADATA_KEY: end.to_dict()}},
        }
        self._last_messages[id(context.agent)] = message, message["metadata"]["custom"]
        return ModelStopReason(
            "end_turn", message, {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}, {"latencyMs": 0}
        )

    # ---- tool calls -------------------------------------------------------------------------------------------------

    async def _tool(self, context: Any, next_fn: Any) -> AsyncGenerator[Any, None]:
        if (run := self._run_of(context)) is None:
            async for event in next_fn(context):
                yield event
            return
        asked = context.tool_use
        use = ToolUse(asked["toolUseId"], asked["name"], asked["input"], _received_by(context.tool))
        if context.tool is None:  # no tool of this name: what Strands answers is the answer
            async for event in next_fn(context):
                if isinstance(event, ToolResultEvent):
                    run.tools.saw(use, _value_of(event), Outcome.UNKNOWN_TOOL)
                yield event
            return
        if (refusal := await run.tools.check(use)) is not None:
            yield ToolResultEvent({"toolUseId": use.id, "status": "error", "content": [{"text": refusal}]})
            return
        try:
            events = next_fn(context)
            while True:
                with run.tools.inside(use):  # not around a yield: what the caller does is not part of the tool
                    event = await anext(events, None)
                if event is None:
                    break
                yield _answered(run, use, event)
        except BaseException as error:
            if type(error).__name__ == "InterruptException":
                run.tools.deferred(use)
            elif not isinstance(error, GeneratorExit):
                run.tools.raised(use, error)
            raise


def _waiting_calls(agent: Any) -> list[str]:
    """Return the ids of the tool calls that the agent's history ends with: they have no answer yet."""
    last = agent.messages[-1] if agent.messages else {}
    blocks = last.get("content", ()) if last.get("role") == "assistant" else ()
    return [block["toolUse"]["toolUseId"] for block in blocks if "toolUse" in block]


def _asked(prompts: GrowingPrompts, context: Any) -> ModelRequest:
    measured = prompts.measure(context.messages, lambda message: [message["content"]])
    config: Any = context.model.get_config() or {}
    place = _limit_place(context.model)
    held: Any = config
    for name in place[:-1]:
        held = held.get(name) or {}
    limit = held.get(place[-1]) if place else config.get("max_tokens")
    asked = ModelRequest.of(
        str(config.get("model_id") or ""),
        [context.system_prompt, context.tool_specs],
        limit if isinstance(limit, int) else None,
        counts=context,
        measured=measured,
        tools=[name_of_tool(spec) for spec in context.tool_specs or ()],
    )
    asked.fixed_output, asked.candidates = not place, read_options({"body": config.get("params")}).candidates
    return asked


def _limit_place(model: Any) -> tuple[str, ...]:
    """Return where a model keeps its output limit; nothing where that is not known."""
    if not isinstance(getattr(model, "config", None), dict):
        return ()
    return next((_LIMITS[kind.__module__] for kind in type(model).__mro__ if kind.__module__ in _LIMITS), ())


def _changed(permission: Permission, context: Any) -> Any:
    """Return the request with a notice, without withheld tools, and with the output limit that a budget can pay."""
    if permission.notice:  # roles alternate: the notice joins the last message of the user
        *before, last = context.messages
        context = context.replace(
            messages=[*before, {**last, "content": [*last["content"], {"text": permission.notice}]}]
        )
    if permission.withheld:
        context = context.replace(
            tool_specs=permission.left(context.tool_specs or (), name_of_tool, context.tool_choice)
        )
    if permission.last_after is not None:
        context = context.replace(tool_specs=[], tool_choice=None)
    limit, place = permission.max_output_tokens, _limit_place(context.model)
    if limit is not None and place:
        model = copy.copy(context.model)
        model.config = config = dict(model.config)
        for name in place[:-1]:
            config[name] = config = dict(config.get(name) or {})
        config[place[-1]] = limit
        context = context.replace(model=model)
    return context


def _settle(permission: Permission, event: ModelStopReason) -> None:
    used, message = event.usage, event.message
    if METADATA_KEY in ((message.get("metadata") or {}).get("custom") or {}):  # another guard refused: nothing was sent
        permission.release()
        return
    content: list[Any] = message["content"]
    usage = None
    if used.get("inputTokens") or used.get("outputTokens"):
        usage = Usage(
            input=used.get("inputTokens") or 0,
            output=used.get("outputTokens") or 0,
            cached=used.get("cacheReadInputTokens") or 0,
            cache_write=used.get("cacheWriteInputTokens") or 0,
        )
    calls = [block["toolUse"] for block in content if "toolUse" in block]
    permission.settle(
        usage,
        calls=[ToolUse(call["toolUseId"], call["name"], call["input"]) for call in calls],
        text="".join(block.get("text", "") for block in content),
        size=partial(size_of, content),
    )


def _value_of(event: ToolResultEvent) -> object:
    content: list[Any] = event.tool_result["content"]
    value = content[0].get("json", content[0].get("text")) if len(content) == 1 else content
    return {"error": value} if event.tool_result["status"] == "error" else value


def _answered(run: AgentRun, use: ToolUse, event: Any) -> Any:
    """Show the rules what a tool has answered. Return what the model sees."""
    if not isinstance(event, ToolResultEvent):
        if getattr(event, "interrupts", None):
            run.tools.deferred(use)
        return event
    if event.exception is not None:
        run.tools.raised(use, event.exception)
        return event
    note = run.tools.answered(use, _value_of(event))
    if note is None:
        return event
    return ToolResultEvent({**event.tool_result, "content": [{"text": note}]})


def _received_by(tool: object) -> frozenset[str] | None:
    """Return the names of the arguments that Strands passes on to a tool; None where it passes any."""
    if not isinstance(tool, DecoratedFunctionTool):
        return None
    return frozenset(tool.tool_spec["inputSchema"]["json"].get("properties", ()))
