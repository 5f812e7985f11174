"""What the plugin does before and after a tool call: check it, refuse it, time it, and record how it failed.

The hooks of ``plugin`` call ``ToolHooks``, and ``cost_breaker`` drives them by callbacks.
"""

import asyncio
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from google.adk.agents import BaseAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from pydantic import BaseModel, RootModel

from runguard.adk.events import RunStarter, waiting_in
from runguard.adk.runs import (
    HERE,
    Classifier,
    EnclosingTool,
    Invocation,
    Invocations,
    OpenToolCall,
    depth_of,
    enclosing_of,
    here_of,
    lane_of,
)
from runguard.adk.stops import Stopper, announce, refusal
from runguard.core.decision import PART_STOPPED, STOPPED, Action, Decision
from runguard.core.errors import RunStoppedError
from runguard.core.events import AgentEntered, Outcome, ToolCall
from runguard.core.identity import LruDict
from runguard.core.outcomes import says_missing, was_done
from runguard.engine.charges import OWNERS
from runguard.engine.guard import Guard
from runguard.policy.tools import Each, Fields, Kind
from runguard.providers.messages import FRAMEWORK_TOOLS, TRANSFER

_log: Final = logging.getLogger("runguard")
_BLOCK: Final = Action.BLOCK
_ERROR, _TIMEOUT, _UNKNOWN_TOOL = Outcome.ERROR, Outcome.TIMEOUT, Outcome.UNKNOWN_TOOL
_TOOLS_KEPT: Final = 4_096


class KnownTool(NamedTuple):
    """What was read of a tool."""

    code: Callable[[], object]  # a weak reference to the function of a plain tool, or else to the tool
    declared: Fields | None  # about its arguments
    received: frozenset[str] | None  # the arguments that it takes, where it never sees any other


