"""Every store keeps marks, documents, records and claims alike."""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from runguard.core.money import NOTHING
from runguard.ledger.ledger import Store, StoreOutage, StoreSession
from tests.kit.conformance import CALL, LONG_S, SHORT_S, Connect, a_line, an_id, calls, past, the
from tests.kit.waiting import PATIENCE_S, at_once

# ---- marks ----------------------------------------------------------------------------------------------------------


def test_unmark_arms_what_it_names_and_nothing_else(session: StoreSession) -> None:
    for key in ("a#", "b#"):
        for mark in ("x", "y", "z"):
            session.first(key, mark, 0.5, NOTHING)
    session.unmark("a#", ["x", "z", "never"])
    session.unmark("a#", [])
    assert list(session.marks("a#")) == ["y"]
    assert len(session.marks("b#")) == 3
    assert session.first("a#", "x", 0.25, CALL)
    assert not session.first("a#", "x", 0.25, CALL)
    assert session.marks("a#")["x"] == (0.25, CALL)


# ---- documents ------------------------------------------------------------------------------------------------------


def test_a_document_is_replaced_only_by_who_has_seen_its_version(session: StoreSession, connect: Connect) -> None:
    assert session.get("control") == (0, "")
    assert not session.put("control", 1, "no such version yet")
    assert session.put("control", 0, "one")
    assert not session.put("control", 0, "somebody else was first")
    assert session.get("control") == (1, "one")
    assert connect().put("control", 1, "two")
    for wrong in (0, 1, 3, -1):
        assert not session.put("control", wrong, "late")
    assert session.get("control") == (2, "two")
    assert session.put("control", 2, "")
    assert session.get("control") == (3, "")


def test_every_answer_carries_the_version_of_the_control_document(session: StoreSession) -> None:
    line = a_line(caps=calls(1))
    stale = a_line(ends=session.now() - 1)
    session.put("another", 0, "x")
    for version in range(3):
        assert session.reserve(f"a{version}", LONG_S, [line], CALL).control == version
        assert session.reserve(f"a{version}", LONG_S, [line], CALL).control == version  # known
        assert session.reserve(an_id(), LONG_S, [line], (0, 0, 9)).control == version  # refused
        assert session.reserve(an_id(), LONG_S, [stale], CALL).control == version
        assert session.release(f"a{version}").control == version
        assert session.release("unknown").control == version
        assert session.settle(an_id(), [a_line("other#")], CALL).control == version
        assert session.beat("run", "w", "") == version
        assert session.put("control", version, "stop")


# ---- records, runs, claims ------------------------------------------------------------------------------------------


def test_the_last_records_of_a_kind_come_oldest_first(session: StoreSession) -> None:
    before = session.now()
    for number in range(12):
        session.append("alert", f"run:{number}", f"text {number}")
        session.append("other", "r", "t")
    told = session.tail("alert", 5)
    assert [(ref, text) for _, ref, text in told] == [(f"run:{number}", f"text {number}") for number in range(7, 12)]
    assert [at for at, *_ in told] == sorted(at for at, *_ in told)
    assert all(before - 0.01 <= at <= session.now() + 0.01 for at, *_ in told)
    assert len(session.tail("alert", 100)) == 12
    assert session.tail("alert", 0) == []
    assert session.tail("none", 5) == []
    session.append("alert", "run:11", "text 11")  # the same once more is one more
    assert len(session.tail("alert", 100)) == 13


def test_all_records_about_one_thing_come_oldest_first(session: StoreSession, connect: Connect) -> None:
    before = session.now()
    for number in range(700):
        session.append("call", "run:1", f"text {number}")
    for kind, ref in (
        ("call", "run:2"),
        ("trip", "run:1"),
        ("call:run", "1"),
        ("call", "run:1 "),
        ("call", "R" * 5_000),
        ("call", ""),
    ):
        connect().append(kind, ref, f"{kind} {ref}")
    told = connect().about("call", "run:1")
    assert [text for _, text in told] == [f"text {number}" for number in range(700)]
    assert [at for at, _ in told] == sorted(at for at, _ in told)
    assert session.about("call", "run:1", last=2) == told[-2:]
    assert session.about("call", "run:1", last=1_000) == told
    assert before - 0.01 <= told[0][0] <= told[-1][0] <= session.now() + 0.01
    for kind, ref in (("trip", "run:1"), ("call:run", "1"), ("call", "run:1 "), ("call", "R" * 5_000), ("call", "")):
        assert [text for _, text in session.about(kind, ref)] == [f"{kind} {ref}"]
    assert session.about("call", "run:3") == session.about("none", "run:1") == session.about("call", "R" * 4_999) == []


