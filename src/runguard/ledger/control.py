"""The control document: stops of the kill switch and breakers of tools, shared by every worker of a store.

It is read when its version changes and replaced by compare-and-set. A document that cannot be read is a fault of the
store: it may hold a stop.
"""

import json
from collections.abc import Callable
from typing import Any, Final

from runguard.core.breaker import Breaker
from runguard.ledger.kill_switch import read_stops
from runguard.ledger.store import StoreError, StoreOutage, StoreSession
from runguard.ledger.store_faults import store_faults

_CONTROL: Final = "control"
_TRIES: Final = 20


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
