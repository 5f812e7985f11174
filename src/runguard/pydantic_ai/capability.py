"""``RunGuard``: a capability that guards the runs of a Pydantic AI agent.

Pydantic AI calls its hooks. They ask ``calls/run`` before every model call and tool call.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Final, Unpack
from weakref import WeakValueDictionary

from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import (
    ApprovalRequired,
    CallDeferred,
    ModelRetry,
    SkipModelRequest,
    SkipToolExecution,
    ToolRetryError,
)
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolCallPart, UserPromptPart
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.tools import RunContext, ToolDefinition

from runguard.calls.model_calls import ModelRequest as Asked
from runguard.calls.model_calls import Permission, count_tokens
from runguard.calls.run import AgentRun, check_whom, error_of, fitting
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import METADATA_KEY, Trip
from runguard.core.errors import RunStoppedError
from runguard.engine.guard import Controls, Guard
from runguard.policy.settings import Policy, PolicySettings
from runguard.pricing.rates import Usage
from runguard.providers.usage import size_of
from runguard.termination.conditions import Ended, TerminationCondition

_MESSAGE: Final = 4  # bytes around a message
# The tool was not executed, or it will be called again: neither is an answer.
_NOT_ANSWERED: Final = (ApprovalRequired, CallDeferred, SkipToolExecution)


class RunGuard(Controls, AbstractCapability[Any]):
    """``Agent(model, capabilities=[RunGuard(max_usd=1.50)])``.

    The keywords are those of ``RunGuardPlugin``. A stop ends the run with a text; the response carries the trip in
    ``metadata["runguard"]``. A run with structured output cannot end with a text: there a stop raises
    ``RunStoppedError``, as ``on_stop="raise"`` does everywhere. Give the same instance to sub-agents: a sub-agent that
    a tool calls joins the run of its caller.
    """

    def __init__(
        self,
        *,
        app: str = "",
        user: str = "",
        session: str = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app``, ``user`` and ``session``: whom budgets per app, per user and per session are for.

        ``termination_condition`` ends a run, of the first agent that has this capability, when it fires.
        """
        check_whom(app=app, user=user, session=session)
        self.id, self.description, self.defer_loading = None, None, False
        self.guard = Guard(Policy.build(**policy), gives_last_answers=True)
        self.guard.check_store()
        condition = fitting(termination_condition, "Pydantic AI", has_hand_offs=False)
        self._whom: dict[str, Any] = {"app": app, "user": user, "session": session, "condition": condition}
        self._is_off = self.guard.policy.mode == "off"
        # By the id of the run. A copy of this capability per run would make Pydantic AI resolve the model twice. The
        # frame of ``wrap_run`` holds the value, so a run that is dropped leaves nothing here.
        self._runs: WeakValueDictionary[str | None, AgentRun] = WeakValueDictionary()

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Any) -> Any:
        if self._is_off:
            return await handler()
        name = (ctx.agent.name if ctx.agent is not None else None) or "agent"
        self._runs[ctx.run_id] = run = AgentRun.start(self.guard, name, **self._whom)
        try:
            if (trip := run.enter()) is not None:
                raise RunStoppedError.of(trip)
            return await handler()
        finally:
            self._runs.pop(ctx.run_id, None)
            run.end()

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def wrap_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, handler: Any
    ) -> ModelResponse:
        run = self._runs.get(ctx.run_id)
        if run is None:
            return await handler(request_context)  # type: ignore[no-any-return]
        counter = self.guard.policy.tokens
        counted = None if counter is None else await count_tokens(counter, request_context)
        permission = await run.ask(partial(_asked, request_context, counted))
        if not isinstance(permission, Permission):
            raise self._stop(permission, request_context)
        request_context = permission.changed(_changed, request_context)
        try:
            response: ModelResponse = await permission.during(handler(request_context))
        except BaseException as error:
            if isinstance(error, SkipModelRequest):  # another capability answered
                permission.release()
            else:
                permission.fail(error, streaming=request_context.streaming)
            if (trip := permission.interrupted) is not None:
                raise self._stop(trip, request_context) from None
            raise
        permission.read(_settle, response)
        return response

    def _stop(self, end: Trip | Ended, request: ModelRequestContext) -> Exception:
        is_trip = isinstance(end, Trip)
        if (is_trip and self.guard.policy.on_stop == "raise") or not _takes_text(request):
            return error_of(end)
        text = TextPart(self.guard.stop_text(end) if isinstance(end, Trip) else end.reason)
        return SkipModelRequest(ModelResponse([text], metadata={METADATA_KEY: end.to_dict()}))

    # ---- tool calls -------------------------------------------------------------------------------------------------

    async def wrap_tool_execute(
        self, ctx: RunContext[Any], *, call: ToolCallPart, tool_def: ToolDefinition, args: Any, handler: Any
    ) -> Any:
        run = self._runs.get(ctx.run_id)
        if run is None:
            return await handler(args)
        use = _use_of(call)
        refusal = await run.tools.check(use)
        if refusal is not None:
            raise SkipToolExecution(refusal)
        try:
            with run.tools.inside(use):
                result = await handler(args)
        except _NOT_ANSWERED:
            raise
        except ToolRetryError as error:
            run.tools.answered(use, error.tool_retry.content)
            raise
        except ModelRetry as error:
            run.tools.answered(use, error.message)
            raise
        except BaseException as error:
            run.tools.raised(use, error)
            raise
        note = run.tools.answered(use, result)
        return result if note is None else note


