"""``RunGuardMiddleware``: guards every agent of LangChain that takes middleware (``create_agent``, deepagents).

LangChain calls its hooks. They ask ``calls/run`` before every model call and tool call. ``turns`` finds the run, and
``messages`` reads requests and answers.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, Unpack
from uuid import uuid4

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain.agents.middleware.types import ExtendedModelResponse, ToolCallRequest
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Command
from pydantic import BaseModel

from runguard.calls.model_calls import ModelRequest as Asked
from runguard.calls.model_calls import ModelSwitch, Permission
from runguard.calls.run import AgentRun, Named, Spent, Whom, fitting, guard_of
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import Trip
from runguard.core.identity import LruDict
from runguard.engine.guard import Controls
from runguard.langchain.messages import (
    answer_size,
    answered_by,
    bound_to,
    calls_of,
    declared,
    declared_output,
    has_open_call,
    last_message,
    limit_key,
    notice_message,
    renamed,
    request_of,
    response_id,
    told,
    usage_of,
    was_refused,
)
from runguard.langchain.turns import Runs, scope_here
from runguard.policy.keywords import PolicySettings
from runguard.providers.usage import GrowingPrompts, name_of_tool
from runguard.termination.conditions import Ended, TerminationCondition

_BILLS_KEPT: Final = 1_024


class RunGuardMiddleware(Controls, AgentMiddleware[Any, Any, Any]):
    """``create_agent(model, tools, middleware=[RunGuardMiddleware(max_usd=1.50)])``.

    The keywords are those of ``RunGuardPlugin``. A stop ends the agent with a message that carries the trip in
    ``response_metadata["runguard"]``; ``on_stop="raise"`` raises the typed error instead. Give the same instance to
    sub-agents: all agents of one turn share a run, also before and after an approval.
    """

    def __init__(
        self,
        *,
        app: str = "",
        user: Named = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app`` and ``user``: whom budgets per app and per user are for. The session is the thread's id.

        ``user`` may be a function of LangGraph's ``Runtime``; ``with runguard.run(user=…)`` around the call wins.
        ``termination_condition`` ends a run, of the first agent that has this middleware, when it fires.
        """
        whom = Whom(app=app, user=user)
        super().__init__()
        self.tools = []
        self.guard = guard_of(policy, gives_last_answers=True, switches_models=True)
        condition = fitting(termination_condition, "LangChain", has_hand_offs=False)
        self._runs = Runs(self.guard, whom, condition)
        self._is_off = self.guard.policy.mode == "off"
        self._bills = LruDict[str, Spent](_BILLS_KEPT)  # by the id of the answer that came last

    def bill(self, result: Any = None) -> Spent | None:
        """Return what a run has used. None: it is not known.

        ``result``: of an agent, with its newest answer among the last 1,024 of this process. Without it: the run around
        this code, in a node, a tool or a hook.
        """
        if result is None:
            return self._runs.bill()
        messages = result.get("messages") if isinstance(result, Mapping) else None
        for message in reversed(messages or ()):
            if isinstance(message, AIMessage):
                return self._bills.get(message.id or "")
        return None

    # ---- model calls ------------------------------------------------------------------------------------------------

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        if self._is_off:
            return handler(request)
        run = self._runs.of_now(scope_here()).run
        permission = run.ask_now(partial(_asked, run.prompts, request, self.guard.model_choice is not None))
        if not isinstance(permission, Permission):
            return self._stop(run, permission, request)
        try:
            with permission.being_made():
                response = handler(permission.changed(_changed, request))
        except BaseException as error:
            permission.fail(error)
            if (trip := permission.interrupted) is not None:
                return self._stop(run, trip, request)
            raise
        permission.read(partial(self._settle, run), response)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Any:
        if self._is_off:
            return await handler(request)
        run = (await self._runs.of(scope_here())).run
        permission = await run.ask(partial(_asked, run.prompts, request, self.guard.model_choice is not None))
        if not isinstance(permission, Permission):
            return self._stop(run, permission, request)
        try:
            response = await permission.during(handler(permission.changed(_changed, request)))
        except BaseException as error:
            permission.fail(error)
            if (trip := permission.interrupted) is not None:
                return self._stop(run, trip, request)
            raise
        permission.read(partial(self._settle, run), response)
        return response

    def _settle(self, run: AgentRun, permission: Permission, response: Any) -> None:
        inner = response.model_response if isinstance(response, ExtendedModelResponse) else response
        messages = inner.result if isinstance(inner, ModelResponse) else [inner]
        message = next((m for m in messages if isinstance(m, AIMessage)), None)
        if message is None:
            permission.fail(None)
        elif was_refused(message):
            permission.release()
        else:
            _book(permission, message)
        if message is not None and message.id:
            self._bills[message.id] = run.spent

    def _stop(self, run: AgentRun, end: Trip | Ended, request: ModelRequest[Any]) -> AIMessage:
        """End the agent. Structured output leaves no way but the exception."""
        message = last_message(self.guard, end, takes_text=request.response_format is None)
        message.id = f"runguard-{uuid4()}"
        self._bills[message.id] = run.spent
        return message

    # ---- tool calls -------------------------------------------------------------------------------------------------

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        if self._is_off:
            return handler(request)
        run, use = self._runs.of_now(scope_here()).run, _use_of(request)
        refusal = run.tools.check_now(use)
        if refusal is not None:
            return _refused(use, refusal)
        try:
            with run.tools.inside(use):
                result = handler(request)
        except BaseException as error:
            _raised(run, use, error)
            raise
        return _answered(run, use, result)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        if self._is_off:
            return await handler(request)
        run, use = (await self._runs.of(scope_here())).run, _use_of(request)
        refusal = await run.tools.check(use)
        if refusal is not None:
            return _refused(use, refusal)
        try:
            with run.tools.inside(use):
                result = await handler(request)
        except BaseException as error:
            _raised(run, use, error)
            raise
        return _answered(run, use, result)


