"""Plays a reference run with one fault in it, and says what the fault did."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from runguard import Budget
from runguard.core.money import NOTHING
from runguard.errors import GuardFailedError

from .injection import Place, broken, places, reached
from .reference_runs import CALL_USD, HELD_USD, TURNS, Play, Reference, SpinningError, budget_for

# Telemetry, and what it asks, logs its first failure; what makes log lines cannot log.
_SAID_ONCE: Final = (
    "reporting.telemetry:",
    "background:",  # which the callbacks and the log use
    "core.decision:Action.word",
    "core.decision:printable",
)
_NOT_COUNTED: Final = (
    "providers.",
    "termination.",
    "adk.termination:Passive",
    *(
        f"adk.tool_hooks:{name}"
        for name in ("_hints", "_is_model", "_is_plain", "_kind", "_model", "_one", "_parameter", "_schema")
    ),
    *_SAID_ONCE,
)  # an answer or a declaration that cannot be read, or a condition that raises, need not be our fault
_CODES: Final = (
    "runguard.guard_error",
    "runguard.callback_failed",
    "runguard.budget_error",
    "runguard.store_error",
    "runguard.unreadable",
    "runguard.termination_failed",
)
# Doors: when they fail even once, nothing inside can reserve for the call, and under a budget it is not made.
_DOORS: Final = (
    "adk.cost_breaker:ADKCostBreaker.before_model_callback",
    "adk.plugin:ModelHooks.before",
    "background:FinalizerQueue.ready",
    "calls.model_calls:ModelRequest.of",
    "providers.usage:measure",
    "calls.streams:AsyncGuardedStream.__init__",
    "calls.streams:GuardedObject.__init__",
    "calls.streams:_Pieces.__init__",
    "providers.streams:StreamReading.__init__",
)
# What a ledger cannot settle stays held, and is charged when the hold expires.
_KEEPS_HOLDS: Final = (
    "ledger.memory:MemoryLedger.settle",
    "ledger.remote:StoreLedger._put",
    "ledger.remote:StoreLedger.settle",
    "ledger.remote:settlement_of",
)
# A condition that raises may be the user's own, and a condition on rules counts in a guard of its own. A Runner without
# a guard has nothing to count on.
_COUNTED_ELSEWHERE: Final = (
    "runguard.store_error",
    "runguard.termination_failed",
    "guard_error: the rules of a run",
    "guard_error: runner failed with",
    "wrapper failed with",
)
TURN_S: Final = 30.0  # a turn takes some milliseconds; one that waits for a leaked reservation takes a minute


@dataclass(slots=True)
class Baseline:
    """What a reference does without a fault."""

    reference: Reference
    policy: dict[str, Any]
    calls: int  # that reach a model
    seen: list[Any]  # by turn, without a guard
    places: list[Place] = field(default_factory=list)

    @property
    def blocks(self) -> bool:
        """A fault stops the run: what the caller sees depends on where it is."""
        return self.policy.get("on_guard_error") == "block"

    def make(self, when: str) -> Play:
        """With a tight budget; but a fault in every call may make every call an estimate."""
        return self.reference.make({**budget_for(self.calls, tight=when != "every"), **self.policy})


@dataclass(slots=True)
class Outcome:
    """What one fault did. ``harm`` is empty when nothing happened that the caller could notice."""

    reference: str
    place: str
    when: str
    raised: int = 0
    stopped: bool = False  # because of the fault
    harm: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.reference} · {self.place} · {self.when}: {'; '.join(self.harm) or 'unharmed'}"


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


async def baseline(reference: Reference, **policy: Any) -> Baseline:
    """Play it without a guard, then with one: that must look the same, unless the policy stops it; and see which
    functions it reaches.
    """
    bare = reference.make(None)
    seen = [await bare.turn(_nothing) for _ in range(TURNS)]
    base = Baseline(reference, policy, bare.calls(), seen)
    for _ in range(2):  # what is imported or learned in a first run is not there in a second one
        play = base.make("first")
        with reached() as calls:
            guarded = [await asyncio.wait_for(play.turn(_nothing), TURN_S) for _ in range(TURNS)]
    await play.check()
    assert not leaks(play), leaks(play)
    assert not any(guard.snapshot()["guard_errors"] for guard in play.guards)
    if not reference.stops:
        assert guarded == seen, f"{reference.name} is changed by a healthy guard"
    base.places = places(calls)
    return base


async def play_with_fault(base: Baseline, place: Place, when: str) -> Outcome:
    outcome = Outcome(base.reference.name, place.name, when)
    heard = Heard()
    log = logging.getLogger("runguard")
    level = log.level
    log.addHandler(heard)
    log.setLevel(logging.DEBUG)
    try:
        with broken(place, when) as fault:
            play = base.make(when)
            seen = [await _turn(play, outcome, fault.arm)]
            if fault.raised:  # else it comes in the second turn
                fault.disarm()
            if not outcome.harm:
                seen.append(await _turn(play, outcome, _nothing, " afterwards" if fault.raised else ""))
            outcome.raised = fault.raised
    finally:
        log.setLevel(level)
        log.removeHandler(heard)
    if not outcome.raised:
        return outcome
    outcome.harm += [f"leaked: {leak}" for leak in leaks(play)] if place.name not in _KEEPS_HOLDS else []
    outcome.stopped = any(trip.rule == "guard_error" for guard in play.guards for trip in guard.trips)
    # where not even the ledger can be asked, a clean stop is what a budget asks for
    is_refused = outcome.stopped and (when == "every" or place.name in _DOORS)
    if not outcome.harm and not base.reference.stops and not base.blocks and not is_refused:
        outcome.harm += ["changed"] if seen[0] != base.seen[0] else []
        outcome.harm += ["changed afterwards"] if seen[1] != base.seen[1] else []
    try:
        await play.check()
    except AssertionError as error:
        outcome.harm.append(f"dirty: {error}")
    is_counted = any(told(guard) for guard in play.guards) or any(
        code in line for line in heard.lines for code in _COUNTED_ELSEWHERE
    )
    if play.guards and not is_counted and not place.name.startswith(_NOT_COUNTED):
        outcome.harm.append("uncounted")
    if not any(code in line for line in heard.lines for code in _CODES) and not place.name.startswith(_SAID_ONCE):
        outcome.harm.append("unlogged")
    return outcome


async def paid_past_cap(base: Baseline, place: Place, when: str) -> str:
    """Play a reference on a budget for about two calls, with a fault that stays. Return what went past it, or ""."""
    cap = HELD_USD + CALL_USD
    outcome = Outcome(base.reference.name, place.name, when)
    with broken(place, when) as fault:
        budgets = [Budget(usd=cap, per="app")]
        play = base.reference.make({"budgets": budgets, "max_wait_seconds": 1, **base.policy})
        for _ in range(2 * TURNS):
            await _turn(play, outcome, fault.arm)
    paid = play.calls() * CALL_USD
    return f"{outcome.reference} · {place.name} · {when}: paid {paid:.3f} of {cap:.3f}" if paid > cap + 1e-9 else ""


def told(guard: Any) -> int:
    """Faults that the guard has counted."""
    snapshot = guard.snapshot()
    return int(snapshot["guard_errors"] + snapshot["callbacks_failed"])


def _nothing() -> None:
    """Nothing waits for the turn to be ready."""


async def _turn(play: Play, outcome: Outcome, ready: Callable[[], None], when: str = "") -> Any:
    playing = asyncio.ensure_future(play.turn(ready))
    await asyncio.wait((playing,), timeout=TURN_S)
    if not playing.done():
        outcome.harm.append(f"hung{when}")
        playing.cancel()
        await asyncio.wait((playing,), timeout=TURN_S)
        return None
    try:
        return playing.result()
    except GuardFailedError:
        return "refused"  # how the caller of a guarded function learns of a stop
    except (Exception, SpinningError) as error:
        outcome.harm.append(f"crashed{when}: {type(error).__name__}: {error}"[:200])
        return None


def leaks(play: Play) -> list[str]:
    """What is still held after a run: money, places among the calls in flight, the run itself."""
    found: list[str] = []
    for guard in play.guards:
        accounts = guard.accounts
        accounts.ledger.flush(TURN_S)  # a store books on a thread of its own
        found += [
            f"{account.key} holds {account.held}" for account in accounts.ledger.known() if account.held != NOTHING
        ]
        if (reserved := accounts.spend()["reserved_usd"]) != 0:
            found.append(f"reserved {reserved}")
        for run in list(guard.runs.values()):
            if run.slots.busy() or run.waiting or run.in_flight:
                found.append(f"run {run.info.run} has a call in flight")
    return found


def table(outcomes: list[Outcome]) -> Counter[str]:
    """How many faults did what; one that did several things counts as the worst of them."""
    counts: Counter[str] = Counter(
        injected=0, unharmed=0, crashed=0, hung=0, leaked=0, changed=0, dirty=0, uncounted=0, unlogged=0
    )
    for outcome in outcomes:
        if outcome.raised:
            counts["injected"] += 1
            kinds = [harm.split()[0].rstrip(":") for harm in outcome.harm]
            counts[
                next(
                    (
                        kind
                        for kind in ("crashed", "hung", "leaked", "changed", "dirty", "uncounted", "unlogged")
                        if kind in kinds
                    ),
                    "unharmed",
                )
            ] += 1
    return counts
