"""The control document: stops of the kill switch and breakers of tools, shared by every worker of a store.

It is read when its version changes and replaced by compare-and-set. A document that cannot be read is a fault of the
store: it may hold a stop. A ledger in memory keeps the same document for its own process.
"""

import json
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from runguard.core.breaker import Breaker
from runguard.core.errors import PolicyError
from runguard.ledger.store import StoreError, StoreOutage, StoreSession
from runguard.ledger.store_faults import store_faults

_CONTROL: Final = "control"
_TRIES: Final = 20
ALL: Final = "all"
_KINDS: Final = ("all", "app:…", "user:app/user", "session:app/user/session", "run:…")
_PARTS: Final = {"app": 1, "run": 1, "user": 2, "session": 3}


# ---- the document ---------------------------------------------------------------------------------------------------


def read_control(session: StoreSession, store: str) -> tuple[int, str]:
    """The version and the text of the document, checked. ``store`` is the store's name, for the message."""
    version, text = session.get(_CONTROL)
    if (version, text) == (0, ""):
        return 0, ""
    try:
        if type(version) is not int or type(text) is not str:
            raise ValueError(f"version {version!r} with {type(text).__name__} for a text")
        read_stops(text)
        for state in (json.loads(text).get("breakers") or {}).values():
            Breaker().load(state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise StoreError(
            f"{store}: the control document is damaged ({why}). It holds the stops of the kill switch and the "
            "breakers. "
            "Restore the store from a backup, or remove the document: runguard store repair"
        ) from error
    return version, text


def repair_control(session: StoreSession, store: str) -> str:
    """Remove the document if it is damaged; returns what was wrong, or "" when it is not."""
    try:
        with store_faults(store):
            read_control(session, store)
    except StoreError as error:
        session.drop(_CONTROL)
        return str(error)
    return ""


def change_control(session: StoreSession, store: str, change: Callable[[str], str]) -> str:
    """Change the document, also while others do so at the same time; returns the new text."""
    for _ in range(_TRIES):
        version, text = read_control(session, store)
        changed = change(text)
        if changed == text or session.put(_CONTROL, version, changed):
            return changed
    raise StoreOutage(f"{store}: too many workers change the control document at the same time")


def change_document(session: StoreSession, store: str, change: Callable[[dict[str, Any]], None]) -> None:
    """``change_control`` for callers that change the parsed document in place."""

    def changed(text: str) -> str:
        document = json.loads(text or "{}")
        change(document)
        return json.dumps(document, sort_keys=True)

    change_control(session, store, changed)


# ---- the kill switch ------------------------------------------------------------------------------------------------


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
