"""The adapter for the LiteLLM proxy: one callback guards every program behind it."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.litellm.callback import RunGuardGateway as RunGuardGateway

__all__ = ["RunGuardGateway"]

__getattr__, __dir__ = lazy("runguard.litellm", {"RunGuardGateway": "runguard.litellm.callback"})

if find_spec("litellm") is None:
    raise ImportError("runguard.litellm needs litellm: pip install 'litellm[proxy]'")