def _asked(prompts: GrowingPrompts, request: ModelRequest[Any], switches: bool) -> Asked:
    tools, settings = [declared(tool) for tool in request.tools], request.model_settings
    if not tools and request.response_format is None:  # else LangChain binds anew, without what was bound before
        settings = {**bound_to(request.model), **settings}
    system = request.system_message.content if request.system_message is not None else ""
    others = [system, tools, declared_output(request.response_format), settings]
    asked = request_of(prompts, request.model, request.messages, others, settings, request)
    asked.tools = [name_of_tool(tool) for tool in request.tools]
    if switches:
        asked.switch = ModelSwitch(lambda: has_open_call(request.messages), lambda name: _obstacle(request.model, name))
    return asked


def _obstacle(model: Any, name: str) -> str:
    return "" if renamed(model, name) is not None else f"{type(model).__name__} has no field for the name of its model"


def _changed(permission: Permission, request: ModelRequest[Any]) -> ModelRequest[Any]:
    """Return the request with a notice, without withheld tools, and with the output limit that a budget can pay."""
    if permission.model:
        request = request.override(model=renamed(request.model, permission.model))
    if permission.notice:
        request = request.override(messages=[*request.messages, notice_message(permission.notice)])
    if permission.withheld:
        request = request.override(tools=permission.left(request.tools, name_of_tool, request.tool_choice))
    if permission.last_after is not None:
        request = request.override(tools=[], tool_choice=None)
    if (limit := permission.max_output_tokens) is not None:
        request = request.override(model_settings={**request.model_settings, limit_key(request.model): limit})
    return request


def _book(permission: Permission, message: AIMessage) -> None:
    permission.settle(
        usage_of(message),
        model=answered_by(message.response_metadata),
        calls=calls_of(message),
        text=str(message.text),
        size=partial(answer_size, message),
        answer=response_id(message),
    )


def _use_of(request: ToolCallRequest) -> ToolUse:
    call = request.tool_call
    return ToolUse(call["id"] or "", call["name"], call["args"], _received_by(request.tool))


def _received_by(tool: object) -> frozenset[str] | None:
    """Return the names of the arguments that LangChain passes on to a tool; None where it may pass any."""
    schema = getattr(tool, "args_schema", None)
    return _fields_of(schema) if isinstance(schema, type) else None


@lru_cache(maxsize=256)
def _fields_of(schema: type) -> frozenset[str] | None:
    if not issubclass(schema, BaseModel) or schema.model_config.get("extra") == "allow":
        return None
    return frozenset(name for key, field in schema.model_fields.items() for name in (key, field.alias) if name)


def _refused(use: ToolUse, text: str) -> ToolMessage:
    return ToolMessage(content=text, tool_call_id=use.id, name=use.tool, status="error")


def _answered(run: AgentRun, use: ToolUse, result: ToolMessage | Command[Any]) -> ToolMessage | Command[Any]:
    """Return what the model sees: the result, or a note where it is too large."""
    if not isinstance(result, ToolMessage):
        run.tools.answered(use, getattr(result, "update", None))
        return result
    note = run.tools.answered(use, *told(result))
    return result if note is None else result.model_copy(update={"content": note})


def _raised(run: AgentRun, use: ToolUse, error: BaseException) -> None:
    if isinstance(error, GraphInterrupt):  # it waits for an answer, and is called again then
        run.tools.deferred(use)
    elif isinstance(error, GraphBubbleUp):  # it has told the graph what to do
        run.tools.answered(use, None)
    else:
        run.tools.raised(use, error)
