"""Refused summaries: the framework wanted to compact a session's history after a run, and the guard refused that model
call.

The run has given its answer, so nothing is stopped. But the history stays as long as it is, and every later call pays
for it. Frameworks try again after each run, so a refusal is reported once per session.
"""

import logging
import threading
from typing import Final

from runguard.core.decision import Decision, against_limit
from runguard.core.events import RunInfo
from runguard.core.identity import Newest
from runguard.outlets.alarms import Alarms

_log: Final = logging.getLogger("runguard")
_SESSIONS_KEPT: Final = 10_000


class RefusedSummaries:
    """Which sessions were reported. Safe to use from many threads."""

    def __init__(self, alarms: Alarms | None) -> None:
        self._alarms = alarms
        # by a hash of the session: names of any length take the same space
        self._reported = Newest[int, None](_SESSIONS_KEPT)
        self._lock = threading.Lock()

    def share(self, other: "RefusedSummaries") -> None:
        """Know what another guard has reported."""
        self._reported, self._lock = other._reported, other._lock

    def refused(self, info: RunInfo, decision: Decision) -> None:
        """Report a refusal, unless the session was reported before."""
        finding = decision.finding
        if finding is None or not self._is_first(info):
            return
        verb = "was not" if decision.enforced else "would not have been"
        limit = finding.detail
        if finding.money is None:
            limit = against_limit(finding.observed, finding.unit, finding.limit)
        _log.warning(
            "runguard.compaction_refused: the history of session %s/%s/%s %s compacted: %s, %s. Runs go on "
            "with the full history, which makes their calls more "
            "expensive. Raise the limit, or compact with a cheaper model; further refusals for this session "
            "are not reported",
            *(info.app, info.user, info.session, verb, finding.rule, limit),
        )
        if self._alarms is not None:
            self._alarms.compaction(info, finding, enforced=decision.enforced)

    def _is_first(self, info: RunInfo) -> bool:
        key = hash((info.app, info.user, info.session))
        with self._lock:
            if key in self._reported:
                return False
            self._reported[key] = None
            return True