def test_what_is_purged_is_not_told_about_any_more(session: StoreSession) -> None:
    session.append("call", "run:1", "old")
    session.append("call", "run:2", "old")
    time.sleep(0.6)
    session.append("call", "run:1", "new")
    session.purge(0.3)
    assert [text for _, text in session.about("call", "run:1")] == ["new"]
    assert session.about("call", "run:2") == []


def test_a_run_gives_signs_of_life_until_it_ends(session: StoreSession, connect: Connect) -> None:
    before = session.now()
    session.beat("a", "w1", "one")
    session.beat("b", "w2", "two")
    session.beat("a", "w3", "three")
    running = {
        run: (worker, text)
        for run, worker, at, text in session.running(60)
        if before - 0.01 <= at <= session.now() + 0.01
    }
    assert running == {"a": ("w3", "three"), "b": ("w2", "two")}
    connect().beat("a", "w3", "over", ended=True)
    assert [run for run, *_ in session.running(60)] == ["b"]
    session.beat("a", "w1", "again")
    assert sorted(run for run, *_ in session.running(60)) == ["a", "b"]


def test_a_run_that_gave_no_sign_for_too_long_is_not_running(session: StoreSession) -> None:
    session.beat("quiet", "w", "")
    session.beat("busy", "w", "")
    time.sleep(0.6)
    session.beat("busy", "w", "")
    assert [run for run, *_ in session.running(0.5)] == ["busy"]
    assert sorted(run for run, *_ in session.running(60)) == ["busy", "quiet"]


def test_a_side_effect_is_claimed_by_one_and_done_once(session: StoreSession, connect: Connect) -> None:
    other = connect()
    assert session.claim("mail", LONG_S) == "yes"
    assert other.claim("mail", LONG_S) == "pending"
    assert session.claim("mail", LONG_S) == "pending"
    assert other.claim("another", LONG_S) == "yes"
    session.finish("mail", done=True)
    assert other.claim("mail", LONG_S) == session.claim("mail", SHORT_S) == "done"
    session.finish("mail", done=False)  # what is done stays done
    assert other.claim("mail", LONG_S) == "done"


def test_a_claim_that_failed_or_whose_worker_is_gone_is_free_again(session: StoreSession, connect: Connect) -> None:
    other = connect()
    session.claim("failed", LONG_S)
    session.finish("failed", done=False)
    assert other.claim("failed", LONG_S) == "yes"
    assert session.claim("failed", LONG_S) == "pending"
    session.claim("gone", SHORT_S)
    time.sleep(0.02)
    assert other.claim("gone", LONG_S) == "yes"
    assert session.claim("gone", LONG_S) == "pending"


def test_what_was_done_stays_done_when_the_claims_time_is_over(session: StoreSession) -> None:
    session.claim("mail", SHORT_S)
    session.finish("mail", done=True)
    session.finish("never claimed", done=True)
    time.sleep(0.02)
    assert session.claim("mail", LONG_S) == session.claim("never claimed", LONG_S) == "done"


# ---- purge ----------------------------------------------------------------------------------------------------------


