"""``guarded``: a copy of an agent, and of all agents that it hands over to, with a guard around models and tools.

Users call it. ``runner`` begins a turn, and the SDK then asks the copy for its tools and its model.
"""

import copy
import logging
import weakref
from functools import update_wrapper
from operator import is_not
from typing import Any, Final, Unpack

from agents import (
    Agent,
    FunctionTool,
    Handoff,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    ToolInputGuardrailData,
    ToolOutputGuardrail,
    ToolOutputGuardrailData,
)
from agents.models.interface import Model
from agents.run_context import TContext

from runguard.calls.run import AgentRun, Named, Spent, Whom, fitting, guard_of
from runguard.calls.tool_calls import ToolUse, left_out
from runguard.core.errors import PolicyError, RunGuardError
from runguard.engine.guard import Controls
from runguard.openai_agents import runner
from runguard.openai_agents.runner import guarded_by, guarded_model
from runguard.openai_agents.turns import TURN, Bill, Turn, as_failure
from runguard.policy.keywords import PolicySettings
from runguard.providers.messages import arguments
from runguard.providers.usage import name_of_tool
from runguard.termination.conditions import TerminationCondition

_log: Final = logging.getLogger("runguard")


class AgentGuard(Controls):
    """The guard behind a guarded agent, which has it as ``agent.runguard``. Trips, spend, the kill switch."""

    def __init__(
        self,
        *,
        app: str = "",
        user: Named = "",
        session: Named = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app``, ``user`` and ``session``: whom budgets per app, per user and per session are for.

        ``user`` and ``session`` may be functions of the SDK's run context wrapper. ``termination_condition`` ends a
        run when it fires.
        """
        self.whom = Whom(app, user, session)
        self.guard = guard_of(policy, gives_last_answers=True)
        self.condition = fitting(termination_condition, "OpenAI Agents", has_hand_offs=True)
        # by identity of the original
        self._copies = weakref.WeakValueDictionary[int, GuardedAgent[Any]]()
        self._kinds: dict[tuple[type, tuple[AgentGuard, ...]], Any] = {}
        self._has_missed = False  # a run past the guard was logged
        runner.GUARDS[id(self.guard)] = self
        runner.install()

    def __deepcopy__(self, memo: Any) -> "AgentGuard":
        """Return the guard itself: a copy of a guarded agent has the same guard."""
        return self

    def guarded(self, agent: Agent[TContext]) -> "GuardedAgent[TContext]":
        """Return a guarded copy of ``agent``. Agents that hand off to each other are copied once.

        Other guards that it has hold, too.
        """
        if isinstance(agent, GuardedAgent) and self in agent.runguard_all:
            return agent
        known = self._copies.get(id(agent))
        if known is not None and known.runguard_original() is agent:  # another agent may have had the same id
            _follow(known, agent)
            return known
        kind = self._kind(agent)
        made: Any = kind.__new__(kind)
        vars(made).update(vars(agent))
        made.runguard_original, made.runguard_seen = weakref.ref(agent), _Seen(agent)
        self._copies[id(agent)] = made
        made.model, made.handoffs, made.tools = made.model, made.handoffs, made.tools
        copied: GuardedAgent[TContext] = made
        return copied

    def _kind(self, agent: Agent[Any]) -> Any:
        """Return the class of guarded copies. Whatever the SDK makes of a copy has the same guards."""
        inner = agent.runguard_all if isinstance(agent, GuardedAgent) else ()
        base = agent.runguard_base if isinstance(agent, GuardedAgent) else type(agent)
        if (base, inner) not in self._kinds:
            own = {"runguard": self, "runguard_all": (self, *inner), "runguard_base": base}
            self._kinds[base, inner] = type(f"Guarded{base.__name__}", (GuardedAgent, base), own)
        return self._kinds[base, inner]

    def missed(self, agent: str) -> None:
        """End a run of ``agent`` by a runner that is not RunGuard's. In shadow mode, log it once."""
        mode = self.guard.policy.mode
        if mode == "enforce":
            raise RunGuardError(_NO_TURN % agent)
        if mode == "shadow" and not self._has_missed:
            self._has_missed = True
            _log.warning("runguard.unguarded: %s", _NO_TURN % agent)

    def spent(self, result: Any) -> Spent:
        """Return the name of the run that has given ``result`` to ``Runner.run``, and what it has cost so far."""
        bill = getattr(result, "runguard", None)
        found = bill.of(self) if isinstance(bill, Bill) else None
        return found if found is not None else Spent("", None, 0, 0)


class GuardedAgent(Agent[TContext]):
    """What ``guarded`` returns: an agent of the SDK whose ``runguard`` has the trips, the spend and the kill switch."""

    runguard: AgentGuard
    runguard_all: tuple[AgentGuard, ...]  # of which ``runguard`` is the outermost
    runguard_base: type
    runguard_original: Any = staticmethod(lambda: None)  # a weak reference to the agent that this is a copy of
    runguard_seen: "_Seen | None" = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Guard a model or hand-offs that are assigned."""
        if name == "model" and isinstance(value, Model):
            value = guarded_model(value, guards=self.runguard_all)
        elif name == "handoffs" and isinstance(value, list):
            value = [self._handoff(one) for one in value]
        elif name == "tools" and isinstance(value, list):
            value = self._tools(value)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        """Return whether the other is what this is a copy of, or equal to that: programs look for their own agents."""
        original = self.runguard_original()
        if original is None or isinstance(other, GuardedAgent):
            return super().__eq__(other)
        return other is original or bool(original == other)

    __hash__ = Agent.__hash__

    async def get_all_tools(self, run_context: Any) -> list[Any]:
        """Return the guarded tools. The SDK asks for them before each model call."""
        if (turn := TURN.get()) is not None:
            await turn.work(self, run_context)
            if self.handoffs:
                self.handoffs = self.handoffs  # some may have been appended
        tools = guarded_tools(await super().get_all_tools(run_context), turn)
        if turn is not None:
            turn.offered = {name_of_tool(tool): receivedguarded_by(tool) for tool in tools}
        return tools

    async def get_system_prompt(self, run_context: Any) -> str | None:
        """Return the instructions. Only a runner asks for them, so one without the guard is noticed here."""
        if TURN.get() is None:
            self.runguard.missed(self.name)
        return await super().get_system_prompt(run_context)

    def clone(self, **changes: Any) -> "GuardedAgent[TContext]":
        """Return a copy with changes, under the same guards."""
        made: Any = super().clone(**changes)
        copied: GuardedAgent[TContext] = made
        return copied

    def __copy__(self) -> "GuardedAgent[TContext]":
        made: Any = type(self).__new__(type(self))
        vars(made).update(vars(self))
        copied: GuardedAgent[TContext] = made
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "GuardedAgent[TContext]":
        made: Any = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        copied: GuardedAgent[TContext] = made
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"the guarded agent '{self.name}' cannot be pickled: pickle the agent, then call guarded()")

    def _tools(self, tools: list[Any]) -> list[Any]:
        """Return the tools. Those that are agents name the guarded ones, so that a stored run goes on with them."""
        made = []
        for tool in tools:
            agent = getattr(tool, "_agent_instance", None)
            if isinstance(agent, Agent) and (copied := guarded_by(self.runguard_all, agent)) is not agent:
                tool = copy.copy(tool)
                tool._agent_instance = copied
            made.append(tool)
        return tools if all(one is other for one, other in zip(made, tools, strict=True)) else made

    def _handoff(self, target: Any) -> Any:
        if isinstance(target, Agent):
            return guarded_by(self.runguard_all, target)
        if not isinstance(target, Handoff) or getattr(target, "runguard_all", None) == self.runguard_all:
            return target
        made: Any = copy.copy(target)
        invoke, guards = target.on_invoke_handoff, self.runguard_all

        async def guarded_target(context: Any, args: str) -> Any:
            return guarded_by(guards, await invoke(context, args))

        made.on_invoke_handoff, made.runguard_all = guarded_target, guards
        agent = reference() if (reference := getattr(target, "_agent_ref", None)) is not None else None
        if isinstance(agent, Agent):  # a stored run goes on with the agent that this names
            made.runguard_target = guarded_by(guards, agent)
            made._agent_ref = weakref.ref(made.runguard_target)
        return made


class _Seen:
    """What an agent had when its guarded copy was last brought up to date. Copies of the copy share it."""

    __slots__ = ("held", "lists")

    def __init__(self, agent: Agent[Any]) -> None:
        self.held = dict(vars(agent))
        self.lists = {name: list(value) for name, value in self.held.items() if isinstance(value, list)}

    def __deepcopy__(self, memo: Any) -> "_Seen":
        return self

    def changed(self, name: str, value: object) -> bool:
        if name not in self.held or self.held[name] is not value:
            return True
        before, now = self.lists.get(name), value if isinstance(value, list) else []
        return before is not None and (len(before) != len(now) or any(map(is_not, before, now)))


def _follow(copied: GuardedAgent[Any], agent: Agent[Any]) -> None:
    """Let a guarded copy have what its original was given since then."""
    seen = copied.runguard_seen
    changes = {name: value for name, value in vars(agent).items() if seen is not None and seen.changed(name, value)}
    for name, value in changes.items():
        setattr(copied, name, value)
    if changes:
        vars(copied)["runguard_seen"] = _Seen(agent)


_NO_TURN: Final = (
    "agent '%s' runs without its guard: set_default_agent_runner() has replaced the runner of RunGuard, or the agent "
    "was given to a runner of its own; call set_default_agent_runner() before guarded(), and use Runner.run"
)


class AgentSettings(PolicySettings, total=False):
    """The keywords of ``guarded``."""

    app: str
    user: Named
    session: Named
    termination_condition: TerminationCondition | None


def guarded(agent: Agent[TContext], **settings: Unpack[AgentSettings]) -> GuardedAgent[TContext]:
    """``Runner.run(guarded(agent, max_usd=1.50), "…")``: a guarded copy of the agent and of all it can reach.

    The keywords are those of ``RunGuardPlugin``, and ``app``, ``user`` and ``session`` for budgets per app, user or
    session. A stop ends the run with a text as its output; with structured output, or with ``on_stop="raise"``, the
    typed error is raised. ``guarded_agent.runguard`` has the trips, the spend and the kill switch.
    """
    if not isinstance(agent, Agent):
        raise PolicyError(f"guarded({agent!r}): give an agents.Agent")
    return AgentGuard(**settings).guarded(agent)


# ---- The guard around function tools: the SDK's own guardrails, before a tool runs and after it has answered.
#
# A guardrail refuses with a text and leaves approvals alone. ``agents`` puts them on each tool that an agent offers.


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


def receivedguarded_by(tool: Any) -> frozenset[str] | None:
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
    turn.uses[use.id] = use
    run.tools.inside(use).__enter__()
    return ToolGuardrailFunctionOutput.allow()


async def _after(data: ToolOutputGuardrailData) -> ToolGuardrailFunctionOutput:
    """Report the answer. One that is too large is left out."""
    found = await _run_of(data)
    if found is None:
        return ToolGuardrailFunctionOutput.allow()
    turn, run = found
    name = data.context.tool_call_id
    use, raised = turn.uses.pop(name, None) or _use(data, turn), turn.errors.pop(name, None)
    error = as_failure(raised, data.output) if raised is not None else None
    if error is not None:
        run.tools.raised(use, error)
        note = run.guard.faults.attempt("adapter", left_out, run.layers, use, data.output)
    else:
        note = run.tools.answered(use, data.output if raised is None else f"Error: {raised}")
    return ToolGuardrailFunctionOutput.allow() if note is None else ToolGuardrailFunctionOutput.reject_content(note)


_BEFORE: Final = ToolInputGuardrail[Any](_before, name="runguard")
_AFTER: Final = ToolOutputGuardrail[Any](_after, name="runguard")
