"""``guarded``: a copy of an agent, and of all agents that it can reach, with a guard around models and tools.

Users call it. The SDK calls the guarded models, tools and hooks, which ask ``calls/run``.
"""

import copy
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, Final, NamedTuple, Unpack

from agents import Agent, AgentHooks, FunctionTool, Handoff
from agents.agent_output import AgentOutputSchemaBase
from agents.exceptions import ModelBehaviorError
from agents.items import ModelResponse
from agents.model_settings import ModelSettings
from agents.models.interface import Model, ModelProvider
from agents.models.multi_provider import MultiProvider
from agents.run_context import TContext
from agents.run_internal import run_loop
from agents.usage import Usage as ReportedUsage
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from runguard.background import FINALIZED
from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, check_whom, error_of, fitting
from runguard.calls.tool_calls import ToolUse, current_place, left_out
from runguard.core.decision import Trip
from runguard.core.errors import PolicyError, RunGuardError
from runguard.core.identity import Newest
from runguard.engine.guard import Controls, Guard
from runguard.policy.settings import Policy, PolicySettings
from runguard.pricing.rates import Usage
from runguard.providers.messages import arguments, is_search
from runguard.providers.usage import LIKELY, fields, size_of
from runguard.termination.conditions import KEY as _ENDED
from runguard.termination.conditions import Ended, TerminationCondition

_log: Final = logging.getLogger("runguard")
_PARTS: Final = ("model", "hooks", "tools", "handoffs")  # of an agent, which the guard is put around


