"""Side effects that happen once per session. With a shared store, once over all workers.

What this process has done is known at once. The claim of a side effect in a shared store is awaited.
"""

import asyncio
import logging
import threading
from concurrent.futures import Future
from typing import Final

from runguard.core.events import RunInfo
from runguard.core.identity import Newest
from runguard.core.money import scope_part
from runguard.ledger.ledger import Ledger, StoreError, StoreOutage, StoreSession

_log: Final = logging.getLogger("runguard")
_SESSIONS_KEPT: Final = 10_000
_ONCE_PER_SESSION: Final = 1_000
_FINISH_S: Final = 5.0


class Once:
    """The side effects that were done in each session."""

    def __init__(self, ledger: Ledger, claim_seconds: float) -> None:
        self._ledger, self._claim_seconds = ledger, claim_seconds
        self._finishing: dict[str, Future[None]] = {}  # not written to the store yet
        self._done = Newest[tuple[str, str, str], Newest[bytes, None]](_SESSIONS_KEPT)
        self._lock = threading.Lock()

    def share(self, other: "Once") -> None:
        """Know what another guard knows."""
        self._done, self._lock, self._finishing = other._done, other._lock, other._finishing

    def is_done(self, info: RunInfo, call: bytes) -> bool:
        return call in self._done.get((info.app, info.user, info.session), ())

    async def claim(self, info: RunInfo, call: bytes) -> bool | None:
        """Whether this worker may do it; None when the store does not answer."""
        if not self._ledger.is_shared:
            return True
        answer: list[str] = []
        last = self._finishing.get(_claim_key(info, call))
        if last is not None:  # the last attempt here is over: the store must learn that first
            await asyncio.wait((asyncio.wrap_future(last),), timeout=_FINISH_S)
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
        key, written = _claim_key(info, call), Future[None]()
        self._finishing[key] = written

        def write(session: StoreSession) -> None:
            try:
                session.finish(key, done)
            except StoreOutage:
                raise  # the ledger tries again
            except BaseException:
                self._finished(key, written)
                raise
            self._finished(key, written)

        self._ledger.tell(write)

    def _finished(self, key: str, written: "Future[None]") -> None:
        if self._finishing.get(key) is written:
            del self._finishing[key]
        written.set_result(None)

    def _remember(self, info: RunInfo, call: bytes) -> None:
        key = (info.app, info.user, info.session)
        with self._lock:
            done = self._done.setdefault(key, Newest(_ONCE_PER_SESSION))
            self._done.move_to_end(key)
            done[call] = None


def _claim_key(info: RunInfo, call: bytes) -> str:
    return f"{scope_part(info.app)}/{scope_part(info.user)}/{scope_part(info.session)}/{call.hex()}"
