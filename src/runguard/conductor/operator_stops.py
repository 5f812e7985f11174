"""The kill switch at work: an operator stops a scope, every worker of the store enforces it."""

import json
import threading
from collections.abc import Callable

from runguard.accounting.accounts import Accounts
from runguard.accounting.budget_groups import scopes_of
from runguard.accounting.refusals import finding_of_stop
from runguard.conductor.breakers import Breakers
from runguard.conductor.deciding import Deciding
from runguard.conductor.runs import Run
from runguard.core.events import ROOT_LANE, ModelCall
from runguard.ledger.ledger import Stop, check_actor, check_reason, check_scope, read_stops, with_stops
from runguard.outlets.alarms import Alarms


class OperatorStops:
    """Changes the stops in the control document of the store, and applies them to the runs of one guard."""

    def __init__(
        self,
        clock: Callable[[], float],
        runs: dict[str, Run],
        accounts: Accounts,
        breakers: Breakers,
        deciding: Deciding,
        alarms: Alarms | None,
        before: "OperatorStops | None" = None,
    ) -> None:
        """``before``: those of a guard that this one replaces. Both change the document one after the other."""
        self._clock, self._runs, self._accounts, self._breakers = clock, runs, accounts, breakers
        self._deciding, self._alarms = deciding, alarms
        self._changing: threading.Lock = threading.Lock() if before is None else before._changing
        accounts.switch.listen(self._enforce)

    def throw(self, scope: str, actor: str, reason: str | None) -> None:
        """Stop a scope: end its calls in flight and refuse later calls and runs, on every worker of the store."""
        stop = Stop(check_scope(scope), check_actor(actor), check_reason(reason), self._clock())
        self.change(lambda stops: {**stops, scope: stop})
        if self._alarms is not None:
            self._alarms.switched(scope, stop)

    def release(self, scope: str) -> None:
        """Let a scope run again."""
        check_scope(scope)
        self.change(lambda stops: {name: stop for name, stop in stops.items() if name != scope})
        if self._alarms is not None:
            self._alarms.switched(scope, None)

    def change(self, change: Callable[[dict[str, Stop]], dict[str, Stop]]) -> None:
        ledger = self._accounts.ledger
        with self._changing:  # the document and the copy here change as one
            text = ledger.change_control(lambda text: with_stops(text, change(read_stops(text))))
            if not ledger.is_shared:  # a shared one calls ``on_control``, in order
                self._accounts.switch.load(text)

    def in_force(self) -> list[Stop]:
        """The stops of the store as it is now."""
        self._accounts.ledger.refresh_now()
        return list(self._accounts.switch.stops.values())

    def on_control(self, text: str) -> None:
        """The control document of the store has changed: read its stops and breakers."""
        self._accounts.switch.load(text)
        self._breakers.load(json.loads(text or "{}"))

    def _enforce(self) -> None:
        """The list of stops has changed. Called from any thread."""
        stopped: list[Run] = []
        for run in list(self._runs.values()):
            stop = self._accounts.switch.of(scopes_of(run.info)) if run.stopped is None else None
            if stop is not None:
                event = ModelCall(run.info.run, ROOT_LANE, "", self._clock())
                self._deciding.decide(run, run.lanes[ROOT_LANE], event, finding_of_stop(stop))
                stopped.append(run)
        if not self._deciding.enforces:
            return
        for run in stopped:  # all are marked by now: no run takes what another one gives back
            for end in list(run.in_flight):
                end()
