"""Agents of LangChain, the OpenAI Agents SDK and Pydantic AI: is each guarded, and what does its framework hide?

A class is looked up only where the application has imported it, so this module imports no framework.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from runguard.cli.doctor.environment import CheckResult
from runguard.cli.doctor.reachable import is_of_framework, reachable
from runguard.policy.settings import Policy

_LINES: Final = 20  # of one kind
_UNNAMED: Final = "LangGraph"  # the name of a graph that was given none
_HOSTED: Final = ("WebSearchTool", "FileSearchTool", "CodeInterpreterTool", "ImageGenerationTool", "HostedMCPTool")


@dataclass(slots=True)
class FoundAgent:
    """An agent that the application can run."""

    name: str
    kind: str
    do: str  # how to guard it
    guard: Any = None  # the adapter that guards it
    calls_models: bool = True
    used_by: str = ""
    models: list[str] = field(default_factory=list)
    hidden: list[tuple[str, str]] = field(default_factory=list)  # what the guard cannot see, and what to do

    @property
    def is_guarded(self) -> bool:
        return self.guard is not None


def find_agents(root: object, target: str) -> tuple[FoundAgent | None, list[FoundAgent]]:
    """``root``, if it is an agent of a known framework, and all other agents that it can call."""
    first: FoundAgent | None = None
    others: list[FoundAgent] = []
    seen, waiting = {id(root)}, [(root, target)]
    while waiting:
        one, name = waiting.pop(0)
        ends = list(_ends(one))
        agent = _examined(one, ends)
        if agent is not None:
            agent.name = agent.name or (target if one is root else "without a name")
            agent.used_by, name = name, agent.name
            if one is root:
                first = agent
            else:
                others.append(agent)
        for end in ends:
            if id(end) not in seen and _kind(end):
                seen.add(id(end))
                waiting.append((end, name))
    return first, others


def agent_lines(target: str, root: FoundAgent | None, agents: list[FoundAgent]) -> list[CheckResult]:
    """One line for the agent that ``target`` names, and one for each other agent that is not guarded."""
    lines = [] if root is None else [_root_line(target, root)]
    agents = [agent for agent in agents if agent.calls_models]
    unguarded = [agent for agent in agents if not agent.is_guarded]
    for agent in unguarded[:_LINES]:
        found = f"{agent.kind} agent {agent.name}, which {agent.used_by} can call, is not guarded"
        lines.append(CheckResult("sub-agents", "problem", found, agent.do))
    if agents and not unguarded:
        many = f"the {len(agents)} agents" if len(agents) > 1 else f"the agent {agents[0].name}"
        lines.append(CheckResult("sub-agents", "ok", f"{many} that {target} can call: guarded"))
    for agent in agents if root is None else [root, *agents]:
        lines += _hidden_lines(agent) if agent.is_guarded else []
    return lines


def _root_line(target: str, root: FoundAgent) -> CheckResult:
    if not root.calls_models:
        return CheckResult("guard", "ok", f"{target} is a {root.kind} graph that calls no chat model of its own")
    if root.is_guarded:
        by = type(root.guard).__name__
        return CheckResult("guard", "ok", f"{target} is a {root.kind} agent, guarded by {by}")
    return CheckResult("guard", "problem", f"{target} is a {root.kind} agent and is not guarded", root.do)


def _hidden_lines(agent: FoundAgent) -> list[CheckResult]:
    return [
        CheckResult("hidden", "warning", f"{agent.name}: {what}", do)
        for what, do in list(dict.fromkeys(agent.hidden))[:_LINES]
    ]


def model_names(agents: list[FoundAgent]) -> list[str]:
    return [name for agent in agents for name in agent.models if name]


def policy_of(agents: list[FoundAgent]) -> Policy | None:
    """The settings of the first guard."""
    guards = (agent.guard for agent in agents if agent.guard is not None)
    found: Policy | None = next((guard.guard.policy for guard in guards), None)
    return found


# ---- frameworks -----------------------------------------------------------------------------------------------------


def _ends(one: object) -> Iterator[Any]:
    yield from reachable(one, lambda other: _is_end(other) or _is_middleware(other), _is_end)
    if _kind(one) == "OpenAI" and (guard := getattr(one, "runguard", None)) is not None:
        for hand_off in getattr(one, "handoffs", ()):  # such an object makes the guarded copy when it is used
            reference = getattr(hand_off, "_agent_ref", None)
            if reference is not None and (target := reference()) is not None:
                yield guard.guarded(target)


def _is_end(one: object) -> bool:
    return _kind(one) != "" or _is_chat_model(one)


def kind_of(loaded: object) -> str:
    """The framework other than ADK whose agent this is, or ""."""
    kind = _kind(loaded)
    return "" if kind == "ADK" else kind


def _kind(one: object) -> str:
    """The framework of an agent, "" for any other object."""
    if isinstance(one, _class("langgraph.pregel", "Pregel")):
        return "LangChain"
    if isinstance(one, _class("agents", "Agent")):
        return "OpenAI"
    if isinstance(one, _class("pydantic_ai.agent", "AbstractAgent")):
        return "Pydantic AI"
    return "ADK" if isinstance(one, _class("google.adk.runners", "Runner")) else ""


def _examined(one: Any, ends: list[Any]) -> FoundAgent | None:
    examine = {"LangChain": _graph, "OpenAI": _openai, "Pydantic AI": _pydantic, "ADK": _runner}.get(_kind(one))
    return examine(one, ends) if examine is not None else None


def _graph(graph: Any, ends: list[Any]) -> FoundAgent:
    do = "give the agent the same RunGuardMiddleware, or wrap the chat model of a graph in GuardedChatModel"
    name = str(getattr(graph, "name", ""))
    found = FoundAgent("" if name == _UNNAMED else name, "LangChain", do)
    own, guarded_model = _class("runguard.langchain.guarding", "RunGuardMiddleware"), _guarded_model()
    hooks = [getattr(getattr(node, "bound", None), "func", None) for node in graph.nodes.values()]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    found.guard = next((owner for owner in owners if isinstance(owner, own)), None)
    models = [end for end in ends if _is_chat_model(end)]
    found.models = [_model_name(model) for model in models]
    found.calls_models = bool(models)
    if not found.is_guarded and models and all(isinstance(model, guarded_model) for model in models):
        found.guard = models[0]
    for caller, model in _models_aside(graph, [end for end in ends if _is_middleware(end)]):
        if not isinstance(model, guarded_model):
            what = f"{caller} calls the model {_model_name(model) or type(model).__name__} itself, unseen by the guard"
            found.hidden.append((what, "use GuardedChatModel(model, ...) there"))
    return found


def _models_aside(graph: Any, middleware: list[Any]) -> Iterator[tuple[str, Any]]:
    """Chat models that are called by something else than the agent: other middleware, or a tool."""
    for one in middleware:
        if _is_chat_model(model := getattr(one, "model", None)):
            yield type(one).__name__, model
    for node in graph.nodes.values():
        for tool in (getattr(getattr(node, "bound", None), "tools_by_name", None) or {}).values():
            code = getattr(tool, "func", None) or getattr(tool, "coroutine", None)
            if is_of_framework(getattr(code, "__module__", "")):  # such as the tool for sub-agents of deepagents
                continue
            for model in reachable(tool, _is_chat_model, _is_end):
                yield f"tool {tool.name}", model


def _openai(agent: Any, ends: list[Any]) -> FoundAgent:
    do = "guard the outermost agent: guarded(agent, ...); call an agent inside of a tool as guarded, too"
    found = FoundAgent(str(agent.name), "OpenAI", do, getattr(agent, "runguard", None))
    model = agent.model
    name = "name" if isinstance(model, _class("runguard.openai_agents.guarding", "GuardedModel")) else "model"
    found.models = [model if isinstance(model, str) else str(getattr(model, name, ""))]
    hosted = sorted({type(tool).__name__ for tool in agent.tools} & set(_HOSTED))
    if hosted:
        what = f"OpenAI executes {', '.join(hosted)}: the guard sees the tokens, not the calls"
        found.hidden.append((what, "limit them at the provider, or allow for their price in the limits"))
    return found


def _pydantic(agent: Any, ends: list[Any]) -> FoundAgent:
    do = "give the agent the same capability: Agent(..., capabilities=[guard])"
    while (inner := getattr(agent, "wrapped", None)) is not None:
        agent = inner
    found = FoundAgent(str(agent.name or ""), "Pydantic AI", do)
    capabilities = [getattr(agent, "root_capability", None)]
    for one in capabilities:
        capabilities += getattr(one, "capabilities", None) or ()
    own = _class("runguard.pydantic_ai.capability", "RunGuard")
    found.guard = next((one for one in capabilities if isinstance(one, own)), None)
    model = agent.model
    found.models = [model.rpartition(":")[2] if isinstance(model, str) else str(getattr(model, "model_name", ""))]
    if isinstance(model, _class("pydantic_ai.models.fallback", "FallbackModel")):
        found.models = [str(one.model_name) for one in model.models]
        found.hidden.append(("attempts inside FallbackModel are one call for the guard", ""))
    return found


def _runner(runner: Any, ends: list[Any]) -> FoundAgent:
    do = "create it with App(..., plugins=[RunGuardPlugin()]), or call runguard.install()"
    found = FoundAgent(str(getattr(runner, "app_name", "") or "Runner"), "ADK", do)
    own = _class("runguard.adk.plugin", "RunGuardPlugin")
    found.guard = next((one for one in runner.plugin_manager.plugins if isinstance(one, own)), None)
    patching = sys.modules.get("runguard.adk.patching")
    found.guard = found.guard or (patching.IN_USE.installed if patching is not None else None)
    return found


def _is_chat_model(one: object) -> bool:
    return isinstance(one, _class("langchain_core.language_models.chat_models", "BaseChatModel"))


def _is_middleware(one: object) -> bool:
    return isinstance(one, _class("langchain.agents.middleware.types", "AgentMiddleware"))


def _guarded_model() -> Any:
    return _class("runguard.langchain.guarding", "GuardedChatModel")


def _model_name(model: Any) -> str:
    inner = getattr(model, "_model", model) if isinstance(model, _guarded_model()) else model
    names = (getattr(inner, key, None) for key in ("model_name", "model", "model_id"))
    return next((name for name in names if isinstance(name, str)), "")


def _class(module: str, name: str) -> Any:
    """A class, for isinstance. An application that has not imported it has no instance of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else ()
