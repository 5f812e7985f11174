"""Refuses an input that tripped a breaker a moment ago: the same document in a new session would trip it again."""

import hashlib
from collections.abc import Sequence
from typing import Final

from google.adk.agents.invocation_context import InvocationContext

from runguard.adk.invocation_state import Invocation
from runguard.core.decision import Action, Finding, Trip
from runguard.core.identity import Newest

REFUSED: Final = "breaker"  # the rule of a refusal
_INPUTS_KEPT: Final = 1_000


class Resubmissions:
    """The latest run of each input, bounded. An input is the first message of a session: app, user, root agent and
    content.

    A later message is never the same input, because the history before it differs.
    """

    def __init__(self) -> None:
        self._runs = Newest[str, str](_INPUTS_KEPT)  # digest of the input -> id of its latest run

    def refusal(
        self, invocation: Invocation, ic: InvocationContext, trips: Sequence[Trip], now: float, seconds: float
    ) -> Finding | None:
        """Why this run must not start, or None. A refused run is not remembered, so the time counts from the trip."""
        digest = _digest(invocation, ic)
        if not digest:
            return None
        previous = self._runs.get(digest)
        tripped = next((trip for trip in reversed(trips) if trip.run_id == previous), None) if previous else None
        wait = tripped.at + seconds - now if tripped is not None else 0.0
        if tripped is None or wait <= 0:
            self._runs[digest] = invocation.run.info.run
            self._runs.move_to_end(digest)
            return None
        detail = f"the same input was stopped by {tripped.rule}; it is refused for {wait:.0f} s more, or until reset()"
        evidence = ({"retry_after": f"{wait:.3f}"},)
        return Finding(
            REFUSED,
            Action.STOP,
            round(now - tripped.at, 3),
            seconds,
            "seconds since the trip",
            "run",
            detail=detail,
            evidence=evidence,
        )

    def clear(self) -> None:
        self._runs.clear()


def _digest(invocation: Invocation, ic: InvocationContext) -> str:
    if ic.user_content is None or sum(event.author == "user" for event in ic.session.events) > 1:
        return ""
    parts = (ic.app_name, ic.user_id, invocation.root_agent, ic.user_content.model_dump_json(exclude_none=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
