"""Connecting to a Postgres server, and waiting for it, within a deadline."""

import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

from runguard.ledger.postgres.error_mapping import DeadlineError
from runguard.ledger.postgres.schema import MIGRATION_S

if TYPE_CHECKING:
    import psycopg

_PAUSE: Final = 0.05  # share of the remaining time after which the clock is checked again
_SHORTEST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.25


@functools.cache
def connection_class() -> "type[psycopg.Connection[tuple[Any, ...]]]":
    import psycopg

    class Bounded(psycopg.Connection[tuple[Any, ...]]):
        """Waits for the server until ``end`` and not longer: keepalive probes do not find a stalled server."""

        end = math.inf

        def wait(self, gen: Any, *_args: Any, **_options: Any) -> Any:
            # The clock is checked after each pause, so pauses must be short: one as long as the remaining time that
            # ends a moment early would be waited for twice.
            pause = (self.end - time.monotonic()) * _PAUSE
            return super().wait(_until(gen, self.end), min(max(pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    return Bounded


def _until(gen: Generator[Any, Any, Any], end: float) -> Generator[Any, Any, Any]:
    """psycopg's exchange with a socket, ended when the socket is silent for too long."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() >= end:
                raise DeadlineError
            state = gen.send(ready)
    except StopIteration as done:
        return done.value


def dial(params: dict[str, Any], end: float) -> "psycopg.Connection[tuple[Any, ...]]":
    """Connect on a thread, because only that ends in time: libpq counts whole seconds, the resolver has no limit."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    late = threading.Event()

    def connect() -> None:
        try:
            answers.put(connection_class().connect(**params, autocommit=True))
        except BaseException as error:
            answers.put(error)
        if late.is_set():
            with contextlib.suppress(queue.Empty):
                discard(answers.get_nowait())

    threading.Thread(target=connect, name="runguard-postgres", daemon=True).start()
    try:
        answer = answers.get(timeout=max(end - time.monotonic(), 0.001))
    except queue.Empty:
        late.set()
        with contextlib.suppress(queue.Empty):
            discard(answers.get_nowait())
        raise DeadlineError from None
    if isinstance(answer, BaseException):
        raise answer
    connection: psycopg.Connection[tuple[Any, ...]] = answer
    return connection


def discard(connection: Any) -> None:
    with contextlib.suppress(Exception):
        connection.close()


def socket_limits(timeout: float) -> dict[str, Any]:
    """Time limits of libpq and the operating system. A URL may override them."""
    seconds = max(math.ceil(timeout), 1)
    return {
        "connect_timeout": max(seconds, 2),  # libpq's minimum
        "tcp_user_timeout": _milliseconds(timeout),
        "keepalives_idle": seconds,
        "keepalives_interval": seconds,
        "keepalives_count": 2,
        "fallback_application_name": "runguard",
    }


def server_settings(timeout: float, more: object) -> str:
    """Settings of the server. It gives up before the client does, so that its answer still arrives and the connection
    can be kept. Options of the URL come last and win.
    """
    settings = {
        "statement_timeout": _milliseconds(timeout * 0.9),
        "lock_timeout": _milliseconds(timeout * 0.8),
        # ends the transaction of a worker that vanished while it created the schema
        "idle_in_transaction_session_timeout": _milliseconds(max(timeout, MIGRATION_S) * 2),
        "synchronous_commit": "on",
        # each statement sees what was committed while it waited for a lock
        "default_transaction_isolation": "read\\ committed",
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",  # plans are made while the tables are small, and kept
        "jit": "off",
    }
    return " ".join([*(f"-c {name}={value}" for name, value in settings.items()), *([str(more)] if more else [])])


def _milliseconds(seconds: float) -> int:
    return min(max(round(seconds * 1000), 1), 2**31 - 1)
