"""How large the prompts of each session are, kept from one run to the next: a user's new message does not make the
history smaller.

Bounded: the sessions that were used last are kept. With a shared store, every run adds a record of its session when it
ends, and reads the last record when it begins, so that another worker goes on from there. Where the store does not
answer, a run goes on with what this process knows.
"""

import json
import threading
from collections import OrderedDict
from typing import Any, Final

from runguard.core.decision import Rungs
from runguard.core.events import RunInfo
from runguard.core.identity import Newest
from runguard.core.rules.limits import PromptSizes, Sizes
from runguard.ledger.ledger import Ledger, StoreError, StoreOutage, StoreSession
from runguard.policy.settings import Policy

KIND: Final = "growth"  # of the records
SESSIONS_KEPT: Final = 1_024
_VERSION: Final = 1
_NUMBERS_KEPT: Final = 4_096  # in one record


class SessionGrowth:
    """The prompts of one session, by agent."""

    __slots__ = ("recorded", "sizes", "warned")

    def __init__(self) -> None:
        self.sizes: Sizes = OrderedDict()
        self.warned = False  # the growth warning was given
        self.recorded = ""  # what the store has

    def dump(self, events: int) -> dict[str, Any]:
        """As plain data. The agents that were used last are kept."""
        agents = [[place, agent, *sizes.dump()] for (place, agent), sizes in list(self.sizes.items())]
        return {
            "v": _VERSION,
            "events": events,
            "warned": self.warned,
            "agents": agents[-max(_NUMBERS_KEPT // events, 1) :],
        }

    def learn(self, record: Any, events: int) -> None:
        """Take over what a record knows better than we do.

        One that cannot be read, or counts otherwise, says nothing.
        """
        try:
            if record["v"] != _VERSION or record["events"] != events:
                return
            known = {
                (str(place), str(agent)): PromptSizes.load(events, *sizes) for place, agent, *sizes in record["agents"]
            }
            self.warned = self.warned or record["warned"] is True
        except (KeyError, TypeError, ValueError):
            return
        for key, sizes in known.items():
            mine = self.sizes.get(key)
            if mine is None or mine.seen < sizes.seen:
                self.sizes[key] = sizes


class SessionGrowths:
    """The sessions of one guard. Safe to use from many threads."""

    def __init__(self, policy: Policy, ledger: Ledger) -> None:
        rungs = policy.rungs("growth") or Rungs()
        self._ledger, self._events, self._stops = ledger, policy.cost_baseline_events, rungs.stop is not None
        self._is_shared = ledger.is_shared and rungs != Rungs() and policy.mode != "off"
        self._sessions = Newest[tuple[str, str, str], SessionGrowth](SESSIONS_KEPT)
        self._lock = threading.Lock()

    def share(self, other: "SessionGrowths") -> None:
        """Know what another guard knows, unless it counts over another number of prompts."""
        if self._events == other._events:
            self._sessions, self._lock = other._sessions, other._lock

    def of(self, info: RunInfo) -> SessionGrowth:
        """The session of a run. A run without a session is a session of its own."""
        if not info.session:
            return SessionGrowth()
        key = (info.app, info.user, info.session)
        with self._lock:
            found = self._sessions.get(key)
            if found is None:
                found = self._sessions[key] = SessionGrowth()
            else:
                self._sessions.move_to_end(key)
        return found

    async def recall(self, info: RunInfo) -> None:
        """A run is about to begin: read what other workers know of its session. Waits for the store only where growth
        can stop the run.
        """
        if not self._is_shared or not info.session:
            return
        session, name, events = self.of(info), _name(info), self._events

        def read(store: StoreSession) -> None:
            for _, text in store.about(KIND, name, last=1):
                session.recorded = text
                session.learn(_parsed(text), events)

        if not self._stops:
            self._ledger.tell(read)
            return
        try:
            await self._ledger.ask(read, again=True)
        except (StoreOutage, StoreError):
            return  # the accounts report an outage

    def record(self, info: RunInfo, session: SessionGrowth) -> None:
        """A run has ended: hand what is known of its session to the store."""
        if not self._is_shared or not info.session or not (session.sizes or session.recorded):
            return
        text, name = json.dumps(session.dump(self._events)), _name(info)
        if text != session.recorded:
            session.recorded = text
            self._ledger.tell(lambda store: store.append(KIND, name, text))

    def forget(self, info: RunInfo) -> None:
        """Start anew with this session."""
        session = self.of(info)
        session.sizes.clear()
        session.warned = False
        self.record(info, session)


def _name(info: RunInfo) -> str:
    return json.dumps([info.app, info.user, info.session])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
