"""RunGuard for Pydantic AI: ``Agent(model, capabilities=[RunGuard(max_usd=1.50)])``.

Pydantic AI calls the hooks of its capabilities. They ask ``calls/run`` before every model call and tool call.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, Unpack
from weakref import WeakValueDictionary

if find_spec("pydantic_ai") is None:
    raise ImportError("runguard.pydantic_ai needs pydantic-ai: pip install 'runguard-agents[pydantic-ai]'")

from pydantic_ai import DeferredToolRequests
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import (
    ApprovalRequired,
    CallDeferred,
    FallbackExceptionGroup,
    ModelRetry,
    SkipModelRequest,
    SkipToolExecution,
    ToolRetryError,
)
from pydantic_ai.messages import (
    BaseToolCallPart,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestContext
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.usage import RequestUsage

from runguard.calls.model_calls import ModelRequest as Asked
from runguard.calls.model_calls import Permission
from runguard.calls.run import AgentRun, Whom, asked_of, fitting, guard_of, last_words
from runguard.calls.tool_calls import RunTools, ToolUse
from runguard.core.decision import METADATA_KEY, Trip
from runguard.core.events import Outcome
from runguard.engine.guard import Controls
from runguard.policy.keywords import PolicySettings
from runguard.pricing.rates import Usage
from runguard.providers.usage import GrowingPrompts, name_of_tool, size_of, tokens_in
from runguard.termination.conditions import Ended, TerminationCondition

__all__ = ["RunGuard"]

_MESSAGE: Final = 4  # bytes around a message
# Older versions of Pydantic AI do not have this hook. There ``wrap_model_request`` sees what is sent.
_HAS_ATTEMPTS: Final = hasattr(AbstractCapability, "prepare_model_request")


class _Turn:
    """One run of an agent while it works: its ``AgentRun``, and the attempts at its newest model request."""

    __slots__ = ("__weakref__", "_making", "around", "attempts", "others", "run")

    def __init__(self, run: AgentRun, others: list[AgentRun]) -> None:
        """``others``: what other guards have begun for the same run of the agent."""
        self.run, self.others = run, others
        self.around = run.tools.around(run.agent)  # each node, one after another
        self.attempts: list[Permission] = []
        self._making: AbstractContextManager[None] | None = None  # around the newest attempt

    def __enter__(self) -> None:
        """Let ``begin`` and ``moves_on`` work in a block around a model request."""

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.__exit__(kind, None, None)

    def begin(self, permission: Permission) -> None:
        """Begin an attempt. It ends with the block, or with the next one."""
        self.attempts.append(permission)
        self._making = permission.in_flight()
        self._making.__enter__()

    def moves_on(self) -> None:
        """Book an estimate for the attempt so far: it has failed, or its answer was rejected. Another one follows."""
        self.__exit__()
        if self.attempts:
            self.attempts[-1].fail(None)

    def learn(self, failed: Sequence[Any]) -> Usage:
        """Book what attempts have really taken that did not give the answer.

        Returns what those took that no ``prepare_model_request`` was called for, which are those of a
        ``FallbackModel``.
        """
        earlier, total = self.attempts[:-1], Usage()
        for attempt in failed:
            used = _used(attempt)
            own = next((one for one in earlier if one.request.model == attempt.model_name), None)
            if own is not None:
                earlier.remove(own)
                if used is not None:
                    own.correct(used if used.input or used.output else None)
            else:
                used = used or Usage(self.attempts[-1].request.input_tokens)
                total = Usage(total.input + used.input, total.output + used.output)
        return total


# By what the contexts of a run share: the turn of the capability that has begun last.
_newest: Final[WeakValueDictionary[tuple[str | None, int], _Turn]] = WeakValueDictionary()


class RunGuard(Controls, AbstractCapability[Any]):
    """``Agent(model, capabilities=[RunGuard(max_usd=1.50)])``.

    The keywords are those of ``RunGuardPlugin``. A stop ends the run with a text; the response carries the trip in
    ``metadata["runguard"]``. A run with structured output cannot end with a text: there a stop raises
    ``RunStoppedError``, as ``on_stop="raise"`` does everywhere. Give the same instance to sub-agents: a sub-agent that
    a tool calls joins the run of its caller. A turn that waits for approvals goes on as the same run.
    """

    def __init__(
        self,
        *,
        app: str = "",
        user: str | Callable[[RunContext[Any]], str | None] = "",
        session: str | Callable[[RunContext[Any]], str | None] = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app``, ``user`` and ``session``: whom budgets per app, per user and per session are for.

        ``user`` and ``session`` may be functions of the ``RunContext``. ``with runguard.run(user=…)`` around a run wins
        over both. ``termination_condition`` ends a run, of the first agent that has this capability, when it fires.
        """
        self._whom = Whom(app, user, session)
        self.id, self.description, self.defer_loading = None, None, False
        self.guard = guard_of(policy, gives_last_answers=True)
        self._condition = fitting(termination_condition, "Pydantic AI", has_hand_offs=False)
        self._is_off = self.guard.policy.mode == "off"
        # A copy of this capability per run would make Pydantic AI resolve the model twice. The frame of ``wrap_run``
        # holds the value, so a run that is dropped leaves nothing here.
        self._turns: WeakValueDictionary[tuple[str | None, int], _Turn] = WeakValueDictionary()

    def bill(self, ctx: RunContext[Any]) -> dict[str, Any]:
        """Return what the run of this context has used so far, as ``{"runguard": {"run", "usd", "tokens", …}}``.

        ``Agent(…, metadata=guard.bill)`` puts it into the ``metadata`` of each result.
        """
        turn = self._turn(ctx)
        spent = None if turn is None else self.guard.faults.attempt("adapter", lambda: turn.run.spent.to_dict())
        return {} if spent is None else {METADATA_KEY: spent}

    def _turn(self, ctx: RunContext[Any]) -> _Turn | None:
        # what all contexts of a run share; its id alone is not enough, as an app can take that from a client
        return self._turns.get((ctx.run_id, id(ctx.usage)))

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Any) -> Any:
        if self._is_off:
            return await handler()
        name = (ctx.agent.name if ctx.agent is not None else None) or "agent"
        whom = self._whom.of(self.guard, ctx)
        waiting = self.guard.faults.attempt("adapter", _unanswered, ctx.messages) or {}
        if not waiting:
            whom |= asked_of(self.guard, name, ctx.prompt, goes_on=bool(ctx.messages))
        key, others = (ctx.run_id, id(ctx.usage)), list[AgentRun]()
        if (around := _newest.get(key)) is not None:
            others = [*around.others, around.run]
        run = await AgentRun.resume(self.guard, name, list(waiting), condition=self._condition, others=others, **whom)
        run.tools.asked_for(list(waiting.values()))
        turn = self._turns[key] = _newest[key] = _Turn(run, others)
        try:
            run.enter()  # a stop is in force from now on: the first model request meets it
            result = await handler()
            if isinstance(result.output, DeferredToolRequests):
                run.pause([call.tool_call_id for call in (*result.output.approvals, *result.output.calls)])
            return result
        finally:
            if self._turn(ctx) is turn:
                del self._turns[key]
            run.end()

    @property
    def has_wrap_node_run(self) -> bool:
        """Older versions warn of this hook where a program iterates over the nodes. It need not run there."""
        return False

    async def wrap_node_run(self, ctx: RunContext[Any], *, node: Any, handler: Any) -> Any:
        """Let agents that instructions, validators and other hooks start join the run."""
        turn = self._turn(ctx)
        if turn is None:
            return await handler(node)
        with turn.around:
            return await handler(node)

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def wrap_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, handler: Any
    ) -> ModelResponse:
        turn = self._turn(ctx)
        if turn is None:
            return await handler(request_context)  # type: ignore[no-any-return]
        self.guard.faults.attempt("adapter", _show_unchecked, turn.run.tools, ctx.messages, request_context)
        turn.attempts = []
        try:
            if not _HAS_ATTEMPTS:
                request_context = await self.prepare_model_request(ctx, request_context)
            with turn:
                response: ModelResponse = await handler(request_context)
        except BaseException as error:
            if not turn.attempts:
                raise
            permission = turn.attempts[-1]
            if isinstance(error, SkipModelRequest) and error.__context__ is None:
                permission.release()  # another capability answered: nothing was sent
            else:
                permission.fail(error, streaming=request_context.streaming)
                if isinstance(error, FallbackExceptionGroup):
                    self.guard.faults.attempt("adapter", turn.learn, getattr(error, "attempts", ()))
            if (trip := permission.interrupted) is not None:
                raise self._stop(trip, request_context) from None
            raise
        if turn.attempts:
            turn.attempts[-1].read(partial(_settle, turn), response)
        return response

    async def prepare_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        """Ask for one attempt at a request. Only here does the request have what other capabilities put into it."""
        turn = self._turn(ctx)
        if turn is None:
            return request_context
        turn.moves_on()
        permission = await turn.run.ask(partial(_asked, turn.run.prompts, request_context))
        if not isinstance(permission, Permission):
            raise self._stop(permission, request_context)
        turn.begin(permission)
        return permission.changed(_changed, request_context)

    def _stop(self, end: Trip | Ended, request: ModelRequestContext) -> SkipModelRequest:
        text = TextPart(last_words(self.guard, end, takes_text=_takes_text(request)))
        return SkipModelRequest(ModelResponse([text], metadata={METADATA_KEY: end.to_dict()}))

    # ---- tool calls -------------------------------------------------------------------------------------------------

    async def wrap_tool_execute(
        self, ctx: RunContext[Any], *, call: ToolCallPart, tool_def: ToolDefinition, args: Any, handler: Any
    ) -> Any:
        turn = self._turn(ctx)
        if turn is None:
            return await handler(args)
        tools, use = turn.run.tools, _use_of(call)
        refusal = await tools.check(use)
        if refusal is not None:
            raise SkipToolExecution(refusal)
        try:
            with tools.inside(use):
                result = await handler(args)
        except (ApprovalRequired, CallDeferred):
            tools.deferred(use)
            raise
        except SkipToolExecution:  # another capability answered
            tools.skipped(use)
            raise
        except (ToolRetryError, ModelRetry) as error:
            if _timed_out(error):
                tools.raised(use, TimeoutError(_words(error)))
            else:
                tools.answered(use, _words(error), Outcome.ERROR)
            raise
        except BaseException as error:
            tools.raised(use, error)
            raise
        note = tools.answered(use, result)
        return result if note is None else note


