"""What runs share beyond money: breakers of tools, and side effects that happen once. With a shared store, all workers
share it.

Local copies answer at once. What changes goes to the store in order with everything else; what others changed comes
back with the next reservation. Only two things are awaited, both rare: the one probe of an open breaker, and the claim
of a side effect.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final

from runguard.core.breaker import Breaker, BreakerState, Permit
from runguard.core.events import RunInfo
from runguard.core.scope import scope_part
from runguard.ledger.base import Ledger
from runguard.ledger.control import change_document
from runguard.ledger.store import Session, StoreError, StoreOutage

_log: Final = logging.getLogger("runguard")
_TOOLS_KEPT: Final = 4_096
_SESSIONS_KEPT: Final = 10_000
_ONCE_PER_SESSION: Final = 1_000
_FINISH_S: Final = 5.0


class Breakers:
    """One per tool, made with its first hard failure."""

    def __init__(self, ledger: Ledger, threshold: int, reset_after_s: float, min_runs: int) -> None:
        self._ledger, self._threshold, self._reset_after_s, self._min_runs = ledger, threshold, reset_after_s, min_runs
        self._tools: OrderedDict[str, Breaker] = OrderedDict()
        self._lock = threading.Lock()
        self.on_change: Callable[[str, bool], None] | None = None  # told when one opens or closes here

    def share(self, other: "Breakers") -> None:
        """Work on the same breakers as another guard. Those that exist keep their thresholds."""
        self._tools, self._lock = other._tools, other._lock

    def get(self, tool: str) -> Breaker | None:
        return self._tools.get(tool)

    def items(self) -> Iterable[tuple[str, Breaker]]:
        return list(self._tools.items())

    def _made(self, tool: str) -> Breaker:
        with self._lock:
            breaker = self._tools.get(tool)
            if breaker is None:
                breaker = self._tools[tool] = self._new()
                if len(self._tools) > _TOOLS_KEPT:
                    self._tools.popitem(last=False)
            return breaker

    def _new(self) -> Breaker:
        return Breaker(threshold=self._threshold, min_runs=self._min_runs, reset_after_s=self._reset_after_s)

    def load(self, document: dict[str, Any]) -> None:
        """What the store says: the state of every breaker that others or we have changed."""
        for tool, state in (document.get("breakers") or {}).items():
            self._made(tool).load(state)

    async def claim_probe(self, tool: str, at: float) -> Permit | None:
        """The one probe across all workers, or None when it is not due or somebody else has it."""
        breaker = self._tools.get(tool)
        if (
            breaker is None
            or not self._ledger.is_shared
            or breaker.state(self._ledger.now(at)) is not BreakerState.HALF_OPEN
        ):
            return None
        permit: list[Permit | None] = [None]
        state: dict[str, Any] = {}

        def claim(session: Session) -> None:
            def change(document: dict[str, Any]) -> None:
                theirs = self._theirs(document, tool)
                permit[0] = theirs.admit(session.now())
                state.update(theirs.dump())
                if permit[0] is not None:  # else nothing has changed, and nobody has to read it again
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
        def tell(session: Session) -> None:
            def both(document: dict[str, Any]) -> None:
                theirs = self._theirs(document, tool)
                change(theirs, session.now())
                document["breakers"][tool] = theirs.dump()

            change_document(session, self._ledger.name, both)

        self._ledger.tell(tell)

    def _theirs(self, document: dict[str, Any], tool: str) -> Breaker:
        breaker = self._new()
        breaker.load(document.setdefault("breakers", {}).get(tool) or {})
        return breaker


class Once:
    """Side effects that were done in a session and must not be done again."""

    def __init__(self, ledger: Ledger, claim_seconds: float) -> None:
        self._ledger, self._claim_seconds = ledger, claim_seconds
        self._finishing: dict[str, Future[None]] = {}  # what the store has not heard yet
        self._done: OrderedDict[tuple[str, str, str], OrderedDict[bytes, None]] = OrderedDict()
        self._lock = threading.Lock()

    def share(self, other: "Once") -> None:
        """Know what another guard knows."""
        self._done, self._lock, self._finishing = other._done, other._lock, other._finishing

    def is_done(self, info: RunInfo, call: bytes) -> bool:
        return call in self._done.get((info.app, info.user, info.session), ())

    async def claim(self, info: RunInfo, call: bytes) -> bool | None:
        """Whether this worker may do it; None when the store cannot say."""
        if not self._ledger.is_shared:
            return True
        answer: list[str] = []
        told = self._finishing.get(_claim_key(info, call))
        if told is not None:  # our own last attempt is over, and the store has to hear that first
            await asyncio.wait((asyncio.wrap_future(told),), timeout=_FINISH_S)
        try:
            await self._ledger.ask(
                lambda session: answer.append(session.claim(_claim_key(info, call), self._claim_seconds)), again=True
            )
        except (StoreOutage, StoreError):
            _log.warning(
                "runguard.once_unsure: the store does not answer, so a side effect may have been made by another worker"
            )
            return None
        if answer == ["done"]:
            self._remember(info, call)
        return answer == ["yes"]

    def settle(self, info: RunInfo, call: bytes, done: bool) -> None:
        if done:
            self._remember(info, call)
        if not self._ledger.is_shared:
            return
        key, heard = _claim_key(info, call), Future[None]()
        self._finishing[key] = heard

        def tell(session: Session) -> None:
            try:
                session.finish(key, done)
            except StoreOutage:
                raise  # told again
            except BaseException:
                self._heard(key, heard)
                raise
            self._heard(key, heard)

        self._ledger.tell(tell)

    def _heard(self, key: str, heard: "Future[None]") -> None:
        if self._finishing.get(key) is heard:
            del self._finishing[key]
        heard.set_result(None)

    def _remember(self, info: RunInfo, call: bytes) -> None:
        key = (info.app, info.user, info.session)
        with self._lock:
            done = self._done.setdefault(key, OrderedDict())
            self._done.move_to_end(key)
            done[call] = None
            if len(done) > _ONCE_PER_SESSION:
                done.popitem(last=False)
            if len(self._done) > _SESSIONS_KEPT:
                self._done.popitem(last=False)


def _claim_key(info: RunInfo, call: bytes) -> str:
    return f"{scope_part(info.app)}/{scope_part(info.user)}/{scope_part(info.session)}/{call.hex()}"
