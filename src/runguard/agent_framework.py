"""RunGuard for Microsoft Agent Framework: ``Agent(client, middleware=[RunGuard(max_usd=1.50)])``.

Agent Framework calls its middleware around every run of an agent, every model call and every tool call. The middleware
here asks ``calls/run`` for permission.
"""

import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Final, Unpack

if find_spec("agent_framework") is None:
    raise ImportError(
        "runguard.agent_framework needs agent-framework-core: pip install 'runguard-agents[agent-framework]'"
    )

from agent_framework import (
    AgentContext,
    ChatContext,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationContext,
    Message,
    MiddlewareBundle,
    ResponseStream,
)
from agent_framework.exceptions import UserInputRequiredException

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, Whom, asked_of, fitting, guard_of, last_words
from runguard.calls.tool_calls import RunTools, ToolUse, current_place
from runguard.core.decision import METADATA_KEY, Trip
from runguard.core.events import Outcome
from runguard.engine.guard import Controls
from runguard.policy.keywords import PolicySettings
from runguard.providers.usage import GrowingPrompts, name_of_tool, read_usage, size_of
from runguard.termination.conditions import Ended, TerminationCondition

__all__ = ["RunGuard"]

_RUN: Final[ContextVar[AgentRun | None]] = ContextVar("runguard_agent_framework", default=None)
_Next = Callable[[], Awaitable[None]]

with warnings.catch_warnings():  # bundles are announced with the experimental hooks for agents, which are not used here
    warnings.filterwarnings("ignore", r"\[AGENT_HOOKS\]")

    class _Bundle(MiddlewareBundle):
        pass