class ToolHooks:
    """Tool calls of one plugin."""

    def __init__(self, guard: Guard, invocations: Invocations, starter: RunStarter, stopper: Stopper) -> None:
        self._guard, self._invocations, self._starter, self._stopper = guard, invocations, starter, stopper
        self._known_tools = LruDict[str, KnownTool](_TOOLS_KEPT)  # by name: the tool that was called last
        self._limits_time = False  # some call had a deadline

    async def before(
        self, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        ic = tool_context._invocation_context
        of = ic.__dict__
        if self._stopper.gave_up(of["invocation_id"]) is not None:
            return refusal(STOPPED)
        try:
            invocation = self._invocations.find(of["invocation_id"])
            if invocation is None or invocation.nested:
                invocation = await self._starter.invocation_of(ic)
            guard, run, name, agent = self._guard, invocation.run, tool.name, of["agent"]
            agent_name = agent.name if agent is not None else ""
            lane = lane_of(guard, invocation, of["branch"], of["isolation_scope"])
            call_id = tool_context.function_call_id or ""
            call = invocation.calls.get(call_id)
            if call is None:
                call = OpenToolCall(name, tool_args, lane, invocation.batches.get(lane, ""), agent=agent_name)
                invocation.calls[call_id] = call
            call.lane, call.running, call.task = lane, True, asyncio.current_task()
            if tool.is_long_running:
                invocation.ask([call_id])
            known_tool = self._known_tools.get(name)
            if known_tool is None or known_tool.code() is not (tool.func if type(tool) is FunctionTool else tool):
                known_tool = self._learn_tool(tool)
            depth = depth_of(agent, invocation, lane) if isinstance(agent, BaseAgent) else invocation.depth
            here, path = HERE.get(), (*run.lanes[lane].path, agent_name)
            around = enclosing_of((guard, invocation, call_id, name, lane, depth, path, here.tool, here.stream))
            HERE.set(here_of((around, here.stream, here.layers, here.conditions, here.model_call, here.session)))
            if name in FRAMEWORK_TOOLS:
                return self._check_transfer(tool_args, ic, invocation, lane, agent_name) if name == TRANSFER else None
            call.fingerprint = guard.tools.fingerprint(name, tool_args, known_tool.received)
            below = 0
            if AgentTool in type(tool).__mro__:  # ``isinstance`` asks the metaclass
                below = depth + 1
                beside = sum(
                    1 for other in invocation.calls.values() if other.batch == call.batch and other.tool == name
                )
                # Its decision is not needed: the next check finds the stop.
                guard.check(AgentEntered(run.info.run, lane, agent_name, guard.clock(), 0, beside))
            rule = guard.tools.rule(name)
            if rule is not None and rule.once:
                call.once = guard.tools.once_identity(name, tool_args, known_tool.declared)
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
                        await self._stopper.skip(ic, name, decision.trip, invocation, lane)
                return refusal(decision.for_model)
            seconds = rule.max_seconds if rule is not None else None
            if run.deadline is not None or seconds is not None:
                self._limits_time = True
                follow_execution(tool)
                call.deadline = guard.clock() + seconds if seconds is not None else 0.0
            return None
        except Exception as error:
            return refusal(STOPPED) if self._stopper.fault("before_tool", error, ic) is not None else None

    def _check_transfer(
        self, args: dict[str, Any], ic: InvocationContext, invocation: Invocation, lane: str, agent: str
    ) -> dict[str, Any] | None:
        """Return the refusal of a hand-off that goes too deep, or None. Hand-off circles are judged on the event."""
        root = getattr(ic.agent, "root_agent", None)
        target = root.find_agent(args.get("agent_name")) if root is not None else None
        if target is None:
            return None
        event = AgentEntered(
            invocation.run.info.run, lane, agent, self._guard.clock(), depth_of(target, invocation, lane)
        )
        decision = self._guard.check(event)
        return refusal(decision.for_model) if decision.action >= _BLOCK and decision.enforced else None

    def _learn_tool(self, tool: BaseTool) -> KnownTool:
        """Read which arguments a tool takes, and declare the rule that ``@runguard.tool`` put beside its code."""
        # ADK makes a new tool for each request from a function in ``tools=``
        function = getattr(tool, "func", None)
        code = function if type(tool) is FunctionTool else tool
        try:
            reference: Callable[[], object] = weakref.ref(code)
        except TypeError:  # an object that cannot be referred to weakly: read it again for each tool
            reference = weakref.ref(tool)
        declared = declared_by(tool)
        received = frozenset(declared.kinds) if declared is not None and declared.drops_others else None
        known = self._known_tools[tool.name] = KnownTool(reference, declared, received)
        rule = getattr(function, "__runguard_tool__", None) or getattr(tool, "__runguard_tool__", None)
        if rule is not None:
            self._guard.tools.declare(tool.name, rule)
        return known

    def after(
        self, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, result: dict[str, Any]
    ) -> None:
        ic = tool_context._invocation_context
        try:
            invocation = self._invocations.find(ic.invocation_id)
            if self._guard.tool_prices.is_used and invocation is not None:
                settle_price(self._guard, invocation, tool, tool_context, tool_args, result)
            if self._limits_time:
                self.judge_time()
            call = invocation.calls.get(tool_context.function_call_id or "") if invocation is not None else None
            if invocation is None or call is None:
                return
            if invocation.classifiers is None:
                invocation.classifiers = classifiers_in(ic)
            if invocation.classifiers and not call.refused:
                call.verdict = app_verdict(invocation.classifiers, tool, tool_args, tool_context, result)
            is_node = not isinstance(ic.agent, BaseAgent)
            if not tool.is_long_running and not is_node:
                return
            # A long-running tool's answer comes later or never, and a Workflow's tool node yields no function
            # response: the event reader will not see an answer.
            call.running = False
            if call.once and not call.refused and call.outcome is None and (not result or is_node):
                # What a long-running tool started counts as done: it must not start again.
                self._guard.tool_gate.settle_once(invocation.run, call.once, not is_node or was_done(result))
        except Exception as error:
            self._stopper.fault("after_tool", error, ic)

    def judge_time(self) -> None:
        """Report a call that has returned after its deadline: a sync tool that takes too long shows only now."""
        tool = HERE.get().tool
        call = tool.invocation.calls.get(tool.call_id) if tool is not None and tool.guard is self._guard else None
        if tool is not None and call is not None and call.deadline and self._guard.clock() > call.deadline:
            timed_out(tool)

    def failed(self, tool: BaseTool, tool_context: ToolContext, error: BaseException) -> dict[str, Any] | None:
        """Record that a tool raised. Return the answer to its call where the run is stopped."""
        ic = tool_context._invocation_context
        try:
            call_id = tool_context.function_call_id or ""
            invocation = self._invocations.find(ic.invocation_id)
            call = invocation.calls.get(call_id) if invocation is not None else None
            if invocation is None or call is None:
                return None
            if invocation.run.bills and type(tool) is not BaseTool:
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
                self._guard.tool_gate.settle_once(invocation.run, call.once, False)
            if isinstance(tool, AgentTool) or isinstance(error, RunStoppedError):
                # It kept asking for a model, or the nested run was stopped and its empty answer does not fit a schema:
                # answer the call.
                return refusal(PART_STOPPED) if invocation.stop_in(call.lane) is not None else None
        except Exception as fault:
            self._stopper.fault("on_tool_error", fault, ic)
        return None


def error_text(error: BaseException) -> str:
    """Return an exception's type and text arguments, without running its ``__str__``."""
    words = " ".join(arg for arg in error.args if type(arg) is str)
    return f"{type(error).__name__}: {words}"


# ---- The app's own verdict on a tool's answer

_VERDICTS: Final = {"OK": Outcome.OK, "ERROR": Outcome.FAILED}
_warned: Final[set[str]] = set()  # tools whose answer made a classifier raise: logged once each
_WARNED_KEPT: Final = 256


def classifiers_in(ic: InvocationContext) -> tuple[Classifier, ...]:
    """Return the ``tool_result_classifier`` of ADK's logging plugins (from ADK 2.13 on), which know the app's tools."""
    found = (
        getattr(plugin, "_tool_result_classifier", None)
        or getattr(getattr(plugin, "config", None), "tool_result_classifier", None)
        for plugin in ic.plugin_manager.plugins
    )
    return tuple(one for one in found if one is not None)


def app_verdict(
    classifiers: tuple[Classifier, ...],
    tool: BaseTool,
    tool_args: dict[str, Any],
    tool_context: ToolContext,
    result: Any,
) -> Outcome | None:
    """Return the verdict of the first classifier that has one, or None. It comes before RunGuard's own rules."""
    for classify in classifiers:
        try:
            verdict = classify(tool=tool, tool_args=tool_args, tool_context=tool_context, result=result)
            status = getattr(verdict, "status", None)
        except Exception as error:
            if tool.name not in _warned and len(_warned) < _WARNED_KEPT:
                _warned.add(tool.name)
                _log.warning(
                    "runguard.classifier_failed: tool_result_classifier raised %s on an answer of %s; RunGuard judges "
                    "such answers by its own rules",
                    type(error).__name__,  # its message may hold the answer
                    tool.name,
                )
            continue
        if type(status) is str and status in _VERDICTS:
            return _VERDICTS[status]
    return None


# ---- Tools with a price


async def reserve_price(guard: Guard, invocation: Invocation, tool: BaseTool, event: ToolCall, args: Any) -> Decision:
    """Hold the price of a call that the rules have allowed. Calls inside of the tool do not wait for this hold."""
    follow_execution(tool)
    decision = await guard.reserve_tool(invocation.run, event, args)
    charge = guard.tool_prices.charge_of(invocation.run, event.id)
    if charge is not None:
        OWNERS.set((*(owner for owner in OWNERS.get() if not owner.over), charge))
    return decision


def settle_price(
    guard: Guard, invocation: Invocation, tool: BaseTool, context: ToolContext, args: Any, answer: object
) -> None:
    """Settle the price of a tool call, or release it if the tool was not executed.

    ``answer``: the tool's result, or the exception that it raised.
    """
    call_id = context.function_call_id or ""
    call = invocation.calls.get(call_id)
    # a live model's streaming tools are not called through run_async
    was_executed = invocation.live or (call is not None and call.executed)
    if call_id in waiting_in(context.actions) or not was_executed or _lacks_arguments(tool, answer):
        guard.release_tool(invocation.run, call_id)
    elif isinstance(answer, asyncio.CancelledError):
        guard.tool_prices.settle_unknown(invocation.run, call_id)
    else:
        guard.settle_tool(invocation.run, call_id, args, answer)


def _lacks_arguments(tool: BaseTool, answer: object) -> bool:
    """Return whether ADK answered in the tool's place, because the model left out arguments."""
    error = answer.get("error") if isinstance(answer, dict) and len(answer) == 1 else None
    return isinstance(error, str) and error.startswith(f"Invoking `{tool.name}()` failed as the following mandatory")


# ---- The execution of a tool, and its deadline

_MARK: Final = "_runguard_follows"


def follow_execution(tool: BaseTool) -> None:
    """Note which calls of this tool are executed, and make those of an async tool end at their deadline.

    ADK calls the hook after a tool also where a callback or another plugin answered instead of it. Nothing else can end
    one call without cancelling the run around it. A sync function cannot be ended: it is judged when it returns. The
    tool's own ``run_async`` is wrapped once per tool object. ``HERE`` names the call, so the tool keeps nothing of a
    run.
    """
    if getattr(tool, _MARK, False):
        return
    original, function = tool.run_async, getattr(tool, "func", None)
    can_end = function is None or any(inspect.iscoroutinefunction(one) for one in (function, type(function).__call__))

    async def run_async(*, args: dict[str, Any], tool_context: ToolContext) -> Any:
        around, left = HERE.get().tool, None
        try:
            if around is not None and around.call_id == tool_context.function_call_id:
                call = around.invocation.calls.get(around.call_id)
                if call is not None:
                    call.executed = True
                left = _seconds_left(around) if can_end else None
        except Exception as fault:
            if around is not None:
                around.guard.fault("tool time", fault, around.invocation.run.info.run)
        if around is None or left is None:
            return await original(args=args, tool_context=tool_context)
        try:
            async with asyncio.timeout(max(left, 0.0)) as limit:
                return await original(args=args, tool_context=tool_context)
        except TimeoutError:
            if not limit.expired():
                raise  # the tool's own timeout, not ours
            around.guard.faults.attempt("tool time", timed_out, around)
            return {
                "error": (
                    f"'{tool.name}' took too long and was ended. Do not call it again in the same way in this turn."
                )
            }

    tool.run_async = run_async  # type: ignore[method-assign]
    setattr(tool, _MARK, True)


def timed_out(around: EnclosingTool) -> None:
    call = around.invocation.calls.get(around.call_id)
    if call is not None and call.outcome is None:
        call.outcome, call.error = Outcome.TIMEOUT, "timed out"
        around.guard.report_failure(around.invocation.run, call.tool, around.call_id)


def _seconds_left(around: EnclosingTool) -> float | None:
    guard, rule = around.guard, around.guard.tools.rule(around.name)
    left = rule.max_seconds if rule is not None else None
    if guard.policy.max_seconds is not None:
        run_left = around.invocation.run.started + guard.policy.max_seconds - guard.clock()
        left = run_left if left is None else min(left, run_left)
    return left


# ---- What a tool declares about its arguments, and which of them reach its code

_INJECTED: Final = ("tool_context", "input_stream")
_EMPTY: Final[tuple[Any, ...]] = (list, dict, set, tuple, str)  # factories of defaults that are always the same
_OWN_READING: Final = ("__get_pydantic_core_schema__", "model_validate")
# Everything that decides which arguments reach the function. ADK's own classes add arguments and change none.
_STEPS: Final = ("run_async", "_preprocess_args", "_preprocess_args_with_validation", "_prepare_invocation_args")
_PLAIN: Final = {
    f"google.adk.tools.{module}" for module in ("function_tool", "authenticated_function_tool", "google_tool")
}


def declared_by(tool: BaseTool) -> Fields | None:
    """Return what is declared about the arguments of a tool; None where nothing is known.

    ``FunctionTool`` calls its function with the arguments that the signature names and drops all others, also where the
    function takes ``**kwargs``. It injects the tool context and what else it lists in ``_ignore_params``. A subclass
    with its own ``run_async`` may treat arguments in another way, so there every argument counts, as for MCP, OpenAPI
    and all other tools; only the types in their schema are used.
    """
    try:
        return _parameters(tool) if isinstance(tool, FunctionTool) and _is_plain(type(tool)) else _schema(tool)
    except Exception:  # the declaration may be odd: then every argument counts
        _log.debug("runguard.unreadable: the declaration of tool '%s'", tool.name, exc_info=True)
        return None


def _parameters(tool: FunctionTool) -> Fields:
    """Return the parameters that a model can fill in."""
    injected = {*_INJECTED, *getattr(tool, "_ignore_params", ())}
    hints = _hints(tool.func)
    fields = Fields(drops_others=True)
    for name, parameter in inspect.signature(tool.func).parameters.items():
        if name in injected:
            continue
        fields.kinds[name] = _parameter(hints.get(name, parameter.annotation))
        if parameter.default is not inspect.Parameter.empty:
            fields.defaults[name] = parameter.default
    return fields


def _is_plain(kind: type) -> bool:
    """Return whether arguments reach the function in the way that ``FunctionTool`` defines."""
    return all(
        next((owner.__module__ in _PLAIN for owner in kind.__mro__ if step in vars(owner)), True) for step in _STEPS
    )


def _hints(function: Any) -> dict[str, Any]:
    """Return the annotations by parameter. One that cannot be resolved does not hide the others."""
    while isinstance(function, partial):
        function = function.func
    target: Any = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except Exception:
        space = getattr(inspect.unwrap(target), "__globals__", {})
        return {
            name: _resolved(annotation, space) for name, annotation in getattr(target, "__annotations__", {}).items()
        }


def _resolved(annotation: Any, space: dict[str, Any]) -> Any:
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), space, include_extras=True)["it"]
    except Exception:
        return None


