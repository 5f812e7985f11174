"""Background threads of the package go on whatever happens in them, and are started again when they are gone."""

import asyncio
import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from runguard import background
from runguard.alerts import Alert, AlertSettings
from runguard.background import FinalizerQueue, off_loop, start_thread
from runguard.calls.surroundings import drive
from runguard.ledger import sqlite as writer_queue
from runguard.ledger.ledger import StoreOutage
from runguard.reporting.delivery import Alerts
from runguard.reporting.telemetry import Outbox

LONG = 10.0
UNFORESEEN = [KeyError, MemoryError, SystemExit, asyncio.CancelledError, GeneratorExit]
unforeseen = pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: error.__name__)


class BrokenLog(logging.Filter):
    """A filter of an application that cannot be logged through."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise SystemExit("broken")


@pytest.fixture
def broken_log() -> Iterator[None]:
    broken = BrokenLog()
    logging.getLogger("runguard").addFilter(broken)
    yield
    logging.getLogger("runguard").removeFilter(broken)


# ---- the thread itself ----------------------------------------------------------------------------------------------


@unforeseen
def test_the_work_of_a_thread_starts_again_after_any_exception(error: type[BaseException]) -> None:
    faults, tries = [], []

    def work() -> None:
        tries.append(1)
        if len(tries) < 4:
            raise error("unforeseen")

    start_thread("t", work, lambda: faults.append(1)).join(LONG)
    assert (len(tries), len(faults)) == (4, 3)


def test_a_thread_survives_a_log_and_a_handler_that_raise(broken_log: None) -> None:
    tries = []

    def work() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("unforeseen")

    def on_fault() -> None:
        raise SystemExit("unforeseen too")

    start_thread("t", work, on_fault).join(LONG)
    assert len(tries) == 3


def test_many_exceptions_are_not_many_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background, "_PAUSE_S", 0.0)
    tries = []

    def work() -> None:
        tries.append(1)
        if len(tries) <= 100:
            raise ValueError("again")

    with caplog.at_level(logging.ERROR, "runguard"):
        start_thread("t", work).join(LONG)
    assert [list(record.args or ())[1] for record in caplog.records] == [1, 2, 4, 8, 16, 32, 64]


# ---- each of the package's threads ----------------------------------------------------------------------------------


def test_callbacks_go_on_after_one_whose_failure_cannot_be_logged(broken_log: None) -> None:
    out = Outbox()
    heard: list[Any] = []

    def broken(_: object) -> None:
        raise ValueError("no")

    for callback in (broken, heard.append, broken, heard.append):
        out.send(callback, 1)
    assert out.flush(LONG)
    assert (heard, out.failed) == ([1, 1], 2)


def test_a_flush_of_callbacks_starts_a_thread_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Outbox()
    heard: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "_work", lambda _: None)
        out.send(heard.append, 1)
        assert out._thread is not None
        out._thread.join(LONG)
    assert out.flush(LONG)
    assert heard == [1]


def test_where_no_thread_can_be_started_callbacks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Outbox()
    heard: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        out.send(heard.append, 1)
        assert not out.flush(0.05)
    assert out.flush(LONG)
    assert heard == [1]


def _refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_alerts_go_on_after_one_whose_failure_cannot_be_logged(broken_log: None) -> None:
    heard = []

    def receive(alert: Alert) -> None:
        heard.append(alert)
        raise KeyError("no")

    alerts = Alerts(AlertSettings.parse(receive))
    for number in range(3):
        alerts.send(_alert(f"run:{number}"))
    assert alerts.flush(LONG)
    assert len(heard) == 3
    assert [counts["failed"] for counts in alerts.counts.values()] == [3]


def test_a_flush_of_alerts_starts_a_thread_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    alerts = Alerts(AlertSettings.parse(lambda alert: heard.append(alert)))
    line = alerts._queues[0]
    with monkeypatch.context() as patch:
        patch.setattr(type(line), "_work", lambda _: None)
        alerts.send(_alert("run:1"))
        assert line._thread is not None
        line._thread.join(LONG)
    assert alerts.flush(LONG)
    assert len(heard) == 1


def _alert(key: str) -> Alert:
    return Alert(kind="trip", key=key, severity="critical", text="stopped")


@unforeseen
def test_dropped_streams_are_booked_after_one_that_could_not_be(error: type[BaseException]) -> None:
    jobs, booked = FinalizerQueue(), []
    jobs.ready()

    def broken() -> None:
        raise error("unforeseen")

    for job in (broken, lambda: booked.append(1)):
        jobs.put(job)
    assert jobs.flush(LONG)
    assert booked == [1]


def test_a_thread_for_dropped_streams_that_is_gone_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, booked = FinalizerQueue(), []
    with monkeypatch.context() as patch:
        patch.setattr(FinalizerQueue, "_work", lambda *_: None)
        jobs.ready()
        assert jobs._thread is not None
        jobs._thread.join(LONG)
        jobs.put(lambda: booked.append(1))
    assert jobs.flush(LONG)
    assert booked == [1]


@unforeseen
def test_calls_without_a_loop_can_wait_after_one_that_met_an_exception(error: type[BaseException]) -> None:
    async def broken() -> None:
        await asyncio.sleep(0)
        raise error("unforeseen")

    async def fine() -> str:
        await asyncio.sleep(0)
        return "done"

    with pytest.raises((error, CancelledError)):
        drive(broken, True, lambda _: None)
    assert drive(fine, True, lambda _: None) == "done"


def test_a_line_for_a_database_file_can_be_stood_in_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for the file's lock met an exception: the next call must not wait for a thread that is
    gone.
    """
    line = writer_queue.WriterQueue(tmp_path / "a.db", 1.0)
    with Path(f"{tmp_path}/a.db-next").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", _unlucky(fcntl.flock))
            with pytest.raises(StoreOutage):
                line.take()
        threading.Timer(0.1, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        line.take()
    line.leave()
    line.close()


def _unlucky(flock: Callable[..., None]) -> Callable[..., None]:
    def locked(file: object, operation: int) -> None:
        if threading.current_thread().name == "runguard-sqlite":
            raise MemoryError("in the kernel's line")
        flock(file, operation)

    return locked


async def test_what_reads_files_runs_in_another_thread_than_the_loop() -> None:
    here = threading.get_ident()
    assert off_loop(threading.get_ident) != here
    with pytest.raises(LookupError, match="its own"):
        off_loop(_fail)


def test_what_reads_files_runs_here_where_no_loop_runs() -> None:
    assert off_loop(threading.get_ident) == threading.get_ident()


def _fail() -> None:
    raise LookupError("its own")
