"""Breakers of tools, across runs. With a shared store, all workers share them.

The copy here answers at once. Changes go to the store in order with everything else, and what other workers changed
comes back with the next reservation. Only the one probe of an open breaker is awaited.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from runguard.core.breaker import Breaker, BreakerState, Permit
from runguard.core.identity import Newest
from runguard.ledger.ledger import Ledger, StoreError, StoreOutage, StoreSession, change_document

_TOOLS_KEPT: Final = 4_096


class Breakers:
    """One breaker per tool, made when the tool first raises or times out."""

    def __init__(self, ledger: Ledger, threshold: int, reset_after_s: float, min_runs: int) -> None:
        self._ledger, self._threshold, self._reset_after_s, self._min_runs = ledger, threshold, reset_after_s, min_runs
        self._tools = Newest[str, Breaker](_TOOLS_KEPT)
        self.get: Callable[[str], Breaker | None] = self._tools.get
        self._lock = threading.Lock()
        self.on_change: Callable[[str, bool], None] | None = None  # called when one opens or closes here

    def share(self, other: "Breakers") -> None:
        """Work on the same breakers as another guard. Those that exist keep their thresholds."""
        self._tools, self._lock, self.get = other._tools, other._lock, other.get

    def items(self) -> Iterable[tuple[str, Breaker]]:
        return list(self._tools.items())

    def _made(self, tool: str) -> Breaker:
        with self._lock:
            breaker = self._tools.get(tool)
            if breaker is None:
                breaker = self._tools[tool] = self._new()
            return breaker

    def _new(self) -> Breaker:
        return Breaker(threshold=self._threshold, min_runs=self._min_runs, reset_after_s=self._reset_after_s)

    def load(self, document: dict[str, Any]) -> None:
        """Take over the breakers of the store's control document: every one that a worker has changed."""
        for tool, state in (document.get("breakers") or {}).items():
            self._made(tool).load(state)

    async def claim_probe(self, tool: str, at: float) -> Permit | None:
        """The one probe across all workers, or None when it is not due or another worker has it."""
        breaker = self._tools.get(tool)
        if (
            breaker is None
            or not self._ledger.is_shared
            or breaker.state(self._ledger.now(at)) is not BreakerState.HALF_OPEN
        ):
            return None
        permit: list[Permit | None] = [None]
        state: dict[str, Any] = {}

        def claim(session: StoreSession) -> None:
            def change(document: dict[str, Any]) -> None:
                theirs = self._theirs(document, tool)
                permit[0] = theirs.admit(session.now())
                state.update(theirs.dump())
                if permit[0] is not None:  # else nothing has changed
                    document["breakers"][tool] = theirs.dump()

            change_document(session, self._ledger.name, change)

        try:
            await self._ledger.ask(claim)
        except (StoreOutage, StoreError):
            return None  # the local breaker decides
        breaker.load(state)  # what the store decided: no second probe from the copy here
        return permit[0]

    def report(self, tool: str, permit: Permit, ok: bool, at: float, run: str) -> None:
        breaker = self._tools.get(tool) if ok else self._made(tool)
        if breaker is None:
            return
        pristine, now = breaker.is_pristine, self._ledger.now(at)
        before = breaker.state(now)
        breaker.report(permit, ok, now, run)
        if (
            self.on_change is not None
            and (after := breaker.state(now)) is not before
            and BreakerState.HALF_OPEN is not after
        ):
            self.on_change(tool, after is not BreakerState.CLOSED)
        if self._ledger.is_shared and not (ok and pristine):
            self._share(
                tool, lambda theirs, now: theirs.report(permit if permit.probe else theirs.permit(), ok, now, run)
            )

    def release(self, tool: str, permit: Permit) -> None:
        breaker = self._tools.get(tool)
        if breaker is None:
            return
        breaker.release(permit)
        if self._ledger.is_shared and permit.probe:
            self._share(tool, lambda theirs, _: theirs.release(permit))

    def _share(self, tool: str, change: Callable[[Breaker, float], None]) -> None:
        def send(session: StoreSession) -> None:
            def both(document: dict[str, Any]) -> None:
                theirs = self._theirs(document, tool)
                change(theirs, session.now())
                document["breakers"][tool] = theirs.dump()

            change_document(session, self._ledger.name, both)

        self._ledger.tell(send)

    def _theirs(self, document: dict[str, Any], tool: str) -> Breaker:
        breaker = self._new()
        breaker.load(document.setdefault("breakers", {}).get(tool) or {})
        return breaker
