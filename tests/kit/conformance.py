"""Requests to a store, and what it must answer."""

import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Self

from runguard.core.money import UNLIMITED, Amount
from runguard.ledger.ledger import Balance, Line, StoreReply, StoreSession
from runguard.ledger.sqlite import SqliteSession, SqliteStore
from tests.kit.waiting import PATIENCE_S

LONG_S = 300.0  # a hold that no test outlives


SHORT_S = 0.001  # a hold that is over when the next call comes


FREE: Amount = (UNLIMITED, UNLIMITED, UNLIMITED)


CALL: Amount = (0, 0, 1)


SCOPE = "user:app/ann"


THREADS = 16


Connect = Callable[..., StoreSession]


numbers = count()


def a_line(
    key: str = "k#",
    caps: Amount = FREE,
    *,
    scope: str = SCOPE,
    window: str | None = None,
    begins: float | None = None,
    ends: float | None = None,
) -> Line:
    return Line(key, scope, window, begins, ends, caps)


def calls(number: int) -> Amount:
    return (UNLIMITED, UNLIMITED, number)


def an_id() -> str:
    return f"hold-{os.getpid()}-{next(numbers)}"


def past(session: StoreSession, line: Line, want: Amount, hold: str | None = None) -> str:
    """A hold whose time is over."""
    hold = hold or an_id()
    assert session.reserve(hold, SHORT_S, [line], want).ok
    time.sleep(0.02)
    return hold


def the(session: StoreSession, key: str = "k#") -> Balance:
    """One account, as a reader sees it."""
    (found,) = [balance for balance in session.read() if balance.key == key]
    return found


def of(reply: StoreReply, key: str = "k#") -> Balance:
    """One account, as an answer tells it."""
    (found,) = [balance for balance in reply.balances if balance.key == key]
    return found


# Each worker is a process of its own, forked from one that has imported everything: to start one costs milliseconds,
# and it can be killed.
WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload(
    ["runguard.ledger.sqlite", "runguard.ledger.redis", "redis", "runguard.ledger.postgres", "psycopg", "pytest"]
)


PREAMBLE = """
import os, random, resource, sys, time
from importlib import import_module
from runguard.core.money import UNLIMITED
from runguard.ledger.ledger import Line, StoreDeniedError, StoreError, StoreOutage
store = getattr(import_module(module), name)(url)
def line(key, caps=(UNLIMITED, UNLIMITED, UNLIMITED)):
    return Line(key, "user:app/ann", None, None, None, caps)
"""


class Worker:
    """Another process that works on the same store; ``say`` in its code is told here."""

    def __init__(self, place: Any, code: str, **facts: Any) -> None:
        self._pipe, theirs = WORKERS.Pipe()
        known = {
            "module": place.module,
            "name": place.name,
            "url": place.url,
            "say": theirs.send,
            "hear": theirs.recv,
            **facts,
        }
        self.process = WORKERS.Process(target=exec, args=(PREAMBLE + code, known), daemon=True)
        self.process.start()
        theirs.close()

    def told(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "not a word from the worker"
        return self._pipe.recv()

    def tell(self, word: str) -> None:
        self._pipe.send(word)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(PATIENCE_S)
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def opened(path: Path, timeout: float = PATIENCE_S) -> SqliteSession:
    return SqliteStore(f"sqlite:///{path}").connect(timeout)
