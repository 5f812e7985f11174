"""``guarded``: a copy of an agent, and of all agents that it hands over to, with a guard around models and tools.

Users call it. ``runner`` begins a turn, and the SDK then asks the copy for its tools and its model.
"""

import copy
import logging
import weakref
from operator import is_not
from typing import Any, Final, Unpack

from agents import Agent, Handoff
from agents.models.interface import Model
from agents.run_context import TContext

from runguard.calls.run import Spent, Whom, fitting
from runguard.calls.whom import Named
from runguard.core.errors import PolicyError, RunGuardError
from runguard.engine.guard import Controls, Guard
from runguard.openai_agents import runner
from runguard.openai_agents.models import guarded_model
from runguard.openai_agents.tools import guarded_tools, received_by
from runguard.openai_agents.turns import TURN, Bill
from runguard.policy.keywords import PolicySettings
from runguard.policy.settings import Policy
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
        self.guard = Guard(Policy.build(**policy), gives_last_answers=True)
        self.guard.check_store()
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
            self.handoffs = self.handoffs  # some may have been appended
        tools = guarded_tools(await super().get_all_tools(run_context), turn)
        if turn is not None:
            turn.offered = {name_of_tool(tool): received_by(tool) for tool in tools}
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
            if isinstance(agent, Agent) and (copied := _by(self.runguard_all, agent)) is not agent:
                tool = copy.copy(tool)
                tool._agent_instance = copied
            made.append(tool)
        return tools if all(one is other for one, other in zip(made, tools, strict=True)) else made

    def _handoff(self, target: Any) -> Any:
        if isinstance(target, Agent):
            return _by(self.runguard_all, target)
        if not isinstance(target, Handoff) or getattr(target, "runguard_all", None) == self.runguard_all:
            return target
        made: Any = copy.copy(target)
        invoke, guards = target.on_invoke_handoff, self.runguard_all

        async def guarded_target(context: Any, args: str) -> Any:
            return _by(guards, await invoke(context, args))

        made.on_invoke_handoff, made.runguard_all = guarded_target, guards
        agent = reference() if (reference := getattr(target, "_agent_ref", None)) is not None else None
        if isinstance(agent, Agent):  # a stored run goes on with the agent that this names
            made.runguard_target = _by(guards, agent)
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


def _by(guards: tuple[AgentGuard, ...], agent: Any) -> Any:
    for guard in reversed(guards):
        agent = guard.guarded(agent)
    return agent


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
