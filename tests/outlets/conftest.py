"""Fixtures of this directory."""

from collections.abc import Iterator

import pytest

from runguard.reporting import telemetry
from tests.kit.telemetry import Sdk


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sdk]:
    made = Sdk()
    monkeypatch.setattr(telemetry, "_telemetry", made.wires)
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()
    made.loggers.shutdown()
