"""A settlement appends its record in the same step, once, and records can be read page by page."""

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runguard.ledger.ledger import StoreSession
from tests.kit.conformance import CALL, LONG_S, SHORT_S, Connect, a_line, an_id, calls

RECORD = ("call", "run-1", '{"usd": "0.1"}')


def texts(session: StoreSession, kind: str = "call") -> list[tuple[str, str]]:
    return [(ref, text) for _, ref, text in session.tail(kind, 100)]


@pytest.mark.parametrize("accounts", [1, 2])
def test_a_settlement_appends_its_record(session: StoreSession, accounts: int) -> None:
    lines = [a_line(f"k{n}#") for n in range(accounts)]
    hold = an_id()
    session.reserve(hold, LONG_S, lines, (9, 9, 1))
    reply = session.settle(hold, lines, (5, 6, 1), RECORD)
    assert [balance.spent for balance in reply.balances] == [(5, 6, 1)] * accounts
    assert texts(session) == [RECORD[1:]]
    assert session.about("call", "run-1") == [(session.tail("call", 1)[0][0], RECORD[2])]


@pytest.mark.parametrize("accounts", [1, 2])
def test_a_repeated_settlement_appends_nothing_and_a_correction_does(session: StoreSession, accounts: int) -> None:
    lines = [a_line(f"k{n}#") for n in range(accounts)]
    hold = an_id()
    session.reserve(hold, LONG_S, lines, (9, 9, 1))
    for _ in range(3):
        session.settle(hold, lines, (5, 6, 1), RECORD)
    assert texts(session) == [RECORD[1:]]
    session.settle(hold, lines, (4, 6, 1), ("call", "run-1", "corrected"))
    assert texts(session) == [RECORD[1:], ("run-1", "corrected")]


@pytest.mark.parametrize("accounts", [0, 1, 2])
def test_the_record_is_written_whatever_state_the_hold_is_in(session: StoreSession, accounts: int) -> None:
    lines = [a_line(f"k{n}#", caps=calls(1)) for n in range(accounts)]
    holds = {state: an_id() for state in ("unknown", "expired", "released", "overrun")}
    session.reserve(holds["expired"], SHORT_S, lines, CALL)
    session.read()
    session.release(holds["released"])
    session.reserve(holds["overrun"], LONG_S, lines, CALL, force=True)
    for state, hold in holds.items():
        session.settle(hold, lines, (7, 7, 2), ("call", "run-1", state))
        session.settle(hold, lines, (7, 7, 2), ("call", "run-1", state))
    assert [text for _, text in texts(session)] == list(holds)


def test_a_settlement_without_a_record_appends_nothing(session: StoreSession) -> None:
    hold, line = an_id(), a_line()
    session.reserve(hold, LONG_S, [line], CALL)
    session.settle(hold, [line], CALL)
    assert texts(session) == []


def test_many_connections_that_repeat_one_settlement_append_one_record(session: StoreSession, connect: Connect) -> None:
    hold, line, sessions = an_id(), a_line(), [connect() for _ in range(4)]
    session.reserve(hold, LONG_S, [line], (9, 9, 1))
    together = threading.Barrier(len(sessions))

    def repeat(own: StoreSession) -> None:
        together.wait(30)
        own.settle(hold, [line], (5, 5, 1), RECORD)

    threads = [threading.Thread(target=repeat, args=(own,)) for own in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts(session) == [RECORD[1:]]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_pages_return_every_record_once_and_in_order(session: StoreSession, sizes: list[int]) -> None:
    kind = an_id()
    for n in range(sum(sizes)):
        session.append(kind, f"ref{n}", str(n))
        session.append(f"{kind} other", "x", "y")
    after, found = "", []
    for size in sizes:
        page = session.page(kind, after, size)
        assert len(page) == size
        after = page[-1][0]
        found += [(ref, text) for _, _, ref, text in page]
    assert found == [(f"ref{n}", str(n)) for n in range(sum(sizes))]
    assert session.page(kind, after, 10) == []
    assert [at for _, at, _, _ in session.page(kind, "", 100)] == [at for at, _, _ in session.tail(kind, 100)]
