"""The store's records of runs: the figures of a run that ended or paused, and signs of life of those that run."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from runguard.accounting.accounts import Accounts
from runguard.conductor.carried import KEY as CARRIED
from runguard.conductor.run_forecasts import run_facts
from runguard.conductor.runs import Run
from runguard.ledger.ledger import StoreOutage, StoreSession


class RunRecords:
    """Writes the records of one guard's runs, where a store is shared."""

    def __init__(self, clock: Callable[[], float], runs: dict[str, Run], accounts: Accounts) -> None:
        self._clock, self._runs, self._accounts = clock, runs, accounts

    def write_end(self, run: Run, carried: dict[str, Any] | None = None) -> "Future[None] | None":
        """Write the figures of a run, and that it is not running any more.

        ``carried``: what another worker needs to resume it. Returns a future that is done when that is written, or
        None where nothing is written.
        """
        ledger = self._accounts.ledger
        if not ledger.is_shared or run.unsure:  # unsure: the record of what it used before is the better one
            return None
        facts = {**run.snapshot(self._clock()), "in_flight": 0, "spend": self._accounts.spending.of_run(run.run_costs)}
        figures = json.dumps(facts, default=str)
        record = figures if carried is None else json.dumps({**facts, CARRIED: carried}, default=str)
        written: Future[None] = Future()
        name = run.info.run  # the fact must not keep the run

        def write(session: StoreSession) -> None:
            try:
                session.append("run", name, record)
                session.beat(name, ledger.worker, figures, ended=True)
            except StoreOutage:
                raise  # the ledger tries again
            except BaseException:
                written.set_result(None)
                raise
            written.set_result(None)

        ledger.tell(write)
        return written

    def signs_of_life(self) -> Iterator[tuple[str, str]]:
        """The runs of this process and their figures. After a fork, the parent reports its own runs."""
        now, here = self._clock(), os.getpid()
        for run in [run for run in list(self._runs.values()) if run.pid == here]:
            yield run.info.run, json.dumps(run_facts(run, self._accounts, now), default=str)
