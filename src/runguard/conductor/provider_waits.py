"""A provider that asks to wait: calls to that model wait in this process, and one probe goes first.

::

    free ──429 with Retry-After──▶ waiting ──time is over──▶ one probe ──it succeeds──▶ free
                                      ▲                          │
                                      └──── 429 again ───────────┘

A call that has waited for ``max_wait_seconds``, or that would have to wait longer, is made at once. The provider then
answers or refuses it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from runguard.accounting.charges import Charge
from runguard.accounting.reservation import StepOut
from runguard.conductor.run_waits import RunWaits
from runguard.conductor.runs import Run
from runguard.core.events import ModelCall
from runguard.core.outcomes import provider_status
from runguard.policy.settings import Policy
from runguard.pricing.rates import normalise
from runguard.providers.errors import retry_after

_log: Final = logging.getLogger("runguard")
_LOOKS_S: Final = 1.0
_MODELS_KEPT: Final = 1_000


class ProviderVisit:
    """One call that waits for a provider."""

    __slots__ = ("_loop", "_woken", "scope", "until")

    def __init__(self, model: str) -> None:
        self.scope = f"provider:{model}"
        self.until: float | None = None
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()

    async def sleep(self, seconds: float) -> None:
        if self._woken.done():
            self._woken = self._loop.create_future()
        await asyncio.wait((self._woken,), timeout=seconds)

    def wake(self) -> None:
        """Look now. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # its loop is closed: nothing waits there any more
            return

    def _resolve(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


class _Gate:
    """One model that asked to wait."""

    __slots__ = ("is_probed", "until", "waiting")

    def __init__(self) -> None:
        self.until = 0.0
        self.is_probed = False  # the probe is on its way
        self.waiting: dict[ProviderVisit, None] = {}  # in the order of arrival


class ProviderWaits:
    """The models that asked one guard's calls to wait. Empty, it costs nothing."""

    def __init__(self, policy: Policy, waits: RunWaits) -> None:
        self._patience, self._waits = policy.max_wait_seconds, waits
        self._is_on, self._enforces = policy.waits_for_provider, policy.mode == "enforce"
        self.now: Callable[[], float] = time.monotonic
        self.gates: dict[str, _Gate] = {}
        self._lock = threading.Lock()

    def share(self, other: "ProviderWaits") -> None:
        """Wait for the same models as another guard."""
        self.gates, self._lock, self.now = other.gates, other._lock, other.now

    def seconds_left(self) -> dict[str, float]:
        """By model, for those who look in."""
        now = self.now()
        return {model: round(max(gate.until - now, 0.0), 3) for model, gate in list(self.gates.items())}

    async def enter(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> bool:
        """Wait while the provider of a call asks for it. Return whether the call is the probe."""
        model = _key(event)
        gate = self.gates.get(model)
        if gate is None or event.no_wait or event.is_tool:
            return False
        if not self._enforces:
            if (seconds := gate.until - self.now()) > 0:
                what = f"the provider of '{model}', which asked to wait"
                self._waits.note(event.agent, seconds, what, "would have waited")
            return False
        if event.no_loop:
            await StepOut()
        visit, began = ProviderVisit(model), asyncio.get_running_loop().time()
        try:
            while not stopped():
                left = began + self._patience - asyncio.get_running_loop().time()
                left = min(left, self._waits.left_of(run))
                with self._lock:
                    gate = self.gates.get(model)
                    seconds = gate.until - self.now() if gate is not None else 0.0
                    if gate is None or left <= 0 or seconds > left:
                        return False
                    is_next = not gate.is_probed and next(iter(gate.waiting), visit) is visit
                    if seconds <= 0 and is_next:
                        gate.is_probed = True
                        return True
                    gate.waiting[visit] = None
                run.visits[visit] = None
                await visit.sleep(min(left, _LOOKS_S if seconds <= 0 else min(seconds, _LOOKS_S)))
            return False
        finally:
            self._leave(model, visit)
            if run.visits.pop(visit, visit) is None:
                waited = asyncio.get_running_loop().time() - began
                self._waits.note(event.agent, waited, f"the provider of '{model}', which asked to wait")

    def failed(self, charge: Charge, error: BaseException | None) -> None:
        """A call raised. Find out whether the provider asks to wait."""
        seconds = retry_after(error) if self._is_on else None
        if seconds is None:
            if charge.is_probe and _says_nothing(error):
                self.ended(charge, is_success=False)
            return
        model, was_probe, charge.is_probe = _key(charge), charge.is_probe, False
        with self._lock:
            if model not in self.gates and len(self.gates) >= _MODELS_KEPT:
                return
            gate, now = self.gates.setdefault(model, _Gate()), self.now()
            is_new = gate.until <= now
            gate.until = max(gate.until, now + seconds)
            if was_probe:
                gate.is_probed = False
        if is_new:
            waits = "its calls wait here, then one goes first" if self._enforces else "enforcing, its calls would wait"
            _log.warning("runguard.provider_busy: '%s' asks to wait %.1f s: %s", model, seconds, waits)

    def ended(self, charge: Charge, *, is_success: bool) -> None:
        """The probe has come back: free the model, or let another call try."""
        charge.is_probe = False
        self._come_back(_key(charge), is_success)

    def not_made(self, event: ModelCall) -> None:
        """The call that was to be the probe is not made: another call tries."""
        self._come_back(_key(event), False)

    def _come_back(self, model: str, is_success: bool) -> None:
        with self._lock:
            gate = self.gates.get(model)
            if gate is None:
                return
            gate.is_probed = False
            if is_success:
                del self.gates[model]
            woken = list(gate.waiting) if is_success else list(gate.waiting)[:1]
        for visit in woken:
            visit.wake()

    def _leave(self, model: str, visit: ProviderVisit) -> None:
        with self._lock:
            gate = self.gates.get(model)
            if gate is None or gate.waiting.pop(visit, visit) is not None:
                return
            first = next(iter(gate.waiting), None)
        if first is not None:
            first.wake()


def _key(call: ModelCall | Charge) -> str:
    """The model, or the callable where its model is unknown."""
    return normalise(call.model) if call.model else call.agent


def _says_nothing(error: BaseException | None) -> bool:
    """Whether a failure leaves open if the provider takes calls again: it was cancelled, lost, or is overloaded."""
    status = provider_status(error) if isinstance(error, Exception) else None
    return status is None or status == 429 or status >= 500
