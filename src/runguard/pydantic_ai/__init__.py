"""RunGuard for Pydantic AI: a capability of an agent."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.pydantic_ai.capability import RunGuard

_HOMES = {"RunGuard": "runguard.pydantic_ai.capability"}

__all__ = ["RunGuard"]

__getattr__, __dir__ = lazy(__name__, _HOMES)

if find_spec("pydantic_ai") is None:
    raise ImportError("runguard.pydantic_ai needs pydantic-ai: pip install 'runguard-agents[pydantic-ai]'")
