"""How the suite is shared out between processes: what is dear to set up is set up in one of them."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("untimed", deadline=None, max_examples=60)  # a slow machine is not a failure
settings.load_profile("untimed")

# by how a test's name begins; named here and not by xdist's own marks, whose suffixes on names hide a failed test from
# a second try
TOGETHER = {
    "tests/dashboard/test_browser.py": "browser",
    "tests/docs_site/test_site.py": "site",
    "tests/providers/test_reading.py::test_litellm": "litellm",
    "tests/wire/test_seed_example.py": "litellm",
}


class Together(LoadScopeScheduling):
    """Test by test to whoever is free, except those that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


@pytest.fixture(autouse=True)
def _no_ledger_stays_open() -> Iterator[None]:
    """Close the ledgers that a test opened: each has five threads and as many connections. Those of a session-wide
    fixture stay open.
    """
    yield
    remote = sys.modules.get("runguard.ledger.remote")
    for ledger in list(remote._ledgers) if remote is not None else ():
        if not getattr(ledger, "stays_open", False):
            ledger.close()


@pytest.fixture
def drive() -> Any:
    """``drive(**policy)`` gives a driver with one started run named "run"."""
    from tests.kit.driver import Driver

    return Driver
