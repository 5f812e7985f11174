"""Every store settles, releases, expires and extends alike."""

import contextlib
import threading
import time
from typing import Any

import pytest

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import Balance, Line, Store, StoreSession
from tests.kit.conformance import CALL, LONG_S, SCOPE, SHORT_S, Connect, a_line, an_id, calls, of, past, the
from tests.kit.waiting import PATIENCE_S

# ---- settle ---------------------------------------------------------------------------------------------------------


def test_a_settle_told_twice_is_booked_once(session: StoreSession, connect: Connect) -> None:
    line = a_line(caps=calls(5))
    session.reserve("h", LONG_S, [line], CALL)
    for again in (session, session, connect()):
        assert of(again.settle("h", [line], CALL)).spent == CALL
    assert (the(session).spent, the(session).held) == (CALL, NOTHING)


def test_a_settle_of_an_unknown_hold_is_booked_once_too(session: StoreSession) -> None:
    """The store was away when the hold was made, or has forgotten it: the provider's bill has not."""
    lines = [a_line("a#", calls(5)), a_line("b#", calls(9))]
    reply = session.settle("h", lines, CALL)
    assert reply.ok
    assert {balance.key: (balance.spent, balance.caps) for balance in reply.balances} == {
        "a#": (CALL, calls(5)),
        "b#": (CALL, calls(9)),
    }
    session.settle("h", lines, CALL)
    assert [(balance.spent, balance.held) for balance in session.read()] == [(CALL, NOTHING)] * 2
    session.settle("h", lines, (0, 0, 3))
    assert [balance.spent for balance in session.read()] == [(0, 0, 3)] * 2
    assert not session.reserve("h", LONG_S, lines, CALL).ok  # and its id is taken now


@pytest.mark.parametrize("looked", [True, False], ids=["charged", "not yet charged"])
@pytest.mark.parametrize("actual", [(4, 5, 1), (10, 10, 1), (14, 10, 1), NOTHING])
def test_a_late_settle_books_the_difference_to_what_was_charged(
    session: StoreSession, actual: Amount, looked: bool
) -> None:
    hold = past(session, a_line(), (10, 10, 1))
    if looked:
        assert the(session).expired == (10, 10, 1)
    for _ in range(2):
        settled = of(session.settle(hold, [a_line()], actual))
        assert (settled.spent, settled.held, settled.expired) == (actual, NOTHING, NOTHING)
    assert the(session) == settled


def test_an_overrun_closes_the_account_until_it_is_extended(session: StoreSession) -> None:
    line = a_line(caps=(100, 1000, UNLIMITED))
    session.reserve("h", LONG_S, [line], (90, 10, 1))
    settled = of(session.settle("h", [line], (130, 10, 1)))
    assert (settled.closed, settled.overrun, settled.spent) == (True, (30, 0, 0), (130, 10, 1))
    refused = session.reserve("g", LONG_S, [line], NOTHING)  # nobody, not even for nothing
    assert not refused.ok
    assert of(refused).closed
    still = session.extend(line, (29, 0, 0))
    assert (still.closed, still.granted) == (True, (29, 0, 0))
    opened = session.extend(line, (1, 0, 0))
    assert (opened.closed, opened.granted, opened.spent) == (False, (30, 0, 0), (130, 10, 1))
    assert session.reserve("g", LONG_S, [line], NOTHING).ok
    assert not session.reserve("f", LONG_S, [line], (1, 0, 0)).ok


def test_only_the_account_whose_cap_broke_is_closed(session: StoreSession) -> None:
    lines = [a_line("narrow#", (10, UNLIMITED, UNLIMITED)), a_line("wide#", (1000, UNLIMITED, UNLIMITED))]
    session.reserve("h", LONG_S, lines, (10, 0, 1))
    session.settle("h", lines, (15, 0, 1))
    assert {balance.key: (balance.closed, balance.overrun) for balance in session.read()} == {
        "narrow#": (True, (5, 0, 0)),
        "wide#": (False, NOTHING),
    }


