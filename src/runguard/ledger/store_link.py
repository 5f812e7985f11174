"""The way of this process to one store: a session for each thread, and whether the store is away."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Final

from runguard.ledger.identity import Seen, StoreReplacedError
from runguard.ledger.store import Store, StoreOutage, StoreSession
from runguard.ledger.store_faults import store_faults

_log: Final = logging.getLogger("runguard")
_REST_S: Final = 1.0  # after an outage no call waits for the store for this long


class StoreLink:
    """Shared by all threads of one ledger."""

    def __init__(self, store: Store, timeout: float) -> None:
        self.store, self.timeout, self.name = store, timeout, store.name
        # a store that wraps another one may have none
        self.seen: Seen = getattr(store, "seen", None) or Seen(store.name)
        self.outages = 0
        self.faults = 0  # exceptions that no store should raise
        self.is_away, self.down_until, self.era = False, 0.0, 0  # each outage begins an era with new sessions
        self._replaced: StoreReplacedError | None = None  # why the store is away, when another one took its place
        self.restart()

    def restart(self) -> None:
        """Also in a forked child: the connections stay with the parent."""
        self.local = threading.local()
        self._gate, self._inside, self._forking = threading.Condition(), 0, False

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def session(self) -> StoreSession:
        """This thread's connection; a new one when the store was away since it was made."""
        session: StoreSession | None = getattr(self.local, "session", None)
        if session is not None and self.local.era != self.era:
            self.drop_session()
            session = None
        self.local.is_new = session is None
        if session is None:
            self.local.era = self.era
            session = self.local.session = self.store.connect(self.timeout)
        return session

    @property
    def has_session(self) -> bool:
        """Whether this thread has a connection already."""
        return getattr(self.local, "session", None) is not None

    @property
    def session_is_new(self) -> bool:
        """Whether this thread's connection was made for the last use. An older one may have been cut while idle."""
        return getattr(self.local, "is_new", True)

    def drop_session(self) -> None:
        session, self.local.session = getattr(self.local, "session", None), None
        if session is not None:
            try:
                session.close()
            except BaseException:
                with contextlib.suppress(BaseException):
                    _log.debug("runguard.store_close: a broken connection could not be closed", exc_info=True)

    def fault(self) -> None:
        """An exception that no store should raise: the connection may be in any state."""
        self.faults += 1
        self.drop_session()

    # ---- outages ----------------------------------------------------------------------------------------------------

    def outage(self, error: Exception) -> None:
        self.outages += 1
        if isinstance(error, StoreReplacedError):
            if self._replaced is None:
                _log.error("runguard.store_replaced: %s", error)
            self._replaced = error
        elif not self.is_away:
            _log.error("runguard.store_outage: %s", error)
        if not self.is_away:
            self.is_away = True
            self.era += 1
        self.down_until = time.monotonic() + _REST_S

    def is_back(self) -> None:
        if self.is_away:
            self.is_away, self.down_until, self._replaced = False, 0.0, None
            _log.warning("runguard.store_back: %s answers again", self.name)

    def check_rest(self) -> None:
        """Raise when the store was away a moment ago."""
        if time.monotonic() < self.down_until:
            raise (
                self._replaced.again()
                if self._replaced is not None
                else StoreOutage(f"{self.name}: did not answer a moment ago")
            )

    # ---- forks ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the store. A fork waits for it; every exception leaves as a store error."""
        with self._gate:
            self._gate.wait_for(lambda: not self._forking, self.timeout)
            self._inside += 1
        try:
            with store_faults(self.name, BaseException):
                yield
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    def before_fork(self) -> None:
        """Wait, bounded, until no thread uses the store: a fork copies the locks of a client library as they are, and
        one that is held would stay held in the child.
        """
        with self._gate:
            self._forking = True
            self._gate.wait_for(lambda: not self._inside, self.timeout)

    def after_fork(self) -> None:
        """In the parent."""
        with self._gate:
            self._forking = False
            self._gate.notify_all()
