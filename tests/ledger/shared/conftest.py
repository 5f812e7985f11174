"""Fixtures of this directory."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote
from runguard.ledger.ledger import Store
from tests.kit.money import PRICES
from tests.kit.shared_stores import Make, ledger, thousand
from tests.kit.stores import Place


@pytest.fixture
def worker(place: Place) -> Iterator[Make]:
    """Makes guards on the test's store, each with a ledger of its own, as workers in different processes have."""
    made: list[RunGuardPlugin] = []

    def make(
        store: Store | None = None, *, url: str = "", usd: str = "", thresholds: Sequence[Threshold] = (), **policy: Any
    ) -> RunGuardPlugin:
        address, timeout = url or place.url, policy.pop("store_timeout", 5.0)
        known = {address: remote.StoreLedger(store, timeout)} if store is not None else {}
        budgets = [Budget(usd=usd, per="user", window=policy.pop("window", None), thresholds=thresholds)] if usd else []
        with mock.patch.dict(remote._open, known, clear=True):
            plugin = RunGuardPlugin(
                **{
                    "prices": PRICES,
                    "tokens": thousand,
                    "store": address,
                    "store_timeout": timeout,
                    "budgets": budgets,
                    **policy,
                }
            )
        made.append(plugin)
        return plugin

    if place.kind == "postgres":
        place.connect().close()  # the schema is made once, and not within the deadline of a call
    yield make
    for plugin in made:
        ledger(plugin).flush(2)
    if place.kind == "postgres":  # a ledger keeps its connections, and a server has few
        import psycopg

        with psycopg.connect(place.url.partition("?")[0], autocommit=True) as link:
            link.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
                "backend_type = 'client backend'"
            )
