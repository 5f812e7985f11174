"""The queue of alerts, threads and forks."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from runguard import background
from runguard.alerts import Alert, Alerts, AlertSettings
from runguard.reporting import delivery as sending
from runguard.reporting.alerts import Parcel
from tests.kit.alert_servers import (
    PATIENT,
    Server,
    alert,
    alerts,
    hang,
    sent,
    short_pauses_and_no_leftovers,  # noqa: F401 - an autouse fixture
)
from tests.kit.waiting import until


def test_send_returns_while_the_receiver_hangs_and_a_slow_one_does_not_delay_a_fast_one(
    serve: Callable[..., Server],
) -> None:
    slow, fast = serve(hang), serve()
    patient = {"timeout_seconds": PATIENT, "deadline_seconds": PATIENT}
    told = Alerts(AlertSettings.parse([{"webhook": slow.url(), **patient}, {"webhook": fast.url()}]))
    for number in range(5):
        told.send(alert(f"key {number}"))
    until(lambda: told.counts["webhook-2"]["sent"] == 5)
    assert told.counts["webhook"]["sent"] == told.counts["webhook"]["failed"] == 0
    assert told.flush(0.05) is False
    slow.answers = [200]
    slow.release.set()
    assert sent(told) == {"sent": 5}


def test_a_full_queue_drops_counts_and_tells_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending._ReceiverQueue, "capacity", 3)
    go, heard, busy = threading.Event(), [], threading.Event()

    def slow(told: Alert) -> None:
        busy.set()
        go.wait(PATIENT)
        heard.append(told.key)

    told = Alerts(AlertSettings.parse(slow))
    told.send(alert("first"))
    assert busy.wait(PATIENT)
    for number in range(8):
        told.send(alert(f"key {number}"))
    assert told.counts["call"] == {"sent": 0, "failed": 0, "dropped": 5, "suppressed": 0}
    assert caplog.text.count("runguard.alert_dropped") == 3  # at 1, 2 and 4
    go.set()
    assert told.flush(PATIENT)
    told.send(alert("key 7"))
    told.send(alert("key 0"))
    assert told.flush(PATIENT)
    assert heard == ["first", "key 0", "key 1", "key 2", "key 7"]


def test_what_waited_beyond_its_deadline_is_still_tried_once(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    told = alerts(webhook=server.url(), deadline_seconds=0.5)
    monkeypatch.setattr(sending, "parcel_of", lambda *given: Parcel(alert(), "topic", "event", time.monotonic() - 100))
    told.send(alert())
    assert sent(told) == {"sent": 1}


def test_a_thread_starts_with_the_first_alert_and_ends_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_S", 0.05)
    heard: list[threading.Thread] = []
    told = Alerts(AlertSettings.parse(lambda _: heard.append(threading.current_thread())))
    assert told._queues[0]._thread is None
    told.send(alert("one"))
    assert told.flush(PATIENT)
    assert heard[0].daemon
    until(lambda: not heard[0].is_alive())
    told.send(alert("two"))
    assert told.flush(PATIENT)
    assert len(heard) == 2
    assert heard[1] is not heard[0]


def test_many_threads_send_and_nothing_is_lost() -> None:
    heard: list[str] = []
    told = Alerts(AlertSettings.parse(lambda one: heard.append(one.key)))

    def send(n: int) -> None:
        for i in range(20):
            told.send(alert(f"{n} {i % 10}"))

    senders = [threading.Thread(target=send, args=(n,)) for n in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert told.flush(PATIENT)
    assert sorted(heard) == sorted(f"{n} {i}" for n in range(8) for i in range(10))
    assert told.counts["call"] == {"sent": 80, "failed": 0, "dropped": 0, "suppressed": 80}


def test_no_thread_to_be_had_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Alert] = []
    told = Alerts(AlertSettings.parse(heard.append))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refuse)
        told.send(alert("one"))
        assert told.flush(0.01) is False
    told.send(alert("two"))
    assert told.flush(PATIENT)
    assert [one.key for one in heard] == ["one", "two"]
    assert "runguard.alert_failed" not in caplog.text


@pytest.mark.parametrize("wrong", [None, "text", 7])
def test_send_never_raises(caplog: pytest.LogCaptureFixture, wrong: Any) -> None:
    heard: list[Alert] = []
    told = Alerts(AlertSettings.parse(heard.append))
    told.send(wrong)
    assert "runguard.alert_failed" in caplog.text
    told.send(alert())
    assert told.flush(PATIENT)
    assert len(heard) == 1


_FORK = """
import os, signal, threading
from runguard.alerts import Alert, Alerts, AlertSettings

heard, gate = [], threading.Event()
def listen(one):
    gate.wait(10)
    heard.append(one.key)

def alert(key):
    return Alert("trip", key, "info", "text")

alerts = Alerts(AlertSettings.parse(listen))
alerts.send(alert("in flight"))
alerts.send(alert("waiting"))

held, forked = threading.Event(), threading.Event()
def hold():
    with alerts._queues[0]._changed:
        held.set()
        forked.wait(10)

threading.Thread(target=hold).start()
held.wait(10)
child = os.fork()  # at the worst moment: another thread holds the lock
if child == 0:
    signal.alarm(20)  # a child that waits for a lock for ever is a failure, not a leftover
    gate.set()
    alerts.send(alert("waiting"))  # the parent tells it
    alerts.send(alert("of the child"))
    counts = {"sent": 1, "failed": 0, "dropped": 0, "suppressed": 1}
    ok = alerts.flush(10) and heard == ["of the child"] and alerts.counts["call"] == counts
    os._exit(0 if ok else 1)
forked.set()
gate.set()
_, status = os.waitpid(child, 0)
assert alerts.flush(10)
print(os.waitstatus_to_exitcode(status), heard)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_sends_its_own_alerts_and_only_these() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout.strip() == "0 ['in flight', 'waiting']", done.stderr


def test_a_process_that_ends_sends_what_is_waiting(serve: Callable[..., Server]) -> None:
    server = serve()
    script = f"""
from runguard.alerts import Alert, Alerts, AlertSettings
Alerts(AlertSettings.parse({{"webhook": {server.url()!r}}})).send(Alert("trip", "key", "info", "the last word"))
"""
    subprocess.run([sys.executable, "-c", script], timeout=50, check=True)
    assert [body["text"] for body in server.bodies()] == ["the last word"]