class AgentGuard(Controls):
    """The guard behind a guarded agent, which has it as ``agent.runguard``. Trips, spend, the kill switch."""

    def __init__(
        self,
        *,
        app: str = "",
        user: str = "",
        session: str = "",
        termination_condition: TerminationCondition | None = None,
        model_provider: ModelProvider | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app``, ``user`` and ``session``: whom budgets per app, per user and per session are for.

        ``termination_condition`` ends a run when it fires. ``model_provider``: finds models that agents name by a text,
        as that of ``RunConfig`` does for agents without a guard.
        """
        check_whom(app=app, user=user, session=session)
        self.guard = Guard(Policy.build(**policy), gives_last_answers=True)
        self.guard.check_store()
        condition = fitting(termination_condition, "OpenAI Agents", has_hand_offs=True)
        self._runs = Runs(self.guard, {"app": app, "user": user, "session": session, "condition": condition})
        # by identity of the original
        self._copies = weakref.WeakValueDictionary[int, GuardedAgent[Any]]()
        self._provider = model_provider if model_provider is not None else MultiProvider()

    def __deepcopy__(self, memo: Any) -> "AgentGuard":
        """A copy of a guarded agent has the same guard."""
        return self

    def guarded(self, agent: Agent[TContext]) -> "GuardedAgent[TContext]":
        """A guarded copy of ``agent``. Agents that hand off to each other are copied once."""
        known = self._copies.get(id(agent))
        if known is not None and known.runguard_original() is agent:  # another agent may have had the same id
            return known
        if isinstance(agent, GuardedAgent):
            return agent
        kind: Any = type(f"Guarded{type(agent).__name__}", (GuardedAgent, type(agent)), {})
        made: Any = kind.__new__(kind)
        vars(made).update(vars(agent))
        made.runguard_original = weakref.ref(agent)
        self._copies[id(agent)] = made
        copied: GuardedAgent[TContext] = self.around(made)
        return copied

    def around(self, made: Any) -> Any:
        """Put this guard around the parts of a guarded agent that have none yet."""
        made.runguard = self
        for part in _PARTS:
            setattr(made, part, getattr(made, part))
        return made

    def part(self, name: str, value: Any) -> Any:
        """The value of an attribute of a guarded agent, with this guard around it."""
        if name == "model":
            return self._model(value)
        if name == "hooks":
            return value if isinstance(value, _Hooks) else _Hooks(self._runs, value)
        return [self.tool(one) if name == "tools" else self._handoff(one) for one in value]

    def _model(self, model: str | Model | None) -> Model:
        if isinstance(model, GuardedModel) and model.is_of(self._runs):
            return model
        inner = model if isinstance(model, Model) else self._provider.get_model(model)
        return GuardedModel(inner, model, self._runs)

    def _handoff(self, target: Agent[Any] | Handoff[Any, Any]) -> Agent[Any] | Handoff[Any, Any]:
        if isinstance(target, Agent):
            return self.guarded(target)
        made, invoke = copy.copy(target), target.on_invoke_handoff

        async def guarded_target(context: Any, args: str) -> Any:
            return self.guarded(await invoke(context, args))

        made.on_invoke_handoff = guarded_target
        return made

    def tool(self, tool: Any) -> Any:
        """A tool with a guard around it. Tools that OpenAI hosts are executed elsewhere and stay as they are."""
        if not isinstance(tool, FunctionTool) or getattr(tool, "runguard", None) is self:
            return tool
        made: Any = copy.copy(tool)
        inner = tool.on_invoke_tool
        if (agent := getattr(tool, "_agent_instance", None)) is not None:
            inner = self._with_agent(tool.name, inner, agent)
        made.on_invoke_tool = _GuardedInvoker.around(tool.name, inner, self._runs)
        made.runguard = self
        return made

    def _with_agent(self, name: str, invoker: Any, agent: Agent[Any]) -> Any:
        """The invoker of an agent used as a tool, with the guarded copy of that agent. It is held by a closure."""
        made = copy.copy(invoker)
        for key, value in vars(invoker).items():
            if isinstance(value, FunctionType) and (bound := _rebound(value, agent, self.guarded(agent))) is not None:
                setattr(made, key, bound)
                return made
        _log.warning(
            "runguard.unguarded: the agent behind the tool '%s' cannot be guarded in this version of openai-agents; "
            "use guarded(agent).as_tool(...) for it",
            name,
        )
        return invoker


class GuardedAgent(Agent[TContext]):
    """What ``guarded`` returns: an agent of the SDK whose ``runguard`` has the trips, the spend and the kill switch."""

    runguard: AgentGuard
    runguard_original: Any  # a weak reference to the agent that this is a copy of

    def __setattr__(self, name: str, value: Any) -> None:
        """A model, hooks, tools or hand-offs that are assigned later are guarded, too."""
        if name in _PARTS and (guard := vars(self).get("runguard")) is not None:
            value = guard.part(name, value)
        super().__setattr__(name, value)

    async def get_mcp_tools(self, run_context: Any) -> list[Any]:
        """The tools of MCP servers exist only during a run. They are guarded here."""
        return [self.runguard.tool(tool) for tool in await super().get_mcp_tools(run_context)]

    def clone(self, **changes: Any) -> "GuardedAgent[TContext]":
        """A copy with changes, under the same guard."""
        made: GuardedAgent[TContext] = self.runguard.around(super().clone(**changes))
        return made


class AgentSettings(PolicySettings, total=False):
    """The keywords of ``guarded``."""

    app: str
    user: str
    session: str
    termination_condition: TerminationCondition | None
    model_provider: ModelProvider | None


def guarded(agent: Agent[TContext], **settings: Unpack[AgentSettings]) -> GuardedAgent[TContext]:
    """``Runner.run(guarded(agent, max_usd=1.50), "…")``: a guarded copy of the agent and of all it can reach.

    The keywords are those of ``RunGuardPlugin``, and ``app``, ``user`` and ``session`` for budgets per app, user or
    session. A stop ends the run with a text as its output; with structured output, or with ``on_stop="raise"``, the
    typed error is raised. ``guarded_agent.runguard`` has the trips, the spend and the kill switch.
    """
    if not isinstance(agent, Agent):
        raise PolicyError(f"guarded({agent!r}): give an agents.Agent")
    return AgentGuard(**settings).guarded(agent)


def _rebound(function: FunctionType, old: object, new: object) -> FunctionType | None:
    """The function with ``new`` where its closure holds ``old``, also in functions that it holds; None: nowhere."""
    cells, found = [], False
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner = _rebound(value, old, new) if isinstance(value, FunctionType) else None
        if value is old or inner is not None:
            found = True
            cell = CellType(new if value is old else inner)
        cells.append(cell)
    if not found:
        return None
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


# ---- Which run a hook, a model call or a tool call belongs to.

_REQUESTS_KEPT: Final = 4_096


@dataclass(slots=True)
class _Request:
    items: Any
    run: AgentRun
    is_guarded: bool = False  # a guarded model was called for it


class PastTheGuard(NamedTuple):
    """A model call that no guarded model has made."""

    items: Any
    is_first: bool  # of this guard


class Runs:
    """The runs of one guard.

    Hooks and tools see the run's context. A model sees only its request: the hook that the SDK calls right before it
    sees the same list of input items, and that list connects the two.
    """

    def __init__(self, guard: Guard, whom: dict[str, Any]) -> None:
        self.guard, self._whom = guard, whom
        self._runs: dict[tuple[int, str], tuple[weakref.ref[Any], AgentRun]] = {}
        self._requests = Newest[int, _Request](_REQUESTS_KEPT)
        self._has_missed = False  # a call past the guard was seen
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> "Runs":
        """Copies of guarded models, tools and hooks share their runs."""
        return self

    def of(self, context: Any, agent: str) -> AgentRun:
        """The run of a context, begun with its first agent.

        An agent used as a tool shares the usage of its caller's context. The tool call that it runs in identifies it.
        """
        usage = context.usage
        key = (id(usage), current_place().call)
        with self._lock:
            known, run = self._runs.get(key, (None, None))
            if run is None or known is None or known() is not usage:  # another usage may have had the same id
                run = AgentRun.start(self.guard, agent, **self._whom)
                self._runs[key] = weakref.ref(usage), run
                # A run that fails reaches no hook. It ends with its context.
                weakref.finalize(usage, FINALIZED.put, partial(self._forget, key, run))
            return run

    def alone(self) -> AgentRun:
        """A run for a model call whose agent is not known: it was made with other input items, or by your code."""
        with self._lock:
            waiting = (request for request in reversed(self._requests.values()) if not request.is_guarded)
            if (newest := next(waiting, None)) is not None:
                newest.is_guarded = True
        return AgentRun.start(self.guard, "model", **self._whom)

    def end(self, context: Any) -> None:
        key = (id(context.usage), current_place().call)
        known, run = self._runs.get(key, (None, None))
        if run is not None and known is not None and known() is context.usage:
            self._forget(key, run)

    def _forget(self, key: tuple[int, str], run: AgentRun) -> None:
        with self._lock:
            if key in self._runs and self._runs[key][1] is run:
                del self._runs[key]
        run.end()

    def connect(self, items: Any, run: AgentRun) -> None:
        """The next model call with these input items belongs to ``run``."""
        with self._lock:
            self._requests[id(items)] = _Request(items, run)

    def asking(self, items: Any) -> AgentRun | None:
        with self._lock:
            found = self._requests.get(id(items))
            if found is None or found.items is not items:
                return None
            found.is_guarded = True
            return found.run

    def disconnect(self, run: AgentRun) -> PastTheGuard | None:
        """The model has answered: its input items are no longer kept. Returns a call that no guarded model has made."""
        with self._lock:
            past = None
            for key in [key for key, one in self._requests.items() if one.run is run]:
                request = self._requests.pop(key)
                past = past if request.is_guarded else request
            if past is None:
                return None
            is_first, self._has_missed = not self._has_missed, True
            return PastTheGuard(past.items, is_first)


# ---- Models.


class GuardedModel(Model):
    """Asks the guard before each call of the inner model, and reports what it used."""

    def __init__(self, inner: Model, given: str | Model | None, runs: Runs) -> None:
        """``given``: what the agent or ``RunConfig`` has as its model. It names the model for its price."""
        self._inner, self.given, self._runs = inner, given, runs
        self.name = given if isinstance(given, str) else name_of(inner)
        self._instead: GuardedModel | None = None

    def __deepcopy__(self, memo: Any) -> "GuardedModel":
        """A model that an agent names by a text is not copied, as without a guard."""
        if not isinstance(self.given, Model):
            return self
        given = copy.deepcopy(self.given, memo)
        return GuardedModel(given if self._inner is self.given else copy.deepcopy(self._inner, memo), given, self._runs)

    def is_of(self, runs: Runs) -> bool:
        """Whether these runs are checked here."""
        return self._runs is runs

    def guard_instead(self, chosen: Model, run_config: Any) -> Model:
        """``chosen``, which ``RunConfig`` has put in the place of this model, with the same guard around it.

        The newest one is kept: the SDK remembers all models of a run, and asks for the model before each call.
        """
        if isinstance(chosen, GuardedModel) and chosen.is_of(self._runs):
            return chosen
        given = run_config.model if isinstance(run_config.model, str) else chosen
        made = self._instead
        if made is None or made._inner is not chosen or made.given != given:
            made = self._instead = GuardedModel(chosen, given, self._runs)
        return made

    async def close(self) -> None:
        await self._inner.close()

    def get_retry_advice(self, request: Any) -> Any:
        return self._inner.get_retry_advice(request)

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self._inner._cleanup_on_run_end(owner)

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the SDK's name
        model_settings: ModelSettings,
        tools: Any,
        output_schema: AgentOutputSchemaBase | None,
        handoffs: Any,
        tracing: Any,
        **kwargs: Any,
    ) -> ModelResponse:
        run, is_alone = self._run(input)
        try:
            permission = await run.ask(lambda: self._asked(system_instructions, input, model_settings, tools, handoffs))
            if not isinstance(permission, Permission):
                return ModelResponse([self._last_words(permission, output_schema)], ReportedUsage(), None)
            items, settings = permission.changed(_changed, (input, model_settings))
            if permission.last_after is not None:
                tools, handoffs = [], []
            try:
                response = await permission.during(
                    self._inner.get_response(
                        system_instructions, items, settings, tools, output_schema, handoffs, tracing, **kwargs
                    )
                )
            except BaseException as error:
                permission.fail(error, _cut_off(error, settings))
                if (trip := permission.interrupted) is not None:
                    return ModelResponse([self._last_words(trip, output_schema)], ReportedUsage(), None)
                raise
            permission.read(lambda one, answer: settle_answer(one, answer, handoffs), response)
            return response
        finally:
            if is_alone:
                run.end()

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the SDK's name
        model_settings: ModelSettings,
        tools: Any,
        output_schema: AgentOutputSchemaBase | None,
        handoffs: Any,
        tracing: Any,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        run, is_alone = self._run(input)
        try:
            permission = await run.ask(lambda: self._asked(system_instructions, input, model_settings, tools, handoffs))
            if not isinstance(permission, Permission):
                for event in _spoken(self._last_words(permission, output_schema), self.name):
                    yield event
                return
            items, settings = permission.changed(_changed, (input, model_settings))
            if permission.last_after is not None:
                tools, handoffs = [], []
            streamed, final, cut = 0, None, None
            try:
                stream: Any = self._inner.stream_response(
                    system_instructions, items, settings, tools, output_schema, handoffs, tracing, **kwargs
                )
                async with aclosing(permission.pieces(stream)) as events:
                    async for event in events:
                        if isinstance(event, ResponseCompletedEvent):
                            final = event.response
                        elif isinstance(event, ResponseIncompleteEvent | ResponseFailedEvent):  # the SDK will raise
                            final = event.response if event.response.usage is not None else None
                            cut = permission.last_after  # the run ends with its stop
                            if final is None:
                                permission.fail(None, streamed, streaming=True)
                        elif isinstance(delta := getattr(event, "delta", None), str):
                            streamed += len(delta.encode())
                        if final is not None:
                            permission.read(lambda one, answer: settle_answer(one, answer, handoffs), final)
                        if cut is not None:
                            break
                        yield event
                trip = cut or (permission.interrupted if final is None else None)
                permission.fail(None, streamed, streaming=True)  # the stream ended without its last event
            except BaseException as error:
                permission.fail(error, streamed, streaming=True)
                if (trip := permission.interrupted) is None:
                    raise
            if trip is not None:
                for event in _spoken(self._last_words(trip, output_schema), self.name):
                    yield event
        finally:
            if is_alone:
                run.end()

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _run(self, items: Any) -> tuple[AgentRun, bool]:
        """The run that asks, and whether it consists of this call alone."""
        run = self._runs.asking(items)
        return (run, False) if run is not None else (self._runs.alone(), True)

    def _asked(self, instructions: Any, items: Any, settings: ModelSettings, tools: Any, handoffs: Any) -> ModelRequest:
        declared = [[getattr(tool, "name", ""), getattr(tool, "description", ""), _schema(tool)] for tool in tools]
        declared += [[one.tool_name, one.tool_description, one.input_json_schema] for one in handoffs]
        return ModelRequest.of(self.name, [instructions, items, declared], settings.max_tokens)

    def _last_words(self, end: Trip | Ended, schema: AgentOutputSchemaBase | None) -> ResponseOutputMessage:
        """The message that ends the run. With structured output no text can end it, so the typed error is raised."""
        is_trip = isinstance(end, Trip)
        if (is_trip and self._runs.guard.policy.on_stop == "raise") or (
            schema is not None and not schema.is_plain_text()
        ):
            raise error_of(end)
        words, name = (self._runs.guard.stop_text(end), end.id) if isinstance(end, Trip) else (end.reason, _ENDED)
        text = ResponseOutputText(type="output_text", text=words, annotations=[])
        return ResponseOutputMessage(
            id=f"runguard_{name}", type="message", role="assistant", status="completed", content=[text]
        )


def name_of(model: str | Model | None) -> str:
    """The name of a model, for its price."""
    if isinstance(model, GuardedModel):
        return model.name
    name = model if isinstance(model, str) else getattr(model, "model", "")
    return name if isinstance(name, str) else str(name)


def settle_answer(permission: Permission, response: Any, handoffs: Any) -> None:
    """Report the usage, the tool calls and the text of an answer."""
    output = response.output
    names = {one.tool_name for one in handoffs}
    calls = [item for item in output if getattr(item, "type", "") == "function_call" and item.name not in names]
    permission.settle(
        _usage_of(response.usage, response.output),
        calls=[ToolUse(call.call_id, call.name, arguments(call.arguments)) for call in calls],
        text="" if len(calls) < len(output) - len(_texts(output)) else "".join(_texts(output)),
        size=size_of(output),
    )


def _schema(tool: Any) -> Any:
    return getattr(tool, "params_json_schema", None)


def _texts(output: list[Any]) -> list[str]:
    return [
        part.text
        for item in output
        if isinstance(item, ResponseOutputMessage)
        for part in item.content
        if isinstance(part, ResponseOutputText)
    ]


def _changed(permission: Permission, request: tuple[Any, ModelSettings]) -> tuple[Any, ModelSettings]:
    """The request with a notice for the model, and with the output limit that the budget can pay."""
    items, settings = request
    if permission.notice:
        items = [*([{"role": "user", "content": items}] if isinstance(items, str) else items)]
        items.append({"role": "user", "content": permission.notice})
    if (limit := permission.max_output_tokens) is not None:
        settings = replace(settings, max_tokens=limit)
    if permission.last_after is not None:
        settings = replace(settings, tool_choice=None, parallel_tool_calls=None)
    return items, settings


def _usage_of(usage: Any, output: Any) -> Usage | None:
    if usage is None or not (usage.input_tokens or usage.output_tokens):
        return None
    if not all(type(figure) is int and figure >= 0 for figure in (usage.input_tokens, usage.output_tokens)):
        return None
    inputs, outputs = usage.input_tokens_details, usage.output_tokens_details
    return Usage(
        input=usage.input_tokens,
        output=usage.output_tokens,
        cached=getattr(inputs, "cached_tokens", 0) or 0,
        cache_write=getattr(inputs, "cache_write_tokens", 0) or 0,
        thinking=getattr(outputs, "reasoning_tokens", 0) or 0,
        searches=sum(is_search(fields(item).get) for item in output),
    )


def _cut_off(error: BaseException, settings: ModelSettings) -> int:
    """The bytes of an answer that ended at its output limit. Not streamed, the SDK raises then, without the usage."""
    is_cut = isinstance(error, ModelBehaviorError) and "max_output_tokens" in str(error)
    return (settings.max_tokens or 0) * LIKELY if is_cut else 0


def _spoken(message: ResponseOutputMessage, model: str) -> Iterator[Any]:
    """The events of a model that streams ``message``."""
    [text] = message.content
    empty = ResponseOutputText(type="output_text", text="", annotations=[])
    response = Response(
        id=message.id,
        created_at=0.0,
        model=model or "runguard",
        object="response",
        output=[message],
        parallel_tool_calls=False,
        status="completed",
        tool_choice="none",
        tools=[],
    )
    begun: Any = response.model_copy(update={"output": [], "status": "in_progress"})
    item: Any = message.model_copy(update={"content": [], "status": "in_progress"})
    words = text.text if isinstance(text, ResponseOutputText) else ""
    at: Any = {"item_id": message.id, "output_index": 0, "content_index": 0}
    yield ResponseCreatedEvent(type="response.created", sequence_number=0, response=begun)
    yield ResponseOutputItemAddedEvent(type="response.output_item.added", sequence_number=1, output_index=0, item=item)
    yield ResponseContentPartAddedEvent(type="response.content_part.added", sequence_number=2, part=empty, **at)
    yield ResponseTextDeltaEvent(type="response.output_text.delta", sequence_number=3, delta=words, logprobs=[], **at)
    yield ResponseTextDoneEvent(type="response.output_text.done", sequence_number=4, text=words, logprobs=[], **at)
    yield ResponseContentPartDoneEvent(type="response.content_part.done", sequence_number=5, part=text, **at)
    yield ResponseOutputItemDoneEvent(type="response.output_item.done", sequence_number=6, output_index=0, item=message)
    yield ResponseCompletedEvent(type="response.completed", sequence_number=7, response=response)


# ---- Tools and hooks.


class _GuardedInvoker:
    """Calls a tool if the guard allows it. Otherwise the model gets the reason as the answer."""

    _name: str
    _inner: Any
    _runs: Runs

    @classmethod
    def around(cls, name: str, inner: Any, runs: Runs) -> "_GuardedInvoker":
        """The guard around an invoker. One of the SDK stays an instance of its class, with all that it knows.

        Before the SDK asks ``needs_approval``, it lets such an invoker check the arguments.
        """
        made = cls()
        if hasattr(inner, _BINDS):
            kind: Any = type(inner)
            kind = _kind_around(kind)
            made = kind.__new__(kind)
            vars(made).update(vars(inner))
        made._name, made._inner, made._runs = name, inner, runs
        return made

    def __agents_bind_function_tool__(self, tool: Any) -> "_GuardedInvoker":
        """A copy of a guarded tool keeps the guard."""
        return self

    async def __call__(self, context: Any, args: str) -> Any:
        agent = getattr(context.agent, "name", "") or "agent"
        run = self._runs.of(context, agent)
        use = ToolUse(context.tool_call_id, self._name, arguments(args))
        refusal = await run.tools.check(use)
        if refusal is not None:
            return refusal
        errors: list[Exception] = []
        try:
            with run.tools.inside(use):
                result = await _noting(self._inner, errors)(context, args)
        except BaseException as error:
            run.tools.raised(use, error)
            raise
        if not errors:
            note = run.tools.answered(use, result)
        elif isinstance(errors[0], ModelBehaviorError):  # wrong arguments: the tool itself did not fail
            note = run.tools.answered(use, f"Error: {errors[0]}")
        else:
            run.tools.raised(use, errors[0])
            note = run.guard.faults.attempt("adapter", left_out, run.layers, use, result)
        return result if note is None else note


_BINDS: Final = "__agents_bind_function_tool__"  # a method of the SDK's own invokers


@cache
def _kind_around(kind: type) -> Any:
    return type(f"Guarded{kind.__name__}", (_GuardedInvoker, kind), {})


def _noting(invoker: Any, errors: list[Exception]) -> Any:
    """The invoker for one call. It notes what the tool raises, before the SDK turns it into a text for the model."""
    invoke_tool = getattr(invoker, "_invoke_tool_impl", None)
    if invoke_tool is None:
        return invoker

    async def invoke(context: Any, args: str) -> Any:
        try:
            return await invoke_tool(context, args)
        except Exception as error:
            errors.append(error)
            raise

    made = copy.copy(invoker)
    made._invoke_tool_impl = invoke
    return made


class _Hooks(AgentHooks[Any]):
    """Follows the run, and passes every call on to the hooks of the original agent."""

    def __init__(self, runs: Runs, inner: AgentHooks[Any] | None) -> None:
        self._runs, self._inner = runs, inner if inner is not None else AgentHooks[Any]()

    async def on_start(self, context: Any, agent: Any) -> None:
        self._runs.of(context, agent.name).enter()
        await self._inner.on_start(context, agent)

    async def on_end(self, context: Any, agent: Any, output: Any) -> None:
        self._runs.end(context)
        await self._inner.on_end(context, agent, output)

    async def on_handoff(self, context: Any, agent: Any, source: Any) -> None:
        self._runs.of(context, source.name).hand_off(agent.name)
        await self._inner.on_handoff(context, agent, source)

    async def on_llm_start(self, context: Any, agent: Any, system_prompt: Any, input_items: Any) -> None:
        self._runs.connect(input_items, self._runs.of(context, agent.name))
        await self._inner.on_llm_start(context, agent, system_prompt, input_items)

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        run, error = self._runs.of(context, agent.name), None
        if (past := self._runs.disconnect(run)) is not None:
            error = await report(run, agent, past.items, response, is_first=past.is_first)
        await self._inner.on_llm_end(context, agent, response)
        if error is not None:
            raise error

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        await self._inner.on_tool_start(context, agent, tool)

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        await self._inner.on_tool_end(context, agent, tool, result)


# ---- ``RunConfig(model=…)`` replaces the model of every agent in a run. The replacement gets the guard of the agent.

_MESSAGE: Final = (
    "agent '%s' called a model past its guard: RunConfig(model=...) has replaced the guarded model, and RunGuard "
    "cannot guard the replacement in this version of openai-agents. The call is booked at the price of '%s'. Do this "
    "instead: set the model on the agent, then call guarded(agent, ...)"
)


def watch() -> None:
    """Guard what replaces the model of a guarded agent, from now on.

    The SDK shows the ``RunConfig`` of a run to no hook and to no agent. Its run loop finds the model of each call with
    the function ``get_model``, and the settings for it with ``get_model_settings``. The functions around both change
    nothing for agents without a guard, nor for runs without ``RunConfig.model``. They do not change ``RunConfig``.
    """
    for name, around in (("get_model", _guarded_choice), ("get_model_settings", _fitting_settings)):
        found = getattr(run_loop, name, None)
        if callable(found):
            setattr(run_loop, name, around(found))


def _guarded_choice(get_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_model)
    def guarded_choice(agent: Any, run_config: Any, *args: Any, **kwargs: Any) -> Any:
        chosen, own = get_model(agent, run_config, *args, **kwargs), agent.model
        return chosen if chosen is own or not isinstance(own, GuardedModel) else own.guard_instead(chosen, run_config)

    return guarded_choice


def _fitting_settings(get_model_settings: Callable[..., Any]) -> Callable[..., Any]:
    """The SDK replaces default settings that belong to the name of the agent's model. It must see that name."""

    @wraps(get_model_settings)
    def fitting_settings(agent: Any, run_config: Any, *args: Any, **kwargs: Any) -> Any:
        if run_config.model is not None and isinstance(own := agent.model, GuardedModel):
            agent = SimpleNamespace(model=own.given, model_settings=agent.model_settings)
        return get_model_settings(agent, run_config, *args, **kwargs)

    return fitting_settings


async def report(run: AgentRun, agent: Any, items: Any, response: Any, *, is_first: bool) -> RunGuardError | None:
    """Book a call past the guard, log the first one of a guard, and return the error that must end the run.

    This happens in a version of the SDK without the functions that ``watch`` looks for. In shadow mode the run goes on.
    """
    mode = run.guard.policy.mode
    if mode == "off":
        return None
    name = name_of(agent.model)
    if is_first:
        _log.warning("runguard.unguarded: %s", _MESSAGE % (agent.name, name))
    permission = await run.ask(lambda: ModelRequest.of(name, items))
    if isinstance(permission, Permission):
        permission.read(lambda one, answer: settle_answer(one, answer, ()), response)
    elif isinstance(permission, Trip):
        return error_of(permission)
    return RunGuardError(_MESSAGE % (agent.name, name)) if mode == "enforce" else None


watch()