def _parameter(annotation: Any) -> Kind:
    """Return the kind of a parameter's value.

    ADK makes models of parameters that are a model or a list of models, and hands on everything else as it came.
    """
    annotation = _one(annotation)
    inner = get_args(annotation)
    item = _one(inner[0]) if get_origin(annotation) is list and inner else None
    if _is_model(annotation):
        return _kind(annotation, {})
    return Each(_kind(item, {})) if _is_model(item) else _kind(annotation, None)


def _kind(annotation: Any, models: dict[type, Fields | None] | None) -> Kind:
    """Return what an annotation says about a value. ``models``: those met so far; None where ADK makes no models."""
    annotation = _one(annotation)
    if annotation is int or annotation is float or annotation is bool:
        return annotation
    if _is_model(annotation):
        return None if models is None else models[annotation] if annotation in models else _model(annotation, models)
    origin, inner = get_origin(annotation), get_args(annotation)
    if not isinstance(origin, type):
        return None
    if issubclass(origin, Mapping):
        return Each(_kind(inner[1], models))
    if issubclass(origin, Sequence | AbstractSet) and (len(inner) == 1 or inner[1:] == (...,)):
        return Each(_kind(inner[0], models))
    return None


def _one(annotation: Any) -> Any:
    """Return the type behind ``Annotated``, ``NewType``, an alias and ``Optional``; ``int | float`` is a float."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, UnionType):
            members = {_one(member) for member in get_args(annotation)} - {type(None)}
            if members == {int, float}:
                return float
            if len(members) != 1:
                return None
            annotation = members.pop()
        elif (
            behind := getattr(annotation, "__supertype__", None) or getattr(annotation, "__value__", None)
        ) is not None and not isinstance(annotation, type):
            annotation = behind
        else:
            return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _model(model: type[BaseModel], models: dict[type, Fields | None]) -> Fields | None:
    """Return the fields of a model that drops what it does not declare; None for one that may look at all it gets."""
    if _reads_input(model):
        models[model] = None
        return None
    # known before its fields are read: one of them may be the model itself
    fields = models[model] = Fields(drops_others=True)
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    for name, of in model.model_fields.items():
        fields.kinds[name] = _kind(of.annotation, models)
        if isinstance(of.validation_alias, str):
            fields.names[name] = (of.validation_alias, name) if by_name else (of.validation_alias,)
        if of.default_factory in _EMPTY:
            fields.defaults[name] = of.default_factory()  # type: ignore[call-arg, misc]
        elif of.default_factory is None and not of.is_required():
            fields.defaults[name] = of.default
    return fields


def _reads_input(model: type[BaseModel]) -> bool:
    """Return whether more than the names of its fields decides what a model makes of its input."""
    config, decorators = model.model_config, model.__pydantic_decorators__
    paths = any(not isinstance(of.validation_alias, str | None) for of in model.model_fields.values())
    validators = any(found.info.mode != "after" for found in decorators.model_validators.values()) or bool(
        decorators.root_validators
    )
    own = any(
        name in vars(owner)
        for owner in model.__mro__
        if owner is not BaseModel and issubclass(owner, BaseModel)
        for name in _OWN_READING
    )
    special = (
        config.get("extra") not in (None, "ignore")
        or config.get("validate_by_alias") is False
        or issubclass(model, RootModel)
    )
    return paths or validators or own or special or model.__pydantic_custom_init__


def _schema(tool: BaseTool) -> Fields | None:
    """Return the types that a tool's schema declares, or None for a tool without one.

    What its code makes of other arguments is unknown, so all of them count.
    """
    declaration = tool._get_declaration()
    if declaration is None:
        return None
    schema: Any = getattr(declaration, "parameters_json_schema", None)
    if schema is None and declaration.parameters is not None:
        schema = declaration.parameters.model_dump(mode="json", exclude_none=True, by_alias=True)
    kind = _schema_kind(schema)
    return kind if isinstance(kind, Fields) else None


def _schema_kind(schema: Any) -> Kind:
    if not isinstance(schema, dict):
        return None
    if options := schema.get("anyOf"):
        left = [
            option for option in options if not isinstance(option, dict) or str(option.get("type")).lower() != "null"
        ]
        return _schema_kind(left[0]) if len(left) == 1 else None
    names = schema.get("type")
    names = [str(name).lower() for name in (names if isinstance(names, list) else [names])]
    match [name for name in names if name != "null"]:
        case ["integer"]:
            return int
        case ["number"]:
            return float
        case ["boolean"]:
            return bool
        case ["array"]:
            return Each(_schema_kind(schema.get("items")))
        case ["object"]:
            return Fields({name: _schema_kind(of) for name, of in (schema.get("properties") or {}).items()})
    return None