def test_a_lowered_cap_alone_closes_nothing(session: StoreSession) -> None:
    session.reserve("h", LONG_S, [a_line(caps=calls(5))], (0, 0, 5))
    session.reserve("g", LONG_S, [a_line(caps=calls(1))], CALL)
    settled = of(session.settle("h", [a_line(caps=calls(1))], (0, 0, 5)))  # as much as it held: nobody's fault
    assert (settled.closed, settled.overrun, settled.spent) == (False, NOTHING, (0, 0, 5))


# ---- release --------------------------------------------------------------------------------------------------------


def test_a_release_of_an_unknown_hold_takes_nothing_from_others(session: StoreSession) -> None:
    session.reserve("h", LONG_S, [a_line()], CALL)
    assert session.release("another").ok
    assert the(session).held == CALL


def test_a_reservation_that_arrives_after_its_release_holds_nothing(session: StoreSession, connect: Connect) -> None:
    """The caller gave up waiting and released; its reservation was only slow. Nobody would ever settle it."""
    session.release("h")
    late = connect().reserve("h", LONG_S, [a_line()], CALL)
    assert not late.ok
    assert all(balance.held == NOTHING for balance in session.read())
    # and should the call have left after all, it is booked
    assert of(session.settle("h", [a_line()], CALL)).spent == CALL
    session.settle("h", [a_line()], CALL)
    assert the(session).spent == CALL


def test_a_release_that_meets_its_reservation_at_the_same_moment_takes_it_back(
    session: StoreSession, connect: Connect
) -> None:
    """Whichever of the two the store sees first, nothing stays held."""
    other = connect()
    session.reserve("first", LONG_S, [a_line()], CALL)
    session.release("first")
    for number in range(60):
        together = threading.Barrier(2)
        lines, hold = [a_line()], f"h{number}"

        def ask(together: threading.Barrier = together, hold: str = hold, lines: list[Line] = lines) -> None:
            together.wait()
            session.reserve(hold, LONG_S, lines, CALL)

        asking = threading.Thread(target=ask)
        asking.start()
        together.wait()
        other.release(hold)
        asking.join()
    assert the(session).held == NOTHING


# ---- expiry ---------------------------------------------------------------------------------------------------------


def test_an_expired_hold_is_charged_and_shown_as_expired(session: StoreSession) -> None:
    """Its worker is gone, and the provider may have billed: given back, it would be spent twice."""
    lines = [a_line("a#", calls(1)), a_line("b#", calls(9))]
    session.reserve("h", SHORT_S, lines, (3, 4, 1))
    time.sleep(0.02)
    assert [(balance.spent, balance.held, balance.expired) for balance in session.read()] == [
        ((3, 4, 1), NOTHING, (3, 4, 1))
    ] * 2
    assert not session.reserve("g", LONG_S, lines, CALL).ok
    assert all(balance.overrun == NOTHING and not balance.closed for balance in session.read())


def test_an_expired_hold_makes_no_room_even_when_nobody_looked(session: StoreSession) -> None:
    line = a_line(caps=calls(1))
    past(session, line, CALL)
    refused = session.reserve("g", LONG_S, [line], CALL)
    assert not refused.ok
    assert (of(refused).spent, of(refused).held, of(refused).expired) == (CALL, NOTHING, CALL)


def test_an_expired_hold_is_charged_once_however_often_one_looks(session: StoreSession, connect: Connect) -> None:
    past(session, a_line(), CALL)
    for looking in (session, connect(), session):
        looking.reserve(an_id(), LONG_S, [a_line("other#")], CALL)
        assert (the(looking).spent, the(looking).expired) == (CALL, CALL)


def test_however_many_holds_expired_a_reader_sees_all_of_them_charged(session: StoreSession) -> None:
    """A fleet dies together: its holds are over together."""
    for _ in range(150):
        session.reserve(an_id(), 1.0, [a_line()], CALL)
    time.sleep(1.1)
    balance = the(session)
    assert (balance.spent, balance.held, balance.expired) == ((0, 0, 150), NOTHING, (0, 0, 150))


# ---- extend and read ------------------------------------------------------------------------------------------------


