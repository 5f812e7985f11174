"""What the parts of a guard share, and what an optional feature of it is.

``engine/guard`` makes one ``GuardContext``, which is the guard itself. Its parts take it and nothing else but each
other. A feature is one file that the guard's core does not know: it stands in ``FEATURES`` of ``engine/guard``, takes
the context and subscribes to the moments of the sink that it needs.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, TypedDict

from runguard.core.decision import Trip
from runguard.core.events import ModelCall
from runguard.engine.charges import Charge, Denied
from runguard.engine.decide import Alarms, Breakers, Deciding, GuardFaults, Sink
from runguard.engine.money import Accounts
from runguard.engine.runs import Lane, LaneRules, Run
from runguard.ledger.memory import MemoryLedger
from runguard.policy.settings import Policy
from runguard.policy.tools import Tools
from runguard.pricing.book import Pricing
from runguard.reporting.telemetry import Outbox

# ---- What a feature may do beyond the moments of the sink


class Gate(Protocol):
    """Something that a model call passes before it is reserved, and where it may have to wait."""

    @property
    def busy(self) -> object:
        """Whether calls must enter now. False: they pass at once."""

    async def enter(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> Denied | None:
        """Let a call wait as long as it must and is not ``stopped``. Return why it must not be made, or None."""

    def leave(self, event: ModelCall, charge: Charge | None) -> None:
        """Learn that a call which has entered was reserved, or that it is not made (no charge)."""


class ModelChoice(Protocol):
    """Chooses the model of a call. An adapter that can change the model of a request asks before each call."""

    def choose(
        self, run: Run, event: ModelCall, has_open_call: Callable[[], bool], obstacle: Callable[[str], str]
    ) -> str:
        """Return the model that the call should go to, "" for its own. Enforcing, the event then names that model.

        ``has_open_call``: a tool call in the conversation is not answered yet. ``obstacle``: why the adapter cannot
        send the request to a model; "" where it can.
        """

    def has_chosen(self, run: Run, lane: str, agent: str) -> bool:
        """Return whether an agent of a lane has another model than its own."""


class LastCall(Protocol):
    """Grants a stopped run one more call. An adapter that can make it asks when a run is stopped."""

    instruction: str

    def may_answer(self, run: Run, lane: Lane, event: ModelCall, trip: Trip | None) -> bool:
        """Return whether this stop of the run ends with an answer of the agent that is about to call its model."""

    async def take(self, run: Run, event: ModelCall) -> Charge | None:
        """Return the charge of the last call, once per run; None where it cannot be paid."""


class PromptParts(NamedTuple):
    """Digests of one request, valid within this process."""

    tools: int
    instruction: int
    history: int  # of all its contents
    contents: int  # how many
    beginning: int  # of as many contents as the request before had


# Reads the parts of a request; ``contents``: how many contents the request before had. None: they cannot be known.
ReadParts = Callable[[Any, int], PromptParts | None]

# ---- The context


class GuardOptions(TypedDict, total=False):
    """What is special about a guard. Adapters and replay set these; users set a policy.

    - ``breaker_runs``: how many runs must have seen failures before a breaker opens for all, 2 unless given. One user's
      bad arguments are not an outage.
    - ``advice``: how to go on after a stop, by rule, where the settings have other names than those of a policy.
    - ``pricing`` and ``lane_rules``: other prices and rules than those of the policy.
    - ``reports=False``: log, store and send no decision; only those who subscribe to ``sink`` receive it.
    - ``gives_last_answers``: the adapter can make the call that ``final_answer`` asks for.
    - ``switches_models``: it asks which model to call; without it a policy with ``Threshold(model=…)`` is rejected.
    """

    breaker_runs: int
    advice: Mapping[str, str]
    pricing: Pricing
    lane_rules: LaneRules
    reports: bool
    gives_last_answers: bool
    switches_models: bool


class Shared(Protocol):
    """What a guard knows over all its runs, and a guard that replaces it goes on with."""

    def share(self, other: Any, /) -> None:
        """Know what ``other`` knows, which another guard has made."""


_TRIPS_KEPT: Final = 1_000
_BREAKER_FAILURES: Final = 5


class GuardContext:
    """What the parts of one guard share. Each part takes it, and whatever other part it works with.

    ``before``: that of a guard whose policy this one replaces.
    """

    def __init__(self, policy: Policy, options: GuardOptions, before: "GuardContext | None" = None) -> None:
        self.policy, self.options, self.enforces = policy, options, policy.mode == "enforce"
        self.clock = policy.clock or time.time  # noqa: TID251 - the one place that names the clock
        self.runs: dict[str, Run] = {}
        self.trips: deque[Trip] = deque(maxlen=_TRIPS_KEPT) if before is None else before.trips
        self.faults = GuardFaults(self)
        self.sink = Sink(self.faults)
        self.deciding = Deciding(self)
        known = before.accounts if before is not None else None
        self.accounts: Accounts = Accounts(policy, self.clock, before=known, pricing=options.get("pricing"))
        self.tools = Tools(policy)
        if before is not None:
            self.outbox = before.outbox
        self._kept: dict[type, tuple[Shared, bool]] = {}
        failures, reset = policy.max_tool_failures or _BREAKER_FAILURES, policy.half_open_reset_seconds
        self.breakers = Breakers(self.accounts.ledger, failures, reset, options.get("breaker_runs", 2))
        self.keep(self.breakers, for_store=True)
        self.alarms: Alarms | None = self._alarms_after(before)
        self.waits = self.accounts.waits
        self.waits.guard = self
        # what features fill
        self.gates: list[Gate] = []
        self.model_choice: ModelChoice | None = None
        self.last_call: LastCall | None = None
        # set by an adapter that keeps the request on the charge
        self.read_parts: ReadParts | None = None

    @cached_property
    def outbox(self) -> Outbox:
        """The queue of callbacks. A guard that reports nothing and calls nobody back has none."""
        return Outbox()

    def keep(self, part: Shared, *, for_store: bool = False) -> None:
        """Let a guard that replaces this one go on with what a part knows.

        ``for_store``: guards of this process that share a store in memory share it, too.
        """
        self._kept[type(part)] = part, for_store

    def share(self, before: "GuardContext | None") -> None:
        """Go on with what ``before`` knows, and with what guards of the same store in memory know.

        Changes nothing of ``before``: both work on the same objects.
        """
        ledger = self.accounts.ledger
        for kind, (part, for_store) in self._kept.items():
            if before is not None and kind in before._kept:
                part.share(before._kept[kind][0])
            if for_store and isinstance(ledger, MemoryLedger) and ledger.is_common:
                common = ledger.commons.setdefault(kind, part)
                if common is not part:
                    part.share(common)

    def facts_of(self, run: Run, now: float | None = None) -> dict[str, Any]:
        """Return the counts, money and growth of a run as plain data. ``now``: of a run at work, with its outlook."""
        facts = {**self.sink.facts("run facts", run), **run.snapshot(self.clock() if now is None else now)}
        return facts if now is None else {**facts, **self.sink.facts("run outlook", run, now)}

    def _alarms_after(self, before: "GuardContext | None") -> Alarms | None:
        """Return the alarms. With the same receivers they stay the same, so no alert is sent twice."""
        policy, accounts = self.policy, self.accounts
        if not policy.alerts or policy.mode == "off":
            return None
        alarms = before.alarms if before is not None and before.accounts.ledger is accounts.ledger else None
        if before is None or alarms is None or before.policy.alerts != policy.alerts:
            alarms = Alarms(policy.alerts, accounts.ledger, self.clock)
        # what happens beside runs
        accounts.on_store, accounts.on_extended = alarms.store, alarms.extended
        accounts.ledger.watch_dropped(alarms.dropped)
        accounts.cap_functions.on_change, self.breakers.on_change = alarms.cap, alarms.breaker
        return alarms
