"""RunGuard for the OpenAI Agents SDK: a guarded copy of an agent and of all agents that it can reach."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.openai_agents.agents import AgentGuard, GuardedAgent, guarded

__all__ = ["AgentGuard", "GuardedAgent", "guarded"]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "runguard.openai_agents.agents"))

if find_spec("agents") is None:
    raise ImportError("runguard.openai_agents needs openai-agents: pip install 'runguard-agents[openai-agents]'")
