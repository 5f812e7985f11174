"""The kill switch: who is stopped, by whom and why. Kept with the accounts, so that every worker of a store sees it."""

import json
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from runguard.core.exceptions import PolicyError

ALL: Final = "all"
_KINDS: Final = ("all", "app:…", "user:app/user", "session:app/user/session", "run:…")


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop in force."""

    scope: str
    actor: str
    reason: str
    at: float

    @property
    def because(self) -> str:
        """The reason as the end of a sentence; nothing where none was given."""
        return f": {self.reason}" if self.reason else ""


class Switch:
    """The stops in force, and how to change them."""

    def __init__(self) -> None:
        self.stops: dict[str, Stop] = {}
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a method after every change, as long as its object lives."""
        self._listeners = [*(known for known in self._listeners if known() is not None), weakref.WeakMethod(listener)]

    def of(self, scopes: Iterable[str]) -> Stop | None:
        """The stop that covers one of these scopes."""
        if not self.stops:
            return None
        return self.stops.get(ALL) or next((self.stops[scope] for scope in scopes if scope in self.stops), None)

    def load(self, text: str) -> None:
        """Take over the stops of a control document that the ledger has checked."""
        self.stops = read_stops(text)
        for known in self._listeners:
            listener = known()
            if listener is not None:
                listener()


def read_stops(text: str) -> dict[str, Stop]:
    """The stops of a control document; one of the wrong shape raises ``ValueError``, ``TypeError`` or
    ``AttributeError``.
    """
    stops = {scope: Stop(scope, **fields) for scope, fields in (json.loads(text or "{}").get("stops") or {}).items()}
    for stop in stops.values():
        if not (isinstance(stop.actor, str) and isinstance(stop.reason, str) and isinstance(stop.at, int | float)):
            raise ValueError(f"the stop of {stop.scope} needs an actor, a reason and a time")
    return stops


def with_stops(text: str, stops: dict[str, Stop]) -> str:
    """A control document with other stops and everything else as it was."""
    document = json.loads(text or "{}")
    document["stops"] = {
        scope: {k: v for k, v in asdict(stop).items() if k != "scope"} for scope, stop in stops.items()
    }
    return json.dumps(document, sort_keys=True)


_PARTS: Final = {"app": 1, "run": 1, "user": 2, "session": 3}


def check_scope(scope: Any) -> str:
    """Check that a scope can be stopped; an incomplete one would stop nothing."""
    kind, _, names = scope.partition(":") if isinstance(scope, str) else ("", "", "")
    if scope == ALL or (kind in _PARTS and len(names.split("/")) == _PARTS[kind] and all(names.split("/"))):
        return str(scope)
    raise PolicyError(f"{scope!r} cannot be stopped; give one of {', '.join(_KINDS)}")


def check_actor(actor: Any) -> str:
    if not isinstance(actor, str) or not actor.strip():
        raise PolicyError("actor: say who stops, such as actor='ops'")
    return actor


def check_reason(reason: Any) -> str:
    """A reason may be left out."""
    if reason is not None and not isinstance(reason, str):
        raise PolicyError(f"reason: give a text, not a {type(reason).__name__}")
    return reason if reason and reason.strip() else ""
