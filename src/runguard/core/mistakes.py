"""Mistakes in settings: the known name that is nearest to a wrong one, and one kind of error for all of them."""

import inspect
from abc import ABCMeta
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from runguard.core.exceptions import PolicyError


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5, shown: int | None = None) -> str:
    """Return the hint after an unknown name: the nearest known name, or the first ``shown`` names (None: all)."""
    known = list(known)
    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    if close:
        return f"did you mean '{close[0]}'?"
    if shown == 0:
        return ""
    more = f" and {len(known) - shown} more" if shown is not None and len(known) > shown else ""
    return f"known: {', '.join(known[:shown]) or 'none'}{more}"


class Checked(type):
    """The metaclass of a class of settings: a wrong keyword raises ``PolicyError`` instead of ``TypeError``."""

    if not TYPE_CHECKING:  # type checkers read the signature of the class

        def __call__(cls, *args: Any, **keywords: Any) -> Any:
            try:
                return super().__call__(*args, **keywords)
            except TypeError:
                _explain(cls, args, keywords)
                raise

        @property
        def __signature__(cls) -> inspect.Signature:
            """``inspect`` and ``help`` show the settings, not the arguments of the call above."""
            signature = inspect.signature(cls.__new__ if cls.__init__ is object.__init__ else cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


class CheckedABC(Checked, ABCMeta):
    """The same for abstract classes."""


def _explain(cls: type, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    known = inspect.signature(cls).parameters
    kinds = {parameter.kind for parameter in known.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return  # every name is possible
    names = [name for name, one in known.items() if one.kind is not inspect.Parameter.VAR_POSITIONAL]
    for name in keywords:
        if name not in names:
            raise PolicyError(f"{cls.__name__}.{name}: no such setting; {nearest(name, names)}") from None
    positional = [name for name in names if known[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise PolicyError(too_many(cls, len(positional), names)) from None
    given = {*positional[: len(args)], *keywords}
    for name in names:
        if known[name].default is inspect.Parameter.empty and name not in given:
            raise PolicyError(f"{cls.__name__}.{name}: missing") from None


def too_many(cls: type, allowed: int, names: Sequence[str]) -> str:
    """The message about more settings without a name than there are."""
    example = f"{cls.__name__}({names[0]}=…)" if names else f"{cls.__name__}()"
    return f"{cls.__name__} takes {allowed or 'no'} settings without a name; write {example}"
