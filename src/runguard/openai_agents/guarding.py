"""``guarded``: a copy of an agent, and of all agents that it can reach, with a guard around models and tools."""

import copy
import logging
from types import CellType, FunctionType
from typing import Any, Final, Unpack

from agents import Agent, AgentHooks, FunctionTool, Handoff
from agents.models.interface import Model, ModelProvider
from agents.models.multi_provider import MultiProvider
from agents.run_context import TContext

from runguard.calls.model_calls import ToolUse
from runguard.calls.run import fitting
from runguard.core.errors import PolicyError
from runguard.engine.guard import Controls, Guard
from runguard.openai_agents.model import GuardedModel
from runguard.openai_agents.replaced_models import report, watch
from runguard.openai_agents.runs import Runs
from runguard.policy.settings import Policy, PolicySettings
from runguard.providers.messages import arguments
from runguard.termination.conditions import TerminationCondition

_log: Final = logging.getLogger("runguard")
_PARTS: Final = ("model", "hooks", "tools", "handoffs")  # of an agent, which the guard is put around
watch()


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
        self.guard = Guard(Policy.build(**policy), gives_last_answers=True)
        self.guard.check_store()
        condition = fitting(termination_condition, "OpenAI Agents", has_hand_offs=True)
        self._runs = Runs(self.guard, {"app": app, "user": user, "session": session, "condition": condition})
        self._copies: dict[
            int, tuple[Agent[Any], GuardedAgent[Any]]
        ] = {}  # by identity of the original, which is kept alive
        self._provider = model_provider if model_provider is not None else MultiProvider()

    def guarded(self, agent: Agent[TContext]) -> "GuardedAgent[TContext]":
        """A guarded copy of ``agent``. Agents that hand off to each other are copied once."""
        known = self._copies.get(id(agent))
        if known is not None:
            return known[1]
        if isinstance(agent, GuardedAgent):
            return agent
        kind: Any = type(f"Guarded{type(agent).__name__}", (GuardedAgent, type(agent)), {})
        made: Any = kind.__new__(kind)
        vars(made).update(vars(agent))
        self._copies[id(agent)] = (agent, made)
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
        return GuardedModel(inner, model, self.guard, self._runs)

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
        made.on_invoke_tool = _GuardedInvoker(tool.name, inner, self._runs)
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


class _GuardedInvoker:
    """Calls a tool if the guard allows it. Otherwise the model gets the reason as the answer."""

    def __init__(self, name: str, inner: Any, runs: Runs) -> None:
        self._name, self._inner, self._runs = name, inner, runs

    async def __call__(self, context: Any, args: str) -> Any:
        agent = getattr(context.agent, "name", "") or "agent"
        run = self._runs.of(context, agent)
        use = ToolUse(context.tool_call_id, self._name, arguments(args))
        refusal = await run.tools.check(use)
        if refusal is not None:
            return refusal
        try:
            with run.tools.inside(use):
                result = await self._inner(context, args)
        except BaseException as error:
            run.tools.raised(use, error)
            raise
        note = run.tools.answered(use, result)
        return result if note is None else note


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
    return made