class RunGuard(Controls, _Bundle):
    """``Agent(client, middleware=[RunGuard(max_usd=1.50)])``.

    The keywords are those of ``RunGuardPlugin``. A stop ends the agent with a text; its message carries the trip in
    ``additional_properties["runguard"]``. ``response.additional_properties["runguard"]`` is the bill of the run. With a
    ``response_format``, or with ``on_stop="raise"``, the typed error is raised.
    Give the same instance to sub-agents: a sub-agent that a tool calls joins the run of its caller.
    """

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

        ``user`` and ``session`` may be functions of the ``AgentContext``. Without ``session``, the id of the agent's
        session counts. ``termination_condition`` ends a run, of the first agent that has this guard, when it fires.
        """
        self._whom = Whom(app, user, session)
        self.guard = guard_of(policy, gives_last_answers=True)
        self._condition = fitting(termination_condition, "Agent Framework", has_hand_offs=False)
        is_off = self.guard.policy.mode == "off"
        _Bundle.__init__(self, [] if is_off else [self._turn, self._model_call, self._tool_call])

    # ---- the agent's run --------------------------------------------------------------------------------------------

    async def _turn(self, context: AgentContext, call_next: _Next) -> None:
        run = await self._begun(context)
        try:
            run.enter()  # a stop is in force from now on: the first model call meets it
            with _at_work(run):
                await call_next()
        except BaseException:
            run.end()
            raise
        if isinstance(context.result, ResponseStream):
            context.result = _stream(_turn_pieces(run, context.result), context.result.get_final_response)
        else:
            _leave(run, context.result)

    async def _begun(self, context: AgentContext) -> AgentRun:
        name, session = context.agent.name or "agent", context.session
        whom = self._whom.of(self.guard, context, session=session.session_id if session is not None else "")
        contents = [content for message in context.messages for content in message.contents]
        waiting = [one.function_call.call_id for one in contents if one.function_call is not None]
        if not waiting:
            goes_on = session is not None and bool(session.state or session.service_session_id)
            whom |= asked_of(self.guard, name, [one.text for one in contents], goes_on=goes_on)
        keys = [call_id for call_id in waiting if call_id]
        return await AgentRun.resume(self.guard, name, keys, condition=self._condition, around=_around(), **whom)

    def _run(self) -> AgentRun | None:
        """Return the run to ask. Of several guards of an agent, the innermost one asks for all of them."""
        run = _RUN.get()
        return run if run is not None and run.guard is self.guard else None

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def _model_call(self, context: ChatContext, call_next: _Next) -> None:
        run = self._run()
        if run is None:
            await call_next()
            return
        self.guard.faults.attempt("adapter", _show_unchecked, run.tools, context)
        reply = await run.ask(lambda: self._asked(run.prompts, context))
        if not isinstance(reply, Permission):
            context.result = self._last(reply, context)
            return
        reply.changed(_change, context)
        try:
            await reply.during(call_next())
        except BaseException as error:
            reply.fail(error)
            if (end := reply.interrupted) is None:
                raise
            context.result = self._last(end, context)
            return
        if isinstance(context.result, ResponseStream):
            made: list[ChatResponse[Any]] = []
            pieces = self._model_pieces(reply, context, context.result, made)
            context.result = _stream(pieces, lambda: made[0])
        else:
            reply.read(self._settle, context)

    async def _model_pieces(
        self, reply: Permission, context: ChatContext, inner: Any, made: list[ChatResponse[Any]]
    ) -> AsyncIterator[ChatResponseUpdate]:
        """Pass on a streamed answer, and settle before its end is known. ``made`` gets the whole answer."""
        streamed = 0
        end: Trip | Ended | None = None
        try:
            async with aclosing(reply.pieces(inner)) as pieces:
                async for update in pieces:
                    streamed += size_of(update.text)
                    yield update
            if (end := reply.interrupted) is None:
                context.result = answer = await inner.get_final_response()
                made.append(answer)
                reply.read(self._settle, context)
        except BaseException as error:
            reply.fail(error, streamed, streaming=True)
            if (end := reply.interrupted) is None:
                raise
        finally:
            reply.fail(None, streamed, streaming=True)
            await inner.close()
        if end is not None:
            last = self._last(end, context)
            async for update in last:
                yield update
            made.append(await last.get_final_response())

    def _asked(self, prompts: GrowingPrompts, context: ChatContext) -> ModelRequest:
        options = context.options or {}
        offered = _tools(options)
        declared = [one.to_json_schema_spec() for one in offered if hasattr(one, "to_json_schema_spec")]
        fixed = [options.get("instructions"), declared]
        measured = prompts.measure(context.messages, _said)
        model, limit = options.get("model") or getattr(context.client, "model", ""), options.get("max_tokens")
        limit = limit if isinstance(limit, int) else None
        more = {name: value for name, value in options.items() if name not in ("model", "max_tokens")}
        more["previous_response_id"] = options.get("conversation_id")
        tools, model = [name_of_tool(one) for one in offered], str(model or "")
        return ModelRequest.of(model, [fixed], limit, counts=context, measured=measured, options=more, tools=tools)

    def _settle(self, permission: Permission, context: ChatContext) -> None:
        response: Any = context.result
        counts = read_usage(response.usage_details or {}, [])
        usage = counts.usage() if counts is not None else None
        contents = [content for message in response.messages for content in message.contents]
        permission.settle(
            usage,
            model=response.model or "",
            calls=[_use(one) for one in contents if one.type == "function_call"],
            text=response.text,
            size=lambda: size_of([content.to_dict() for content in contents]),
            answer=response.conversation_id or "",
        )

    def _last(self, end: Trip | Ended, context: ChatContext) -> Any:
        """End the agent with a text. With a response format no text can end it, so the typed error is raised."""
        words = last_words(self.guard, end, takes_text=(context.options or {}).get("response_format") is None)
        about = {METADATA_KEY: end.to_dict()}
        message = Message(role="assistant", contents=[words], additional_properties=about)
        response: Any = ChatResponse(messages=[message], finish_reason="stop", additional_properties=about)
        if not context.stream:
            return response

        async def pieces() -> AsyncIterator[ChatResponseUpdate]:
            text = Content.from_text(words)
            yield ChatResponseUpdate(
                role="assistant", contents=[text], finish_reason="stop", additional_properties=about
            )

        return _stream(pieces(), lambda: response)

    # ---- tool calls -------------------------------------------------------------------------------------------------

    async def _tool_call(self, context: FunctionInvocationContext, call_next: _Next) -> None:
        run = self._run()
        if run is None:
            await call_next()
            return
        given: Any = context.arguments
        arguments = given.model_dump() if hasattr(given, "model_dump") else dict(given)
        use = ToolUse(str(context.metadata.get("call_id") or ""), context.function.name, arguments)
        if (refusal := await run.tools.check(use)) is not None:
            context.result = refusal
            return
        try:
            with run.tools.inside(use):
                await call_next()
        except UserInputRequiredException:
            run.tools.deferred(use)
            raise
        except BaseException as error:
            run.tools.raised(use, error)
            raise
        if isinstance(context.result, Content) and context.result.type == "function_approval_request":
            run.tools.deferred(use)
        elif (note := run.tools.answered(use, _value(context.result))) is not None:
            context.result = note


def _around() -> AgentRun | None:
    """Return the run of another guard around the same agent. Inside of a tool, the place of the tool counts."""
    run = _RUN.get()
    if run is None or run.has_ended or any(layer.guard is run.guard for layer in current_place().layers):
        return None
    return run


@contextmanager
def _at_work(run: AgentRun) -> Iterator[None]:
    """Let the middleware of model calls and tool calls in this block find the run."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        with suppress(ValueError):  # a stream that is thrown away ends in another context
            _RUN.reset(token)


