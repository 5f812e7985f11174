"""A provider that asks to wait: calls to that model wait in this process, and one probe goes first.

Setting: ``on_rate_limit``.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from runguard.core.events import ModelCall
from runguard.core.outcomes import provider_status
from runguard.engine.charges import Charge
from runguard.engine.context import GuardContext
from runguard.engine.reserving import StepOut
from runguard.engine.runs import Run
from runguard.engine.waiting import Turns
from runguard.pricing.rates import normalise
from runguard.providers.errors import retry_after

_log: Final = logging.getLogger("runguard")
_LOOKS_S: Final = 1.0
_MODELS_KEPT: Final = 1_000


class _Gate:
    """One model that asked to wait. No call has a turn until it may be called again; then one probe has, then all."""

    __slots__ = ("turns", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self.turns: Turns[ProviderVisit] = Turns(0, lambda visit, since: False)

    def end_probe(self, is_success: bool = False) -> None:
        """Let the next call try, or all of them after a success."""
        if is_success:
            self.turns.limit = math.inf
        for visit in list(self.turns.holders):
            self.turns.give_back(visit)
        self.turns.hand_on()


class ProviderVisit:
    """One call that waits for a provider."""

    until: float | None = None  # it is not known when the provider takes the call

    def __init__(self, model: str, gate: _Gate) -> None:
        self.scope, self.gate = f"provider:{model}", gate

    def wake(self) -> None:
        """Look now. From any thread."""
        self.gate.turns.wake(self)


class ProviderWaits:
    """The models that asked one guard's calls to wait. Empty, it costs nothing.

    ::

        free ──429 with Retry-After──▶ waiting ──time is over──▶ one probe ──it succeeds──▶ free
                                          ▲                          │
                                          └──── 429 again ───────────┘

    A call that has waited for ``max_wait_seconds``, or that would have to wait longer, is made at once. The provider
    then answers or refuses it.
    """

    def __init__(self, context: GuardContext) -> None:
        self._patience, self._waits = context.policy.max_wait_seconds, context.waits
        self._is_on, self._enforces, self._clock = context.policy.waits_for_provider, context.enforces, context.clock
        self.now: Callable[[], float] = time.monotonic
        self.busy: dict[str, _Gate] = {}  # the models that asked to wait
        self._lock = threading.Lock()
        self._probes: set[int] = set()  # the events of calls that are to be probes, by identity
        context.keep(self)
        context.gates.append(self)
        context.sink.on("failed", "settle", self.failed)
        context.sink.on("guard facts", "snapshot", self.seconds_left)

    def share(self, other: "ProviderWaits") -> None:
        """Wait for the same models as another guard."""
        self.busy, self._lock, self.now = other.busy, other._lock, other.now

    def seconds_left(self) -> dict[str, dict[str, float]]:
        """Return the seconds until each waiting model may be called again."""
        now, gates = self.now(), list(self.busy.items())
        return {"provider_waits": {model: round(max(gate.until - now, 0.0), 3) for model, gate in gates}}

    async def enter(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> None:
        """Wait while the provider of a call asks for it."""
        if await self._is_probe(run, event, stopped):
            self._probes.add(id(event))
        event.at = max(event.at, self._clock())

    def leave(self, event: ModelCall, charge: Charge | None) -> None:
        """Send the probe, or let another call try where it is not made."""
        if id(event) not in self._probes:
            return
        self._probes.discard(id(event))
        if charge is None:
            self._come_back(_gate_key(event), False)
        else:
            charge.on_over = self._ended

    async def _is_probe(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> bool:
        model = _gate_key(event)
        gate = self.busy.get(model)
        if gate is None or event.no_wait or event.is_tool:
            return False
        if not self._enforces:
            if (seconds := gate.until - self.now()) > 0:
                what = f"the provider of '{model}', which asked to wait"
                self._waits.note(event.agent, seconds, what, "would have waited")
            return False
        if event.no_loop:
            await StepOut()
        visit, began, is_probe = ProviderVisit(model, gate), asyncio.get_running_loop().time(), False
        try:
            while not stopped() and self.busy.get(model) is gate:
                left = began + self._patience - asyncio.get_running_loop().time()
                left, seconds = min(left, self._waits.left_of(run)), gate.until - self.now()
                if left <= 0 or seconds > left:
                    break
                gate.turns.limit = 0 if seconds > 0 else 1
                if not gate.turns.take(visit, join=True):
                    run.visits[visit] = None
                    await gate.turns.wait(visit, min(left, _LOOKS_S if seconds <= 0 else min(seconds, _LOOKS_S)))
                if visit in gate.turns.holders:
                    is_probe = self.busy.get(model) is gate  # else a probe has succeeded: all go
                    break
            return is_probe
        finally:
            if not is_probe:
                gate.turns.give_back(visit)
            if run.visits.pop(visit, visit) is None:
                waited = asyncio.get_running_loop().time() - began
                self._waits.note(event.agent, waited, f"the provider of '{model}', which asked to wait")

    def failed(self, charge: Charge, error: BaseException | None) -> None:
        """Find out whether the provider of a call that raised asks to wait."""
        was_probe, seconds = charge.on_over == self._ended, retry_after(error) if self._is_on else None
        if seconds is None:
            if was_probe and _says_nothing(error):
                self._ended(charge, False)
            return
        model, charge.on_over = _gate_key(charge), None
        with self._lock:
            if model not in self.busy and len(self.busy) >= _MODELS_KEPT:
                return
            gate, now = self.busy.setdefault(model, _Gate()), self.now()
            is_new = gate.until <= now
            gate.until = max(gate.until, now + seconds)
            gate.turns.limit = 0
            if was_probe:
                gate.end_probe()
        if is_new:
            waits = "its calls wait here, then one goes first" if self._enforces else "enforcing, its calls would wait"
            _log.warning("runguard.provider_busy: '%s' asks to wait %.1f s: %s", model, seconds, waits)

    def _ended(self, charge: Charge, is_success: bool) -> None:
        """Free the model after its probe, or let another call try."""
        charge.on_over = None
        self._come_back(_gate_key(charge), is_success)

    def _come_back(self, model: str, is_success: bool) -> None:
        with self._lock:
            gate = self.busy.pop(model, None) if is_success else self.busy.get(model)
            if gate is not None:
                gate.end_probe(is_success)


def _gate_key(call: ModelCall | Charge) -> str:
    """Return the model, or the callable where its model is unknown."""
    return normalise(call.model) if call.model else call.agent


def _says_nothing(error: BaseException | None) -> bool:
    """Return whether a failure leaves open if the provider takes calls again: it was cancelled, lost, or overloaded."""
    status = provider_status(error) if isinstance(error, Exception) else None
    return status is None or status == 429 or status >= 500
