"""Guards for the tests of decisions."""

from collections.abc import Iterator
from typing import Any

import pytest

from runguard.core.decision import (
    ALLOW,
    Decision,
)


@pytest.fixture(autouse=True)
def allow_stays_allow() -> Iterator[None]:
    """ALLOW is one object for everybody: whoever writes on it lies to all."""
    yield
    changed = Decision() != ALLOW
    for name in ("finding", "trip", "retry_after"):
        setattr(ALLOW, name, None)
    assert not changed


# a loop under the default rungs
LADDER = ["allow", "allow", "allow", "nudge", "allow", "allow", "allow", "block", "stop"]


def loop(d: Any, times: int = len(LADDER), **where: Any) -> list[str]:
    return [d.tool("loop", **where).word for _ in range(times)]