def _stream(pieces: AsyncIterator[Any], whole: Callable[[], Any]) -> Any:
    return ResponseStream(pieces, finalizer=lambda _: whole())


async def _turn_pieces(run: AgentRun, inner: Any) -> AsyncIterator[Any]:
    """Pass on what an agent streams. The run is current only while the agent works, not while its caller does."""
    try:
        while True:
            with _at_work(run):
                update = await anext(inner, None)
            if update is None:
                break
            yield update
        _leave(run, await inner.get_final_response())
    finally:
        run.end()
        await inner.close()


def _leave(run: AgentRun, response: Any) -> None:
    """Put the bill on the answer of an agent, and end its run. A run that waits for an approval is kept."""
    waiting: list[Any] = []
    if response is not None:
        response.additional_properties[METADATA_KEY] = run.spent.to_dict()
        waiting = [one.function_call.call_id for one in response.user_input_requests if one.function_call is not None]
    if waiting:
        run.pause(waiting)
    else:
        run.end()


def _said(message: Message) -> list[Any]:
    return [content.to_dict() for content in message.contents]


def _tools(options: Any) -> Sequence[Any]:
    tools = options.get("tools") or ()
    return tools if isinstance(tools, Sequence) else (tools,)


def _use(call: Any) -> ToolUse:
    return ToolUse(call.call_id, call.name, call.parse_arguments())


def _change(permission: Permission, context: ChatContext) -> ChatContext:
    """Add a notice for the model and the output limit that the budget can pay. Take withheld tools, or all tools."""
    options = dict(context.options or {})
    if permission.withheld:
        options["tools"] = permission.left(_tools(options), name_of_tool, options.get("tool_choice"))
    if permission.last_after is not None:
        options.pop("tools", None)
        options["tool_choice"] = "none"
    if (limit := permission.max_output_tokens) is not None:
        options["max_tokens"] = limit
    if permission.notice:
        context.messages = [*context.messages, Message(role="user", contents=[permission.notice])]
    context.options = options
    return context


def _value(result: Any) -> object:
    """Return what a tool has answered: its text, or the data of each part."""
    if not isinstance(result, list):
        return result
    if all(isinstance(one, Content) and one.type == "text" for one in result):
        return "".join(one.text or "" for one in result)
    return [one.to_dict() if isinstance(one, Content) else one for one in result]


def _show_unchecked(tools: RunTools, context: ChatContext) -> None:
    """Report answers that no tool has given: to calls of unknown tools, and to refused calls."""
    calls = tools.unchecked
    if not calls:
        return
    known = {getattr(one, "name", None) for one in _tools(context.options or {})}
    for message in reversed(context.messages):
        if not calls:
            return
        for content in message.contents:
            use = calls.pop(content.call_id or "", None) if content.type == "function_result" else None
            if use is not None:
                outcome = Outcome.ERROR if use.tool in known else Outcome.UNKNOWN_TOOL
                tools.saw(use, content.result, outcome, executed=False)