# ---- Answers of tools that no hook sees.


def _unanswered(messages: Sequence[ModelMessage]) -> dict[str, ToolUse]:
    """Return the calls of the newest answer that have no result, by their ids: what a paused turn waits for."""
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
            return {call.tool_call_id: _use_of(call) for call in calls if call.tool_call_id not in answered}
        answered |= {getattr(part, "tool_call_id", "") for part in message.parts}
    return {}


def _show_unchecked(tools: RunTools, messages: Sequence[ModelMessage], request: ModelRequestContext) -> None:
    """Show the rules the answers of calls that were not executed here: by an unknown name, with arguments that do not
    validate, or executed elsewhere.
    """
    calls, parameters = tools.unchecked, request.model_request_parameters
    if not calls:
        return
    known = {tool.name for tool in parameters.function_tools}
    outputs = {tool.name for tool in parameters.output_tools}
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            break
        parts: Sequence[Any] = message.parts
        for part in parts:
            use = calls.get(getattr(part, "tool_call_id", ""))
            outcome = getattr(part, "outcome", "retried")
            if use is None or use.tool in outputs or outcome in ("denied", "interrupted"):
                continue
            if outcome == "retried":
                tools.saw(use, _why(part), Outcome.ERROR if use.tool in known else Outcome.UNKNOWN_TOOL, executed=False)
            else:
                tools.saw(use, part.content, Outcome.FAILED if outcome == "failed" else None)


