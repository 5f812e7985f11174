"""The same input again: runs on one input that were stopped, or ended in the same failure, within the last hour.

Setting: ``max_resubmissions``. Where it may refuse, the first model calls of a run wait for what a shared store knows.
An adapter only names the input: ``RunInfo.input``, made with
``input_fingerprint`` of ``core/identity``.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from runguard.core.decision import Finding, Rungs
from runguard.core.events import FAILURES, ROOT_LANE, ModelCall, Outcome, ToolResults
from runguard.core.identity import LruDict, answer_text, digest
from runguard.engine.charges import Charge
from runguard.engine.context import GuardContext
from runguard.engine.runs import LastFailure, Run, blames_input, input_name
from runguard.ledger.ledger import StoreError, StoreOutage, StoreSession

RULE: Final = "resubmission"
_KIND: Final = "resubmission"  # of the records in the store
_WITHIN_S: Final = 3_600.0
_INPUTS_KEPT: Final = 10_000
_ENDS_KEPT: Final = 16  # of one input, or as many as the limit needs
_AT_ONCE: Final = "model calls at once"  # unit of a stop because others were busy
_FAILING: Final = frozenset({"stall", "tool_failures", "repetition", "no_news", "same_call", "cycle", "empty"})
_READ: Final = 400  # characters of a failure
# What a tool says that cannot be reached now: the next attempt may work.
_OUTAGE: Final = re.compile(
    r"time[ds]?[\s_-]?out|unavailable|connection|unreachable|network|rate[\s_-]?limit|too many requests|quota"
    r"|overload|\bbusy\b|temporar|bad gateway|\b(?:429|50[0234])\b|try again|retryable|please retry"
    r"|retry[\s_-]?(?:later|again|after|soon|shortly|in\b)",
    re.IGNORECASE,
)
# Names of fields say nothing about this answer: "retry_hint", "connection", "timeout_seconds".
_FIELD: Final = re.compile(
    r'(?:"|^|;)(?!retry[_-]?after|timed[_-]?out\b|rate[_-]?limited)[\w .-]{1,64}(?:":|=)', re.IGNORECASE
)


class RunEnd(NamedTuple):
    """How one run on an input ended: by which rule and in which failure; both empty after a success."""

    at: float  # when the run started, so that an hourly job is free; of a success, when it ended
    rule: str = ""
    failure: str = ""
    run: str = ""

    def is_like(self, other: "RunEnd") -> bool:
        return (self.rule != "" and self.rule == other.rule) or (self.failure != "" and self.failure == other.failure)


class Resubmissions:
    """What is known of the inputs of one guard's runs. Safe to use from many threads.

    The third run on an input warns, after two that ended alike; ``max_resubmissions`` refuses. What is known is kept in
    a shared store too. A run waits for the store only where it may be refused; without the store's answer, what this
    process knows decides.
    """

    def __init__(self, context: GuardContext) -> None:
        rungs = context.policy.rungs(RULE)
        self._rungs = rungs if rungs is not None and context.policy.mode != "off" else Rungs()
        self.refuses = self._rungs.stop is not None
        self._ends_kept = int(max(_ENDS_KEPT, self._rungs.stop or 0, self._rungs.warn or 0))
        self.busy: set[str] = set()  # runs for which the store is asked before their first model calls
        self._ledger, self._clock = context.accounts.ledger, context.clock
        self._deciding, self._faults = context.deciding, context.faults
        context.keep(self, for_store=True)
        self._ends = LruDict[str, list[RunEnd]](_INPUTS_KEPT)  # by input, the earliest first
        self._lock = threading.Lock()
        if self._rungs == Rungs():
            return
        context.gates.append(self)
        context.sink.on("run started", RULE, self.begin)
        context.sink.on("tools failed", RULE, self.saw)
        context.sink.on("run paused", "pause", lambda run, waits: None if waits else self.end(run))
        context.sink.on("run ended", "end of run", self.end)

    def share(self, other: "Resubmissions") -> None:
        """Know what another guard knows."""
        self._ends, self._lock = other._ends, other._lock

    # ---- a run starts -----------------------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Judge a run that starts by what this process knows, and look what others know."""
        if not run.info.input:
            return
        self._judge(run)
        if not self._ledger.is_shared or run.stopped is not None:
            return
        if self.refuses:
            self.busy.add(run.info.run)
        else:
            self._ledger.tell(lambda store: self._read(run, store))

    async def enter(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> None:
        """Judge a run by what the store knows, before its first model calls: parallel branches make several."""
        if run.info.run in self.busy:
            with contextlib.suppress(StoreOutage, StoreError):  # the accounts report an outage
                await self._ledger.ask(lambda store: self._read(run, store), again=True)
            self.busy.discard(run.info.run)

    def leave(self, event: ModelCall, charge: Charge | None) -> None:
        """Judge only once, whether or not the call is made."""

    def _read(self, run: Run, store: StoreSession) -> None:
        try:
            name = input_name(run.info)
            found = [end for _, text in store.about(_KIND, name, last=self._ends_kept) if (end := _parsed(text))]
            self._learn(name, *found)
            if run.stopped is None:
                self._judge(run)
        except (StoreOutage, StoreError):
            raise  # the ledger reports an outage and tries again
        except Exception as error:
            self._faults.note("resubmissions", error)

    def _learn(self, name: str, *ends: RunEnd) -> None:
        """Add to the ends of an input. Of a run that was resumed, the last end counts."""
        with self._lock:
            known = sorted([*self._ends.get(name, ()), *ends], key=lambda end: end.at)
            latest = {end.run: end for end in known}
            self._ends[name] = [end for end in known if end is latest[end.run]][-self._ends_kept :]

    def _judge(self, run: Run) -> None:
        info = run.info
        with self._lock:
            known = self._ends.get(input_name(info), ())
        ends = [end for end in known if 0 <= info.at - end.at < _WITHIN_S and end.run != info.run]
        alike: list[RunEnd] = []
        for end in reversed(ends):
            if not end.is_like(ends[-1]):
                break
            alike.append(end)
        reached = self._rungs.at(len(alike) + 1) if alike else None
        if reached is None:
            return
        action, limit = reached
        because = f"were stopped by {alike[0].rule}" if alike[0].rule else "ended in the same failure"
        wait = max(alike[-1].at + _WITHIN_S - info.at, 0.0)
        finding = Finding(
            RULE,
            action,
            len(alike) + 1,
            limit,
            "submissions of one input",
            "run",
            detail=f"the last {len(alike)} runs on this input {because}",
            evidence=({"retry_after": f"{wait:.3f}"},),
        )
        self._deciding.decide(run, run.lanes[ROOT_LANE], ModelCall(info.run, ROOT_LANE, "", info.at), finding)

    # ---- a run works and ends ---------------------------------------------------------------------------------------

    def saw(self, run: Run, event: ToolResults) -> None:
        """Remember in which failure tools have ended. Work that goes on ends none."""
        if not run.info.input:
            return
        if event.progress:
            run.last_failure = None
        if not event.failures:
            return
        for answer in event.answers:
            if answer.outcome in FAILURES:
                said = _FIELD.sub(" ", f"{answer.failure};{answer_text(answer.value)[:_READ]}")
                is_outage = answer.outcome is Outcome.TIMEOUT or _OUTAGE.search(said) is not None
                run.last_failure = LastFailure(digest(f"{answer.tool}\0{answer.failure}").hex(), is_outage)

    def end(self, run: Run) -> None:
        """Remember how a run has ended."""
        self.busy.discard(run.info.run)
        if not run.info.input:
            return
        end, name = _end_of(run, self._clock()), input_name(run.info)
        if end is None:
            return
        known = self._ends.get(name, ())
        if end in known or not (end.rule or end.failure or known):
            return  # a stopped run that was resumed; or a success, and inputs whose runs end well are not kept
        self._learn(name, end)
        if self._ledger.is_shared:
            text = json.dumps(end)
            self._ledger.tell(lambda store: store.append(_KIND, name, text))


def _end_of(run: Run, now: float) -> RunEnd | None:
    """Return how a run ended. None: in a way that says nothing about its input."""
    failure = run.last_failure
    # in shadow mode nothing stops: what would have stopped the whole run counts
    trip = run.stopped or next((one for one in run.trips if not one.enforced and one.scope == "run"), None)
    if trip is None:
        if failure is None:
            return RunEnd(now, run=run.info.run)
        return None if failure.is_outage else RunEnd(run.info.at, "", failure.name, run.info.run)
    is_outage = trip.rule in _FAILING and failure is not None and failure.is_outage
    if is_outage or trip.unit == _AT_ONCE or not blames_input(trip):
        return None
    return RunEnd(run.info.at, trip.rule, failure.name if failure is not None else "", run.info.run)


def _parsed(text: str) -> RunEnd | None:
    try:
        at, rule, failure, run = json.loads(text)
        return RunEnd(float(at), str(rule), str(failure), str(run))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
