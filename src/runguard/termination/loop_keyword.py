"""The keyword ``termination_condition`` of ADK's LoopAgent: ``runguard.install()`` adds it; without that, its error
says what to do.

LoopAgent forbids unknown keywords, and pydantic builds its error without asking the value. So the only place for a hint
is LoopAgent's constructor. It is wrapped when the first condition is made and ADK is loaded. The wrapper changes
nothing but calls with that keyword, which fail without it. Before the first condition is made, the error is pydantic's.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from runguard.core.errors import PolicyError

KEYWORD: Final = "termination_condition"
_MODULE: Final = "google.adk.agents.loop_agent"
_INIT: Final = "__init__"


class NotInstalledError(PolicyError, ValueError):
    """The keyword was used without ``runguard.install()``.

    A ValueError, like ADK's own error for unknown keywords.
    """


class LoopKeyword:
    """``accept`` receives the agent and its condition; None while no guard is installed."""

    def __init__(self) -> None:
        self.accept: Callable[[Any, Any], object] | None = None
        self._kind: Any = None
        self._original: Any = None

    def put_on(self) -> None:
        """Wrap LoopAgent's constructor, if ADK is loaded and does not have this keyword."""
        if self._kind is not None:
            return
        kind = getattr(sys.modules.get(_MODULE), "LoopAgent", None)
        if kind is None or KEYWORD in kind.model_fields:
            return
        original, keyword = getattr(kind, _INIT), self

        @wraps(original)
        def begin(self: Any, *args: Any, **kwargs: Any) -> None:
            if KEYWORD not in kwargs or KEYWORD in type(self).model_fields:  # a subclass may have a field of this name
                original(self, *args, **kwargs)
                return
            condition = kwargs.pop(KEYWORD)
            if condition is not None and keyword.accept is None:
                raise NotInstalledError(
                    f"LoopAgent({KEYWORD}=…): google-adk has no such keyword; call runguard.install() before "
                    "building the agent, "
                    "or leave the keyword out and wrap the agent: runguard.adk.terminate(loop_agent, condition)"
                )
            original(self, *args, **kwargs)
            if condition is not None and keyword.accept is not None:
                keyword.accept(self, condition)

        self._kind, self._original = kind, original
        setattr(kind, _INIT, begin)

    def take_off(self) -> None:
        """Unwrap the constructor, unless other code has wrapped it since.

        The next condition adds the hint again.
        """
        self.accept = None
        if self._kind is not None and getattr(getattr(self._kind, _INIT), "__wrapped__", None) is self._original:
            setattr(self._kind, _INIT, self._original)
            self._kind = self._original = None


LOOP_KEYWORD: Final = LoopKeyword()
