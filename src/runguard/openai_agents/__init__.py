"""RunGuard for the OpenAI Agents SDK: a guarded copy of an agent and of all agents that it can reach."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.openai_agents.guarding import AgentGuard, guarded

_HOMES = {"AgentGuard": "runguard.openai_agents.guarding", "guarded": "runguard.openai_agents.guarding"}

__all__ = ["AgentGuard", "guarded"]

__getattr__, __dir__ = lazy(__name__, _HOMES)

if find_spec("agents") is None:
    raise ImportError("runguard.openai_agents needs openai-agents: pip install 'runguard-agents[openai-agents]'")