def test_purge_drops_what_is_over_and_old_and_nothing_else(session: StoreSession) -> None:
    now = session.now()
    gone, busy = a_line("gone#1", window="1s", ends=now + 0.2), a_line("busy#1", calls(9), window="1s", ends=now + 0.2)
    current, endless = a_line("current#1", window="1d", ends=now + 900), a_line("endless#")
    session.settle("old", [gone, current, endless], CALL)
    session.first("gone#1", "m", 0.5, NOTHING)
    session.first("endless#", "m", 0.5, NOTHING)
    session.reserve("open", LONG_S, [busy], CALL)
    session.append("alert", "r", "old")
    session.beat("ended", "w", "", ended=True)
    session.beat("silent", "w", "")
    session.settle("of a run", [a_line("run:silent#", scope="run:silent")], CALL)
    session.reserve("of a waiting run", LONG_S, [a_line("run:waiting#", scope="run:waiting")], CALL)
    session.claim("done long ago", LONG_S)
    session.finish("done long ago", done=True)
    session.claim("under way", LONG_S)
    session.put("control", 0, "text")
    time.sleep(1.2)
    session.settle("new", [endless, a_line("run:alive#", scope="run:alive")], CALL)
    session.append("alert", "r", "new")
    session.beat("alive", "w", "")
    session.claim("just done", LONG_S)
    session.finish("just done", done=True)
    session.purge(0.8)
    assert {balance.key: (balance.spent, balance.held) for balance in session.read()} == {
        "busy#1": (NOTHING, CALL),
        "current#1": (CALL, NOTHING),
        "endless#": ((0, 0, 2), NOTHING),
        "run:alive#": (CALL, NOTHING),
        "run:waiting#": (NOTHING, CALL),
    }
    assert [session.claim(key, LONG_S) for key in ("done long ago", "under way", "just done")] == [
        "yes",
        "pending",
        "done",
    ]
    assert session.marks("gone#1") == {}
    assert list(session.marks("endless#")) == ["m"]
    assert [text for *_, text in session.tail("alert", 9)] == ["new"]
    assert [run for run, *_ in session.running(600)] == ["alive"]
    assert session.get("control") == (1, "text")
    assert not session.reserve("new", LONG_S, [endless], CALL).ok  # still known
    assert session.reserve("old", LONG_S, [endless], CALL).ok  # forgotten
    session.settle("open", [busy], CALL)  # a purge in the middle of a call: nothing is lost, nothing goes below zero
    assert (the(session, "busy#1").spent, the(session, "busy#1").held) == (CALL, NOTHING)


def test_purge_drops_nothing_that_is_young(session: StoreSession) -> None:
    line = a_line("past#1", window="1s", ends=session.now() + 0.2)
    session.settle("h", [line], CALL)
    session.first("past#1", "m", 0.5, NOTHING)
    session.append("alert", "r", "t")
    session.beat("alive", "w", "t")
    time.sleep(0.3)
    before = (session.read(), session.marks("past#1"), session.tail("alert", 9), session.running(60))
    session.purge(3600)
    assert (session.read(), session.marks("past#1"), session.tail("alert", 9), session.running(60)) == before
    assert not session.reserve("h", LONG_S, [a_line()], CALL).ok


def test_purge_charges_an_expired_hold_before_it_forgets_anything(session: StoreSession) -> None:
    past(session, a_line(), CALL)
    session.purge(3600)
    assert (the(session).spent, the(session).expired) == (CALL, CALL)


# ---- the store itself -----------------------------------------------------------------------------------------------


def test_a_store_says_what_it_is_and_what_it_survives(store: Store) -> None:
    assert store.name
    assert store.durable


def test_making_a_store_does_no_io(place: Any, tmp_path: Path) -> None:
    """A policy is read in processes that never spend anything."""
    away = {
        "sqlite": f"sqlite:///{tmp_path}/deep/er/a.db",
        "redis": "redis://127.0.0.1:1/0",
        "postgres": "postgresql://nobody@127.0.0.1:1/none",
    }[place.kind]
    made = type(place.store())(away)
    assert made.name
    assert list(tmp_path.iterdir()) == []
    if place.kind != "sqlite":
        with pytest.raises(StoreOutage):
            made.connect(1.0)


def test_many_workers_may_open_a_new_store_at_the_same_moment(store: Store) -> None:
    def work(_: int) -> bool:
        with contextlib.closing(store.connect(PATIENCE_S)) as session:
            return session.reserve(an_id(), LONG_S, [a_line(caps=calls(5))], CALL).ok

    assert sorted(at_once(work)) == [False] * 11 + [True] * 5
