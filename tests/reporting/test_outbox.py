"""Callbacks leave in order on a thread of their own; whatever they do, whoever sends goes on."""

import os
import threading
from typing import Any

import pytest

from runguard import background
from runguard.reporting.telemetry import Outbox
from tests.kit.waiting import until


def test_callbacks_run_in_order_on_another_thread() -> None:
    out, heard = Outbox(), []
    for number in range(50):
        out.send(lambda value: heard.append((value, threading.current_thread().name)), number)
    assert out.flush(5)
    assert [value for value, _ in heard] == list(range(50))
    assert {name for _, name in heard} == {"runguard-outbox"}


def test_one_that_raises_or_is_awaited_keeps_nobody_from_the_rest() -> None:
    out, heard = Outbox(), []

    async def later(value: int) -> None:
        heard.append(value)

    def broken(value: int) -> None:
        raise SystemExit("no")

    for callback in (broken, later, heard.append):
        out.send(callback, 1)
    assert out.flush(5)
    assert (heard, out.failed) == ([1, 1], 1)


def test_what_does_not_fit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "capacity", 3)
    out, go = Outbox(), threading.Event()
    heard: list[Any] = []
    out.send(lambda _: go.wait(5), None)
    until(lambda: not out._waiting)
    for number in range(5):
        out.send(heard.append, number)
    go.set()
    assert out.flush(5)
    assert (heard, out.dropped) == ([0, 1, 2], 2)


def test_a_thread_without_work_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_S", 0.01)
    out = Outbox()
    heard: list[Any] = []
    out.send(heard.append, 1)
    until(lambda: out._thread is None)
    out.send(heard.append, 2)
    assert out.flush(5)
    assert heard == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_sends_its_own_and_not_its_parents() -> None:
    out, go = Outbox(), threading.Event()
    out.send(lambda _: go.wait(10), None)
    reader, writer = os.pipe()
    out.send(lambda value: os.write(writer, value), b"parent ")
    with out._changed:  # the worst moment
        child = os.fork()
        if child == 0:
            out.send(lambda value: os.write(writer, value), b"child ")
            os._exit(0 if out.flush(5) else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    assert out.flush(5)
    os.close(writer)
    assert status == 0
    assert os.read(reader, 100) == b"child parent "
    os.close(reader)
