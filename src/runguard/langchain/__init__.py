"""RunGuard for LangChain and LangGraph: a middleware for agents, and a guarded chat model for graphs of your own."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.langchain.chat_model import GuardedChatModel
    from runguard.langchain.middleware import RunGuardMiddleware

_HOMES = {
    "GuardedChatModel": "runguard.langchain.chat_model",
    "RunGuardMiddleware": "runguard.langchain.middleware",
}

__all__ = ["GuardedChatModel", "RunGuardMiddleware"]

__getattr__, __dir__ = lazy(__name__, _HOMES)

if find_spec("langchain_core") is None:
    raise ImportError("runguard.langchain needs langchain: pip install 'runguard-agents[langchain]'")
