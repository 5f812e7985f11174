"""The guards of this process that share a store: the store learns which of their runs are alive, and they learn when
the control document has changed.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from runguard.ledger.control import change_control, read_control
from runguard.ledger.store import StoreError, StoreOutage, StoreSession
from runguard.ledger.store_faults import UnforeseenError
from runguard.ledger.store_link import StoreLink

_log: Final = logging.getLogger("runguard")
_BEATS_AT_ONCE: Final = 200


class StoreGuards:
    """Guards are referenced weakly: a guard may go, the ledger stays."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self.version, self._text = 0, ""  # of the control document, as last seen
        self._identity = ""  # of the store that the control document is from
        self._unreadable = ""  # why the document could not be read, as last logged
        self._guards: list[tuple[weakref.WeakMethod[Any], weakref.WeakMethod[Any]]] = []
        self.restart()

    def restart(self) -> None:
        """Also in a forked child: the parent may have held the lock."""
        self._reading = threading.RLock()

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        with self._reading:
            alive = [entry for entry in self._guards if entry[0]() is not None]
            self._guards = [*alive, (weakref.WeakMethod(on_control), weakref.WeakMethod(running))]
            if self._text:
                self._inform(on_control)

    # ---- the control document ---------------------------------------------------------------------------------------

    def is_news(self, version: int) -> bool:
        """Whether the control document must be read: it has another version, or belongs to an adopted store."""
        if self._identity != self._link.seen.text:
            if self._identity:
                self.version = -1
            self._identity = self._link.seen.text
        return version != self.version

    def read(self, session: StoreSession) -> None:
        with self._reading:  # read, inform and remember as one step: no older document after a newer one
            version, self._text = self._checked(session)
            for reference, _ in self._guards:
                if (listener := reference()) is not None:
                    self._inform(listener)
            self.version = version  # last: once this version shows, all guards know the document

    def change(self, session: StoreSession, change: Callable[[str], str]) -> str:
        changed = change_control(session, self._link.name, change)
        self.read(session)
        return changed

    def _checked(self, session: StoreSession) -> tuple[int, str]:
        try:
            return read_control(session, self._link.name)
        except StoreError as error:
            if str(error) != self._unreadable:  # log once; needs manual repair
                self._unreadable = str(error)
                _log.error("runguard.control_unreadable: %s. The stops known here stay in force", error)
            raise

    def _inform(self, listener: Callable[[str], None]) -> None:
        try:
            listener(self._text)
        except Exception:  # the reservation that brought the news must not fail
            _log.exception("runguard.store_error: a guard could not take over the control document")

    # ---- on the writer's thread -------------------------------------------------------------------------------------

    def beat(self, worker: str) -> None:
        """Report which runs are alive, and check for stops, also while a model takes its time."""
        guards = [running for _, reference in self._guards if (running := reference()) is not None]
        alive: list[tuple[str, str]] = []
        for running in guards:
            try:
                alive.extend(itertools.islice(running(), _BEATS_AT_ONCE))
            except Exception:  # the writer must survive: without it nothing is ever booked again
                _log.exception("runguard.store_error: a guard cannot say which of its runs are alive")
        if not alive:
            return
        link = self._link
        try:
            with link.in_use():
                session, version = link.session(), self.version
                for run, text in alive:
                    version = session.beat(run, worker, text)
                link.is_back()
                if self.is_news(version):
                    self.read(session)
        except StoreOutage as error:
            if link.session_is_new:  # an older one may only have been cut while idle
                link.outage(error)
            link.drop_session()
        except UnforeseenError:
            raise  # counted and logged by the writer
        except StoreError:
            link.drop_session()  # a call that needs an account reports it

    def look_for_stops(self) -> None:
        """Between two beats: the kill switch may have been used while a model takes its time."""
        if not any(reference() is not None for _, reference in self._guards):
            return
        link = self._link
        try:
            with link.in_use():
                session = link.session()
                if self.is_news(session.get("control")[0]):
                    self.read(session)
        except UnforeseenError:
            raise  # counted and logged by the writer
        except (StoreOutage, StoreError):
            link.drop_session()  # a call that needs the store reports it