def _why(part: Any) -> Any:
    """Return what was wrong, without the arguments that differ each time: a text, or what an older tool gave."""
    if not isinstance(part.content, list):
        return part.content
    faults = [fault for fault in part.content if isinstance(fault, dict) and "msg" in fault]
    return "; ".join(f"{'.'.join(map(str, fault.get('loc', ())))}: {fault['msg']}" for fault in faults) or part.content


def _words(error: ToolRetryError | ModelRetry) -> Any:
    return error.message if isinstance(error, ModelRetry) else _why(error.tool_retry)


def _timed_out(error: BaseException) -> bool:
    """Whether the tool exceeded its ``timeout=``, which Pydantic AI reports as a retry."""
    cause = error if isinstance(error, ModelRetry) else error.__cause__
    return isinstance(getattr(cause, "__context__", None), TimeoutError)


# ---- Requests and answers of models.


def _settle(turn: _Turn, permission: Permission, response: ModelResponse) -> None:
    usage, model = _usage_of(response.usage), response.model_name or ""
    failed = turn.learn(getattr(response, "failed_attempts", None) or ())
    if failed.input or failed.output:  # at the price of the most expensive model that was asked
        usage = usage or Usage(permission.request.input_tokens, tokens_in(size_of(response.parts)))
        usage = replace(usage, input=usage.input + failed.input, output=usage.output + failed.output)
        model = ""
    permission.settle(
        usage,
        model=model,
        calls=[_use_of(part) for part in response.parts if isinstance(part, ToolCallPart)],
        text="".join(part.content for part in response.parts if isinstance(part, TextPart)),
        size=partial(size_of, response.parts),
        answer=response.provider_response_id or "",
    )


