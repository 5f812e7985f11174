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
from runguard.ledger.ledger import Line, StoreOutage, StoreSession
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
def session(place: Any, repeating: Repeating) -> Iterator[StoreSession]:
    """The server knows the account and the scripts: each question is one request. One of three calls is booked, one is
    held.
    """
    proxy, url = Proxy.before(place.url, repeating)
    made: StoreSession = dataclasses.replace(place, url=url).connect(2.0)
    for hold in ("zero", "one"):
        made.reserve(hold, 60, [LINE], CALL)
    made.settle("zero", [LINE], CALL)
    yield made
    made.close()
    proxy.cut()


on_servers = pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)


@on_servers
def test_a_yes_that_arrives_twice_grants_one_call(session: StoreSession, repeating: Repeating) -> None:
    with repeating.once_more():
        assert again(lambda: session.reserve("two", 60, [LINE], CALL)).ok
    for number in range(3):
        assert not again(lambda number=number: session.reserve(f"more {number}", 60, [LINE], CALL)).ok  # type: ignore[misc]


@on_servers
def test_a_settlement_that_never_arrived_is_not_taken_for_booked(session: StoreSession, repeating: Repeating) -> None:
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


def texts(rows: Any) -> list[str]:
    return [row[-1] for row in rows]


# Two questions to which the answers differ, and the right answer to the second one.
QUESTIONS: dict[str, tuple[Callable[[StoreSession], Any], Callable[[StoreSession], Any], Any]] = {
    "another document": (lambda s: s.get("a"), lambda s: s.get("b"), (1, "text of b")),
    "a document after none": (lambda s: s.get("none"), lambda s: s.get("a"), (1, "text of a")),
    "no document after one": (lambda s: s.get("a"), lambda s: s.get("none"), (0, "")),
    "marks after none": (lambda s: s.marks("none"), lambda s: s.marks(LINE.key), {"half": (0.5, CALL)}),
    "no marks after some": (lambda s: s.marks(LINE.key), lambda s: s.marks("none"), {}),
    "records after none": (lambda s: s.tail("none", 9), lambda s: texts(s.tail("call", 9)), ["one", "two"]),
    "fewer records": (lambda s: s.tail("call", 9), lambda s: texts(s.tail("call", 1)), ["two"]),
    "no records after some": (lambda s: s.tail("call", 9), lambda s: s.tail("none", 9), []),
    "records about another": (lambda s: s.about("call", "a"), lambda s: texts(s.about("call", "b")), ["two"]),
    "records about nothing": (lambda s: s.about("call", "a"), lambda s: s.about("call", "none"), []),
    "runs after none": (lambda s: s.running(0.0), lambda s: [run[0] for run in s.running(60.0)], ["run"]),
    "a document after a removal": (lambda s: s.drop("none"), lambda s: s.get("a"), (1, "text of a")),
    "a document after records": (lambda s: s.tail("call", 1), lambda s: s.get("a"), (1, "text of a")),
    "a document after an unmarking": (lambda s: s.unmark("none", ["half"]), lambda s: s.get("a"), (1, "text of a")),
    "a mark after another": (lambda s: s.first(LINE.key, "x", 0.5, CALL), lambda s: s.first(LINE.key, "x", 1, CALL), 0),
}


@on_servers
@pytest.mark.parametrize("name", QUESTIONS)
def test_no_answer_is_taken_for_another(session: StoreSession, repeating: Repeating, name: str) -> None:
    for text in ("a", "b"):
        session.put(text, 0, f"text of {text}")
    session.first(LINE.key, "half", 0.5, CALL)
    session.append("call", "a", "one")
    session.append("call", "b", "two")
    session.beat("run", "worker", "facts")
    first, second, expected = QUESTIONS[name]
    for ask in (lambda: session.running(0.0), lambda: session.get("none"), lambda: session.about("call", "a")):
        ask()  # a script that the server does not know yet would take two requests
    with repeating.once_more():
        again(lambda: first(session))
    assert again(lambda: second(session)) == expected


@on_servers
def test_a_clock_that_answers_twice_is_not_believed_twice(session: StoreSession, repeating: Repeating) -> None:
    session.now()
    with repeating.once_more():
        before = again(session.now)
    assert again(session.now) > before


WRITES: dict[str, tuple[Callable[[StoreSession], Any], Callable[[StoreSession], Any], Any]] = {
    "append": (lambda s: s.append("call", "r", "text"), lambda s: set(texts(s.tail("call", 9))), {"text"}),
    "unmark": (lambda s: s.unmark(LINE.key, ["half"]), lambda s: s.marks(LINE.key), {}),
    "drop": (lambda s: s.drop("a"), lambda s: s.get("a"), (0, "")),
}


@on_servers
@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_never_arrived_is_not_taken_for_done(
    session: StoreSession, repeating: Repeating, name: str
) -> None:
    write, read, expected = WRITES[name]
    write(session)
    session.put("a", 0, "text")
    session.first(LINE.key, "half", 0.5, CALL)
    with repeating.once_more():
        again(lambda: write(session))
    repeating.deaf = True
    with pytest.raises(StoreOutage):
        write(session)
    repeating.deaf = False
    again(lambda: write(session))
    assert again(lambda: read(session)) == expected
