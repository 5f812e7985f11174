"""A server's answer that arrives twice, as after a fault of a proxy: it is never taken for the answer to the next
request.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from runguard.core.money import UNLIMITED
from runguard.ledger.store import Line, Session, StoreOutage
from tests.kit.proxy import Proxy, Send

T = TypeVar("T")
LINE = Line("app:a#", "app:a", None, None, None, (UNLIMITED, UNLIMITED, 3))
CALL = (0, 0, 1)


class Repeating:
    """Sends an answer of the server a second time, a moment later; or keeps back what the client sends."""

    def __init__(self) -> None:
        self.twice = self.deaf = False
        self._sent = threading.Event()

    def __call__(self, data: bytes, from_server: bool, _: int, send: Send) -> bool:
        if from_server or not self.deaf:
            send(data)
        if from_server and self.twice:
            self.twice = False
            time.sleep(0.05)  # the client has read the first one
            send(data)
            self._sent.set()
        return True

    @contextlib.contextmanager
    def once_more(self) -> Iterator[None]:
        """The answer to the request inside comes again."""
        self.twice = True
        yield
        assert self._sent.wait(5)


def again(ask: Callable[[], T]) -> T:
    """As the ledger asks: once more on a new connection after an outage."""
    try:
        return ask()
    except StoreOutage:
        return ask()


@pytest.fixture
def repeating() -> Repeating:
    return Repeating()


@pytest.fixture
def session(place: Any, repeating: Repeating) -> Iterator[Session]:
    """The server knows the account and the scripts: each question is one request. One of three calls is booked, one is
    held.
    """
    proxy, url = Proxy.before(place.url, repeating)
    made: Session = dataclasses.replace(place, url=url).connect(2.0)
    for hold in ("zero", "one"):
        made.reserve(hold, 60, [LINE], CALL)
    made.settle("zero", [LINE], CALL)
    yield made
    made.close()
    proxy.cut()


on_servers = pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)


@on_servers
def test_a_yes_that_arrives_twice_grants_one_call(session: Session, repeating: Repeating) -> None:
    with repeating.once_more():
        assert again(lambda: session.reserve("two", 60, [LINE], CALL)).ok
    for number in range(3):
        assert not again(lambda number=number: session.reserve(f"more {number}", 60, [LINE], CALL)).ok  # type: ignore[misc]


@on_servers
def test_a_settlement_that_never_arrived_is_not_taken_for_booked(session: Session, repeating: Repeating) -> None:
    session.reserve("two", 60, [LINE], CALL)
    with repeating.once_more():
        again(lambda: session.settle("one", [LINE], CALL))  # a slow client finds both answers at once, and asks again
    repeating.deaf = True
    with pytest.raises(StoreOutage):
        session.settle("two", [LINE], CALL)
    repeating.deaf = False
    again(lambda: session.settle("two", [LINE], CALL))
    (found,) = again(lambda: session.read("app:a"))
    assert (found.spent, found.held) == ((0, 0, 3), (0, 0, 0))
