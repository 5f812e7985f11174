"""Fixtures of this directory."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.stores import Place
from tests.kit.vanishing_stores import Make, Worker


@pytest.fixture
def worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr("runguard.adk.runs._WRITE_S", 0.05)  # how long the end of a run waits for a lost store
    made: list[Worker] = []

    def make(**policy: Any) -> Worker:
        made.append(Worker(policy.pop("url", place.url), **policy))
        return made[-1]

    if place.kind == "postgres":
        place.connect().close()  # the schema is made once, and not within the deadline of a call
    yield make
    for one in made:
        if not one.ledger.is_away:
            one.plugin.flush(1)
