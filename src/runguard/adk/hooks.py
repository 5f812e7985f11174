"""The outermost line of every hook of ADK.

ADK ends a run when a hook of a plugin raises. So only a deliberate end of the run leaves a hook (``Halt``, which is not
an ``Exception``). A failure of RunGuard is counted and logged, and ``on_guard_error`` decides the answer of the hook.
Where ``install()`` has replaced a policy, the plugin of the run answers the hook.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from runguard.adk.generations import invocation_of

_Hook = TypeVar("_Hook", bound=Callable[..., Coroutine[Any, Any, Any]])


def hook(function: _Hook) -> _Hook:
    """Wrap a hook. The object's ``instead_of`` gives the answer when the hook fails."""
    name = function.__name__.removesuffix("_callback")

    @wraps(function)
    async def outermost(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            generations = getattr(self, "generations", None)
            if generations is not None and (other := generations.of(invocation_of(kwargs))) is not self:
                return await getattr(other, function.__name__)(*args, **kwargs)
            return await function(self, *args, **kwargs)
        except Exception as error:
            return self.instead_of(name, error, *args, *kwargs.values())

    return outermost  # type: ignore[return-value]
