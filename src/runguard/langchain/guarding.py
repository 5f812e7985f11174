"""``RunGuardMiddleware``: guards every agent that takes middleware (``create_agent``, deepagents)."""

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final, NotRequired, Unpack

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.agents.middleware.types import ExtendedModelResponse, PrivateStateAttr, ToolCallRequest
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.channels.untracked_value import UntrackedValue
from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from runguard.calls.model_calls import ModelSwitch, Permission, ToolUse
from runguard.calls.run import AgentRun, error_of, fitting
from runguard.core.decision import Trip
from runguard.core.errors import RunStoppedError
from runguard.engine.guard import Controls, Guard
from runguard.langchain.messages import (
    answer_size,
    answered_by,
    calls_of,
    has_open_call,
    last_message,
    limit_key,
    notice_message,
    renamed,
    request_of,
    usage_of,
)
from runguard.policy.settings import Policy, PolicySettings
from runguard.termination.conditions import Ended, TerminationCondition

_RUN: Final = "runguard_run"
_RESUMED_KEPT: Final = 1_024
_TOOLS_KEPT: Final = 256


class _State(AgentState[Any]):
    # Never stored in a checkpoint: it ends with the execution of the graph.
    runguard_run: NotRequired[Annotated[Any, UntrackedValue, PrivateStateAttr]]


