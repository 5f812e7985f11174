"""The type of a function that ``guard`` and ``guard_async`` return: called like the function, with controls beside."""

from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

from runguard.core.decision import Trip
from runguard.core.money import BudgetStatus
from runguard.functions.caller import Caller
from runguard.ledger.ledger import Stop

_P = ParamSpec("_P")
_Rest = ParamSpec("_Rest")
_R_co = TypeVar("_R_co", covariant=True)
_T = TypeVar("_T")


class GuardedFunction(Protocol[_P, _R_co]):
    """A guarded function. Its controls are those of its ``Caller``; type checkers and editors read them here."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]
    __runguard__: Caller
    trips: deque[Trip]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    # A method is bound to its object: the call is written without "self". The last form is for static methods.
    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(
        self: "GuardedFunction[Concatenate[_T, _Rest], _R_co]", instance: _T, owner: type[_T]
    ) -> "GuardedFunction[_Rest, _R_co]": ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> "GuardedFunction[..., _R_co]": ...

    def spend(self, scope: str | None = None) -> dict[str, Any]: ...
    def budgets(self, scope: str | None = None) -> list[BudgetStatus]: ...
    def extend(
        self, scope: str | None = None, *, usd: Any = None, tokens: Any = None, calls: Any = None
    ) -> list[BudgetStatus]: ...
    def stop(self, scope: str, *, actor: str, reason: str | None = None) -> None: ...
    def resume(self, scope: str) -> None: ...
    def stops(self) -> list[Stop]: ...
    def snapshot(self) -> dict[str, Any]: ...
    def flush(self, seconds: float = 2.0) -> bool: ...
    def reset(self) -> None: ...
