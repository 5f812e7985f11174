"""The outermost line of every hook of ADK.

ADK ends a run when a hook of a plugin raises. So nothing but a deliberate end of the run (``Halt``, no ``Exception``)
leaves a hook: a fault of RunGuard is counted and logged, and ``on_guard_error`` says what ADK gets instead of an
answer. Where ``install()`` has replaced a policy, the hook is answered by the plugin whose run it is called for.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from runguard.adk.generations import invocation_of

_Hook = TypeVar("_Hook", bound=Callable[..., Coroutine[Any, Any, Any]])


def hook(function: _Hook) -> _Hook:
    """For a method of an object whose ``instead_of`` says what ADK gets."""
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