def _used(attempt: Any) -> Usage | None:
    """Return what a failed attempt took, or None if unknown. An error with a status was not billed."""
    if attempt.usage is not None:
        return _usage_of(attempt.usage)
    return Usage() if "status_code:" in (attempt.error or "") else None


def _changed(permission: Permission, request: ModelRequestContext) -> ModelRequestContext:
    """Return the request with a notice, without withheld tools, and with the output limit that a budget can pay."""
    if permission.notice:
        notice = ModelRequest(parts=[UserPromptPart(permission.notice)])
        request = replace(request, messages=[*request.messages, notice])
    if permission.last_after is not None or permission.withheld:
        tools: list[ToolDefinition] = []
        if permission.last_after is None:
            choice: Any = (request.model_settings or {}).get("tool_choice")
            offered = request.model_request_parameters.function_tools
            tools = permission.left(offered, name_of_tool, getattr(choice, "function_tools", choice))
        parameters = replace(request.model_request_parameters, function_tools=tools)
        request = replace(request, model_request_parameters=parameters)
    if (limit := permission.max_output_tokens) is not None:
        settings: Any = {**(request.model_settings or {}), "max_tokens": limit}
        request = replace(request, model_settings=settings)
    return request


_PASSED_ON: Final = {  # settings, and how a request to the provider names them
    "extra_body": "extra_body",
    "openai_conversation_id": "conversation",
    "openai_previous_response_id": "previous_response_id",
    "google_cached_content": "cached_content",
}


def _asked(prompts: GrowingPrompts, request: ModelRequestContext) -> Asked:
    """Return what is sent."""
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
    settings = request.model_settings or {}
    limit = settings.get("max_tokens")
    options = {name: value for key, name in _PASSED_ON.items() if (value := settings.get(key)) and value != "auto"}
    around = len(messages) * _MESSAGE
    model, *others = _candidates(request.model)
    limit = limit if isinstance(limit, int) else None
    measured = prompts.measure(messages, _said)
    tools = [tool.name for tool in parameters.function_tools]
    return Asked.of(
        *(model, prompt, limit, around),
        counts=request,
        others=others,
        measured=measured,
        options=options,
        tools=tools,
    )


def _said(message: ModelMessage) -> list[Any]:
    """Return what a message adds to a prompt."""
    found: list[Any] = []
    for part in message.parts:
        if isinstance(part, BaseToolCallPart):
            found += (part.tool_name, part.args)
        else:
            found.append(getattr(part, "content", part))
    return found


def _candidates(model: Model) -> list[str]:
    """Return the models that may answer: several for a ``FallbackModel``."""
    while isinstance(model, WrapperModel):
        model = model.wrapped
    if isinstance(model, FallbackModel):
        return [name for one in model.models for name in _candidates(one)]
    return [model.model_name]


def _use_of(call: ToolCallPart) -> ToolUse:
    return ToolUse(call.tool_call_id, call.tool_name, call.args_as_dict(raise_if_invalid=False))


def _usage_of(usage: RequestUsage) -> Usage | None:
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
        cache_write_1h=sum(usage.details.get(f"{part}ephemeral_1h_input_tokens", 0) for part in ("", "compaction_")),
    )


def _takes_text(request: ModelRequestContext) -> bool:
    """Whether a text can be the result of the run. With structured output alone it cannot."""
    parameters = request.model_request_parameters
    return parameters.allow_text_output and parameters.output_mode in ("text", "tool")