def test_an_extension_moves_the_cap_and_stays_when_the_caps_are_told_again(session: StoreSession) -> None:
    line = a_line(caps=calls(1))
    session.reserve("a", LONG_S, [line], CALL)
    assert not session.reserve("b", LONG_S, [line], CALL).ok
    extended = session.extend(line, (0, 0, 1))
    assert extended == the(session) == Balance("k#", SCOPE, None, None, calls(1), held=CALL, granted=CALL)
    assert session.reserve("b", LONG_S, [line], CALL).ok
    assert not session.reserve("c", LONG_S, [line], CALL).ok
    assert session.extend(line, (5, 6, 7)).granted == (5, 6, 8)


def test_a_reader_sees_one_scope_or_all(session: StoreSession) -> None:
    for scope, key in [("user:a/x", "1"), ("user:a/x", "2"), ("user:a/xy", "3"), ("app:a", "4")]:
        session.reserve(an_id(), LONG_S, [a_line(key, scope=scope)], CALL)
    assert sorted(balance.key for balance in session.read("user:a/x")) == ["1", "2"]
    assert [balance.key for balance in session.read("app:a")] == ["4"]
    assert session.read("user:a/") == session.read("user:%") == session.read("") == []
    assert sorted(balance.key for balance in session.read()) == ["1", "2", "3", "4"]


def test_what_one_connection_did_the_next_one_sees_at_once(session: StoreSession, connect: Connect) -> None:
    """Replicas that tell each other every minute overspend for a minute."""
    line, other = a_line(caps=calls(2)), connect()
    session.reserve("a", LONG_S, [line], CALL)
    other.reserve("b", LONG_S, [line], CALL)
    assert not session.reserve("c", LONG_S, [line], CALL).ok
    other.release("a")
    assert session.reserve("c", LONG_S, [line], CALL).ok
    other.settle("c", [line], CALL)
    assert the(session) == the(other)


def test_everything_is_still_there_after_the_last_connection_was_closed(store: Store) -> None:
    with contextlib.closing(store.connect(PATIENCE_S)) as session:
        line = a_line(caps=calls(9))
        session.reserve("open", LONG_S, [line], CALL)
        session.settle("done", [line], CALL)
        session.extend(line, CALL)
        session.first("k#", "m", 0.5, (1, 2, 3))
        session.put("control", 0, "text")
        session.append("alert", "r", "t")
        session.beat("run", "w", "t")
        session.claim("c", LONG_S)
        before = the(session)
    with contextlib.closing(store.connect(PATIENCE_S)) as session:
        assert the(session) == before
        assert session.settle("open", [line], CALL).control == 1
        assert the(session).spent == (0, 0, 2)
        assert session.marks("k#") == {"m": (0.5, (1, 2, 3))}
        assert session.get("control") == (1, "text")
        assert [record[1:] for record in session.tail("alert", 1)] == [("r", "t")]
        assert [run for run, *_ in session.running(60)] == ["run"]
        assert session.claim("c", LONG_S) == "pending"


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_answers_carry_the_stores_clock_and_it_goes_forward(session: StoreSession) -> None:
    times = [session.now()]
    times.append(session.reserve("h", LONG_S, [a_line()], CALL).now)
    times.append(session.settle("h", [a_line()], CALL).now)
    times.append(session.release("h").now)
    times.append(session.now())
    assert times == sorted(times)
    assert times[-1] - times[0] < PATIENCE_S
    assert times[0] > 1_600_000_000  # seconds since 1970, as the periods' ends are


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_workers_clock_does_not_matter(
    place: Any, session: StoreSession, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """A worker an hour ahead would otherwise charge everybody's open holds."""
    if place.kind == "sqlite":
        pytest.skip("one machine, one clock: it is the store's")
    now, true_time = session.now(), time.time  # noqa: TID251 - the worker's clock is the subject
    session.reserve("h", 600, [a_line()], CALL)
    monkeypatch.setattr(time, "time", lambda: true_time() + ahead)
    assert session.now() == pytest.approx(now, abs=PATIENCE_S)
    line = a_line("period#", begins=now - 60, ends=now + 60)
    reply = session.reserve("g", 600, [line], CALL)
    assert (reply.ok, reply.stale) == (True, False)
    assert the(session).held == CALL
    past(session, a_line("short#"), CALL)
    assert the(session, "short#").expired == CALL
    session.beat("run", "w", "")
    assert [run for run, *_ in session.running(60)] == ["run"]