def _settle(permission: Permission, response: ModelResponse) -> None:
    permission.settle(
        _usage_of(response),
        model=response.model_name or "",
        calls=[_use_of(part) for part in response.parts if isinstance(part, ToolCallPart)],
        text="".join(part.content for part in response.parts if isinstance(part, TextPart)),
        size=size_of(response.parts),
    )


def _changed(permission: Permission, request: ModelRequestContext) -> ModelRequestContext:
    """The request with a notice for the model, and with the output limit that the budget can pay."""
    if permission.notice:
        notice = ModelRequest(parts=[UserPromptPart(permission.notice)])
        request = replace(request, messages=[*request.messages, notice])
    if permission.last_after is not None:
        parameters = replace(request.model_request_parameters, function_tools=[])
        request = replace(request, model_request_parameters=parameters)
    if (limit := permission.max_output_tokens) is not None:
        settings: Any = {**(request.model_settings or {}), "max_tokens": limit}
        request = replace(request, model_settings=settings)
    return request


def _asked(request: ModelRequestContext, counted: int | None = None) -> Asked:
    """What is sent. ``counted``: its tokens, by the user's own counter."""
    parameters, messages = request.model_request_parameters, request.messages
    declared, schema = [*parameters.function_tools], parameters.output_object
    if parameters.output_mode not in ("native", "prompted") and parameters.output_tools:
        declared += parameters.output_tools
        schema = None  # the output tools carry it
    prompt: list[Any] = [[[tool.name, tool.description, tool.parameters_json_schema] for tool in declared]]
    if schema is not None:
        prompt.append([schema.name, schema.description, schema.json_schema])
    if parameters.instruction_parts:  # the last message repeats them
        prompt += [part.content for part in parameters.instruction_parts]
    else:
        asked = (message for message in reversed(messages) if isinstance(message, ModelRequest))
        if (newest := next(asked, None)) is not None and newest.instructions:
            prompt.append(newest.instructions)
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                prompt += (part.tool_name, part.args)
            else:
                prompt.append(getattr(part, "content", None))
    limit = (request.model_settings or {}).get("max_tokens")
    around = len(messages) * _MESSAGE
    asked_for = Asked.of(request.model.model_name, prompt, limit if isinstance(limit, int) else None, around)
    return asked_for if counted is None else replace(asked_for, input_tokens=counted, likely_tokens=counted)


def _use_of(call: ToolCallPart) -> ToolUse:
    return ToolUse(call.tool_call_id, call.tool_name, call.args_as_dict(raise_if_invalid=False))


def _usage_of(response: ModelResponse) -> Usage | None:
    usage = response.usage
    if not usage.input_tokens and not usage.output_tokens:
        return None
    return Usage(
        input=usage.input_tokens,
        output=usage.output_tokens,
        cached=usage.cache_read_tokens,
        cache_write=usage.cache_write_tokens,
        audio=usage.input_audio_tokens,
        cached_audio=usage.cache_audio_read_tokens,
        thinking=usage.details.get("reasoning_tokens", 0),
    )


def _takes_text(request: ModelRequestContext) -> bool:
    """Whether a text can be the result of the run. With structured output alone it cannot."""
    parameters = request.model_request_parameters
    return parameters.allow_text_output and parameters.output_mode in ("text", "tool")