class RunGuardMiddleware(Controls, AgentMiddleware[Any, Any, Any]):
    """``create_agent(model, tools, middleware=[RunGuardMiddleware(max_usd=1.50)])``.

    The keywords are those of ``RunGuardPlugin``. A stop ends the agent with a message that carries the trip in
    ``response_metadata["runguard"]``; ``on_stop="raise"`` raises the typed error instead. Give the same instance to
    sub-agents: a sub-agent that a tool calls joins the run of its caller.
    """

    state_schema = _State

    def __init__(
        self,
        *,
        app: str = "",
        user: str = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app`` and ``user``: whom budgets per app and per user are for. The session is the thread's id.

        ``termination_condition`` ends a run, of the first agent that has this middleware, when it fires.
        """
        super().__init__()
        self.tools = []
        self.guard = Guard(Policy.build(**policy), gives_last_answers=True, switches_models=True)
        self.guard.check_store()
        self._app, self._user = app, user
        self._condition = fitting(termination_condition, "LangChain", has_hand_offs=False)
        self._is_off = self.guard.policy.mode == "off"
        self._resumed: OrderedDict[str, AgentRun] = OrderedDict()
        self._lock = threading.Lock()

    # ---- the agent's run --------------------------------------------------------------------------------------------

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if self._is_off:
            return None
        run = self._start()
        if (trip := run.enter()) is not None:
            self._raise_if_asked(trip)
        return {_RUN: run}

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return self.before_agent(state, runtime)

    def after_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if not self._is_off:
            self._run_of(state).end()
        return None

    async def aafter_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return self.after_agent(state, runtime)

    def _start(self) -> AgentRun:
        config = get_config()
        session = str(config.get("configurable", {}).get("thread_id") or "")
        name = str((config.get("metadata") or {}).get("lc_agent_name") or "agent")
        whom = {"app": self._app, "user": self._user, "session": session}
        return AgentRun.start(self.guard, name, **whom, condition=self._condition)

    def _run_of(self, state: Any) -> AgentRun:
        """The run that ``before_agent`` began. After an interrupt the graph goes on without it: a new run begins."""
        run = state.get(_RUN)
        if isinstance(run, AgentRun):
            return run
        config = get_config().get("configurable", {})
        key = f"{config.get('thread_id')}/{config.get('checkpoint_ns', '').split('|')[0]}"
        with self._lock:
            run = self._resumed.get(key)
            if run is None:
                run = self._resumed[key] = self._start()
                if len(self._resumed) > _RESUMED_KEPT:
                    self._resumed.popitem(last=False)[1].end()
        return run

    # ---- model calls ------------------------------------------------------------------------------------------------

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        if self._is_off:
            return handler(request)
        run = self._run_of(request.state)
        permission = run.ask_now(partial(_asked, request, self.guard.downgrades is not None))
        if not isinstance(permission, Permission):
            return self._stop(permission, request)
        try:
            with permission.being_made():
                response = handler(permission.changed(_changed, request))
        except BaseException as error:
            permission.fail(error)
            if (trip := permission.interrupted) is not None:
                return self._stop(trip, request)
            raise
        permission.read(_settle, response)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Any:
        if self._is_off:
            return await handler(request)
        run = self._run_of(request.state)
        permission = await run.ask(partial(_asked, request, self.guard.downgrades is not None))
        if not isinstance(permission, Permission):
            return self._stop(permission, request)
        try:
            response = await permission.during(handler(permission.changed(_changed, request)))
        except BaseException as error:
            permission.fail(error)
            if (trip := permission.interrupted) is not None:
                return self._stop(trip, request)
            raise
        permission.read(_settle, response)
        return response

    def _stop(self, end: Trip | Ended, request: ModelRequest[Any]) -> AIMessage:
        """End the agent. Structured output leaves no way but the exception."""
        if request.response_format is not None:
            raise error_of(end)
        if isinstance(end, Trip):
            self._raise_if_asked(end)
        return last_message(self.guard, end)

    def _raise_if_asked(self, trip: Trip) -> None:
        if self.guard.policy.on_stop == "raise":
            raise RunStoppedError.of(trip)

    # ---- tool calls -------------------------------------------------------------------------------------------------

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        if self._is_off:
            return handler(request)
        run, use = self._run_of(request.state), _use_of(request)
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
        run, use = self._run_of(request.state), _use_of(request)
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


def _asked(request: ModelRequest[Any], switches: bool) -> Any:
    tools = [_declared(tool) for tool in request.tools]
    system = request.system_message.content if request.system_message is not None else ""
    asked = request_of(request.model, request.messages, [system, tools], request.model_settings)
    if switches:
        asked.switch = ModelSwitch(lambda: has_open_call(request.messages), lambda name: _obstacle(request.model, name))
    return asked


def _obstacle(model: Any, name: str) -> str:
    return "" if renamed(model, name) is not None else f"{type(model).__name__} has no field for the name of its model"


_declarations: Final[OrderedDict[int, tuple[Any, Any]]] = OrderedDict()  # by identity of the tool, which is kept alive


def _declared(tool: Any) -> Any:
    """What a request says of a tool. LangChain builds the schema anew each time it is asked, which takes long."""
    if isinstance(tool, dict):
        return tool
    known = _declarations.get(id(tool))
    if known is None or known[0] is not tool:
        known = _declarations[id(tool)] = (tool, tool.args)
        while len(_declarations) > _TOOLS_KEPT:
            _declarations.popitem(last=False)
    return [tool.name, tool.description, known[1]]


def _changed(permission: Permission, request: ModelRequest[Any]) -> ModelRequest[Any]:
    """The request with a notice for the model, and with the output limit that the budget can pay."""
    if permission.model:
        request = request.override(model=renamed(request.model, permission.model))
    if permission.notice:
        request = request.override(messages=[*request.messages, notice_message(permission.notice)])
    if permission.last_after is not None:
        request = request.override(tools=[], tool_choice=None)
    if (limit := permission.max_output_tokens) is not None:
        request = request.override(model_settings={**request.model_settings, limit_key(request.model): limit})
    return request


def _settle(permission: Permission, response: Any) -> None:
    inner = response.model_response if isinstance(response, ExtendedModelResponse) else response
    messages = inner.result if isinstance(inner, ModelResponse) else [inner]
    message = next((m for m in messages if isinstance(m, AIMessage)), None)
    if message is None:
        permission.fail(None)
        return
    permission.settle(
        usage_of(message),
        model=answered_by(message),
        calls=calls_of(message),
        text=str(message.text),
        size=answer_size(message),
    )


def _use_of(request: ToolCallRequest) -> ToolUse:
    call = request.tool_call
    return ToolUse(call["id"] or "", call["name"], call["args"])


def _refused(use: ToolUse, text: str) -> ToolMessage:
    return ToolMessage(content=text, tool_call_id=use.id, name=use.tool, status="error")


def _answered(run: AgentRun, use: ToolUse, result: ToolMessage | Command[Any]) -> ToolMessage | Command[Any]:
    """What the model sees: the result, or a note where it is too large."""
    if not isinstance(result, ToolMessage):
        run.tools.answered(use, getattr(result, "update", None))
        return result
    note = run.tools.answered(use, result.content)
    return result if note is None else result.model_copy(update={"content": note})


def _raised(run: AgentRun, use: ToolUse, error: BaseException) -> None:
    if isinstance(error, GraphBubbleUp):  # an interrupt: the tool will be called again
        return
    run.tools.raised(use, error)
