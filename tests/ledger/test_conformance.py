"""What every durable store must do, asked of each in the same words; then what SQLite must do when its file or its
machine fails it.
"""

import contextlib
import math
import multiprocessing
import os
import random
import re
import shutil
import sqlite3
import string
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from runguard.core.budget import NOTHING, UNLIMITED, Amount
from runguard.errors import PolicyError
from runguard.ledger.sqlite import SqliteStore
from runguard.ledger.store import SCHEMA_VERSION, Balance, Line, Reply, Session, Store, StoreError, StoreOutage

PATIENCE_S = 20.0  # far beyond anything that works
LONG_S = 300.0  # a hold that no test outlives
SHORT_S = 0.001  # a hold that is over when the next call comes
FREE: Amount = (UNLIMITED, UNLIMITED, UNLIMITED)
CALL: Amount = (0, 0, 1)
SCOPE = "user:app/ann"
BAD_AMOUNTS = (
    math.nan,
    math.inf,
    -math.inf,
    1.5,
    1.0,
    -1,
    True,
    "1",
    None,
    b"1",
    Decimal(1),
    1 << 62,
    1 << 63,
    -(1 << 63),
    10**400,
)
THREADS = 16

Connect = Callable[..., Session]
_numbers = count()


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
    return f"hold-{os.getpid()}-{next(_numbers)}"


def past(session: Session, line: Line, want: Amount, hold: str | None = None) -> str:
    """A hold whose time is over."""
    hold = hold or an_id()
    assert session.reserve(hold, SHORT_S, [line], want).ok
    time.sleep(0.02)
    return hold


def the(session: Session, key: str = "k#") -> Balance:
    """One account, as a reader sees it."""
    (found,) = [balance for balance in session.read() if balance.key == key]
    return found


def of(reply: Reply, key: str = "k#") -> Balance:
    """One account, as an answer tells it."""
    (found,) = [balance for balance in reply.balances if balance.key == key]
    return found


# ---- reserve --------------------------------------------------------------------------------------------------------


def test_a_hold_stands_beside_the_spend_and_never_on_it(session: Session) -> None:
    line = a_line(caps=(100, 200, 3))
    reply = session.reserve("h", LONG_S, [line], (10, 20, 1))
    assert reply.ok
    assert not reply.stale
    assert of(reply) == the(session) == Balance("k#", SCOPE, None, None, (100, 200, 3), held=(10, 20, 1))


def test_an_account_is_told_as_its_line_names_it(session: Session) -> None:
    now = session.now()
    line = a_line("user:app/ann@1d#7", (1, 2, 3), window="1d", begins=now - 100, ends=now + 1000.5)
    balance = of(session.reserve("h", LONG_S, [line], NOTHING), line.key)
    assert (balance.key, balance.scope, balance.window, balance.caps) == (line.key, SCOPE, "1d", (1, 2, 3))
    assert balance.ends == pytest.approx(now + 1000.5, abs=1e-3)


@pytest.mark.parametrize("unit", range(3))
def test_the_cap_itself_fits_and_one_more_does_not(session: Session, unit: int) -> None:
    """Where the boundary is said twice, it is soon said differently: `<` here and `>=` there."""
    caps, three, one = [UNLIMITED] * 3, [0, 0, 0], [0, 0, 0]
    caps[unit], three[unit], one[unit] = 300_000_000, 100_000_000, 1
    line = a_line(caps=tuple(caps))
    for _ in range(3):  # three tenths of a dollar under a limit of three tenths: exact
        assert session.reserve(an_id(), LONG_S, [line], tuple(three)).ok
    assert session.reserve(an_id(), LONG_S, [line], NOTHING).ok  # nothing fits even now
    refused = session.reserve(an_id(), LONG_S, [line], tuple(one))
    assert not refused.ok
    assert of(refused).held[unit] == 300_000_000


@pytest.mark.parametrize("unit", range(3))
def test_a_cap_of_0_holds_nothing_but_nothing(session: Session, unit: int) -> None:
    caps, one = [UNLIMITED] * 3, [0, 0, 0]
    caps[unit], one[unit] = 0, 1
    line = a_line(caps=tuple(caps))
    assert session.reserve("free", LONG_S, [line], NOTHING).ok
    assert not session.reserve("paid", LONG_S, [line], tuple(one)).ok
    session.settle("free", [line], NOTHING)
    assert not the(session).closed
    assert session.extend(line, tuple(one)).granted == tuple(one)
    assert session.reserve("granted", LONG_S, [line], tuple(one)).ok


def test_spend_and_holds_count_together_against_the_cap(session: Session) -> None:
    line = a_line(caps=calls(3))
    session.reserve("a", LONG_S, [line], CALL)
    session.settle("a", [line], CALL)
    session.reserve("b", LONG_S, [line], CALL)
    assert not session.reserve("c", LONG_S, [line], (0, 0, 2)).ok
    assert session.reserve("d", LONG_S, [line], CALL).ok
    assert not session.reserve("e", LONG_S, [line], CALL).ok


def test_a_refusal_holds_nothing_not_even_the_part_that_would_fit(session: Session) -> None:
    line = a_line(caps=(100, UNLIMITED, UNLIMITED))
    session.reserve("a", LONG_S, [line], (60, 0, 1))
    refused = session.reserve("b", LONG_S, [line], (41, 0, 1))
    assert (refused.ok, refused.stale) == (False, False)
    assert of(refused).held == the(session).held == (60, 0, 1)
    assert session.reserve("c", LONG_S, [line], (40, 0, 1)).ok


def test_a_refused_id_may_ask_again_when_there_is_room(session: Session) -> None:
    line = a_line(caps=calls(1))
    session.reserve("a", LONG_S, [line], CALL)
    assert not session.reserve("b", LONG_S, [line], CALL).ok
    session.release("a")
    assert session.reserve("b", LONG_S, [line], CALL).ok
    assert the(session).held == CALL


@pytest.mark.parametrize("tight", range(3))
def test_when_one_of_several_lines_refuses_none_holds(session: Session, tight: int) -> None:
    lines = [a_line(f"{i}#", calls(0 if i == tight else 9)) for i in range(3)]
    refused = session.reserve("h", LONG_S, lines, CALL)
    assert not refused.ok
    assert sorted(balance.key for balance in refused.balances) == ["0#", "1#", "2#"]
    assert all(balance.held == NOTHING for balance in [*refused.balances, *session.read()])
    assert all(balance.caps == calls(0 if balance.key == f"{tight}#" else 9) for balance in refused.balances)
    for i in range(3):  # the refused id holds nothing that a settle could find
        assert session.reserve(an_id(), LONG_S, [lines[i]], CALL).ok is (i != tight)


def test_several_lines_hold_and_settle_together(session: Session) -> None:
    lines = [a_line(f"{i}#", (100, 100, 9)) for i in range(5)]
    reply = session.reserve("h", LONG_S, lines, (7, 8, 1))
    assert [balance.held for balance in reply.balances] == [(7, 8, 1)] * 5
    settled = session.settle("h", lines, (5, 6, 1))
    assert sorted(balance.key for balance in settled.balances) == [f"{i}#" for i in range(5)]
    assert [(balance.spent, balance.held) for balance in session.read()] == [((5, 6, 1), NOTHING)] * 5


def test_without_lines_everything_is_fine_and_nothing_is_kept(session: Session) -> None:
    assert session.reserve("h", LONG_S, [], (5, 5, 5)).ok
    assert session.settle("h", [], (5, 5, 5)).ok
    assert session.settle("other", [], (5, 5, 5)).ok
    assert session.reserve("g", LONG_S, [], NOTHING).ok
    assert session.release("g").ok
    assert session.read() == []


def test_a_known_id_changes_nothing_and_answers_as_before(session: Session, connect: Connect) -> None:
    """The reply was lost and the call is told again, perhaps through another connection."""
    line = a_line(caps=calls(1))
    first = session.reserve("h", LONG_S, [line], CALL)
    for again in (session, connect()):
        reply = again.reserve("h", LONG_S, [line], CALL)
        assert reply.ok
        assert of(reply) == of(first)
    assert the(session).held == CALL


def test_a_known_id_is_not_asked_a_second_time_even_when_its_account_is_full_or_closed(session: Session) -> None:
    line = a_line(caps=calls(2))
    session.reserve("h", LONG_S, [line], CALL)
    session.settle("other", [line], (0, 0, 5))
    assert the(session).closed
    assert session.reserve("h", LONG_S, [line], CALL).ok
    assert the(session).held == CALL


def test_a_known_id_with_other_amounts_or_lines_changes_nothing(session: Session) -> None:
    session.reserve("h", LONG_S, [a_line(caps=calls(5))], CALL)
    session.reserve("h", LONG_S, [a_line(caps=calls(7))], (0, 0, 3))
    session.reserve("h", LONG_S, [a_line("z#", calls(7))], (0, 0, 3))
    assert [(b.key, b.held, b.caps) for b in session.read() if b.held != NOTHING] == [("k#", CALL, calls(5))]
    session.settle("h", [a_line("z#", calls(7))], CALL)  # it settles where it was held
    assert the(session).spent == CALL
    assert all(balance.spent == NOTHING for balance in session.read() if balance.key != "k#")


@pytest.mark.parametrize("end", ["settled", "released", "expired"])
def test_an_id_whose_hold_is_over_is_never_admitted_again(session: Session, end: str) -> None:
    """A worker that counts its ids from one again would otherwise spend without holding."""
    line = a_line(caps=calls(9))
    session.reserve("h", SHORT_S if end == "expired" else LONG_S, [line], CALL)
    if end == "settled":
        session.settle("h", [line], CALL)
    elif end == "released":
        session.release("h")
    else:
        time.sleep(0.02)
    before = the(session)
    again = session.reserve("h", LONG_S, [line], CALL)
    assert not again.ok
    assert the(session) == before


def test_the_caps_are_those_of_the_latest_reservation(session: Session) -> None:
    assert session.reserve("a", LONG_S, [a_line(caps=calls(1))], CALL).ok
    assert not session.reserve("b", LONG_S, [a_line(caps=calls(1))], CALL).ok
    raised = session.reserve("c", LONG_S, [a_line(caps=calls(2))], CALL)
    assert raised.ok
    assert of(raised).caps == calls(2)
    lowered = session.reserve("d", LONG_S, [a_line(caps=calls(1))], CALL)
    assert not lowered.ok
    assert of(lowered).caps == calls(1)
    assert of(lowered).held == (0, 0, 2)
    assert not of(lowered).closed  # nobody billed beyond a hold: waiting helps


def test_force_holds_whatever_the_caps_say(session: Session) -> None:
    """A shadow looks on: it counts, and refuses nothing."""
    line = a_line(caps=calls(1))
    for number in range(1, 4):
        reply = session.reserve(an_id(), LONG_S, [line], CALL, force=True)
        assert reply.ok
        assert of(reply).held == (0, 0, number)
    assert not session.reserve(an_id(), LONG_S, [line], CALL).ok
    session.settle("x", [line], (0, 0, 3))
    assert the(session).closed
    assert session.reserve(an_id(), LONG_S, [line], CALL, force=True).ok  # a closed account too


def test_force_does_not_hold_on_a_stale_line(session: Session) -> None:
    reply = session.reserve("h", LONG_S, [a_line(ends=session.now() - 1)], CALL, force=True)
    assert (reply.ok, reply.stale) == (False, True)
    assert session.read() == []


@pytest.mark.parametrize("mark", ["over", "not begun", "second line over"])
def test_a_line_of_another_period_is_stale_and_nothing_is_held(session: Session, mark: str) -> None:
    now = session.now()
    over, early = a_line("old#", ends=now - 0.5, begins=now - 60), a_line("new#", begins=now + 60, ends=now + 120)
    lines = {"over": [over], "not begun": [early], "second line over": [a_line(), over]}[mark]
    reply = session.reserve("h", LONG_S, lines, CALL)
    assert (reply.ok, reply.stale) == (False, True)
    assert all(balance.held == NOTHING for balance in [*reply.balances, *session.read()])
    # the id is still free for the right period
    assert session.reserve("h", LONG_S, [a_line(begins=now - 60, ends=now + 60)], CALL).ok


def test_a_line_inside_its_period_is_not_stale(session: Session) -> None:
    now = session.now()
    for begins, ends in [(None, None), (now - 60, None), (None, now + 60), (now - 60, now + 60)]:
        reply = session.reserve(an_id(), LONG_S, [a_line(begins=begins, ends=ends)], CALL)
        assert (reply.ok, reply.stale) == (True, False)


def test_a_known_id_asked_again_after_its_periods_end_still_answers_as_before(session: Session) -> None:
    """A retry across midnight: "stale, nothing is held" would be a lie, and the caller would hold twice."""
    line = a_line(ends=session.now() + 0.3)
    assert session.reserve("h", LONG_S, [line], CALL).ok
    time.sleep(0.4)
    again = session.reserve("h", LONG_S, [line], CALL)
    assert (again.ok, again.stale) == (True, False)
    assert the(session).held == CALL


def test_a_hold_outlives_its_period_and_settles_there(session: Session) -> None:
    line = a_line(caps=calls(5), ends=session.now() + 0.3)
    assert session.reserve("h", LONG_S, [line], CALL).ok
    time.sleep(0.4)
    assert session.reserve("g", LONG_S, [line], CALL).stale
    assert the(session).held == CALL
    assert of(session.settle("h", [line], CALL)).spent == CALL
    assert of(session.settle("never seen", [line], CALL)).spent == (0, 0, 2)  # a fact, whatever the time
    assert the(session).held == NOTHING


# ---- amounts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD_AMOUNTS, ids=lambda value: f"{value!r:.12}")
def test_what_is_no_amount_is_refused_before_anything_is_written(session: Session, bad: Any) -> None:
    """NaN fits under every limit and then switches the budget off for good; a negative amount is a gift."""
    line, kept = a_line("new#"), a_line("kept#", (9, 9, 9))
    session.reserve("open", LONG_S, [kept], CALL)
    session.reserve("done", LONG_S, [kept], CALL)
    session.settle("done", [kept], CALL)
    before = session.read()
    for unit in range(3):
        amount = tuple(bad if i == unit else 1 for i in range(3))
        for deed in (
            lambda a=amount: session.reserve("h", LONG_S, [line, kept], a),
            lambda a=amount: session.reserve("h", LONG_S, [line, kept], a, force=True),
            lambda a=amount: session.settle("h", [line, kept], a),
            lambda a=amount: session.settle("open", [kept], a),
            lambda a=amount: session.settle("done", [kept], a),
            lambda a=amount: session.extend(line, a),
            lambda a=amount: session.extend(kept, a),
        ):
            with pytest.raises(ValueError, match="no amount"):
                deed()
    assert session.read() == before
    assert session.reserve("h", LONG_S, [line], CALL).ok  # the id was not taken either


@pytest.mark.parametrize(
    "bad", [*(value for value in BAD_AMOUNTS if value != UNLIMITED), UNLIMITED + 1], ids=lambda value: f"{value!r:.12}"
)
def test_a_cap_that_is_no_amount_is_refused_before_anything_is_written(session: Session, bad: Any) -> None:
    """A float cap decides like a float, and a NaN refuses nothing or everything."""
    line = a_line("new#", (UNLIMITED, bad, 5))
    for deed in (
        lambda: session.reserve("h", LONG_S, [a_line(), line], CALL),
        lambda: session.settle("h", [a_line(), line], CALL),
        lambda: session.extend(line, CALL),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - the subject is that nothing is written
            deed()
    assert session.read() == []


@pytest.mark.parametrize("amount", [(), (1,), (1, 1), (1, 1, 1, 1)])
def test_an_amount_has_three_parts(session: Session, amount: Any) -> None:
    for lines in ([], [a_line()]):
        with pytest.raises(ValueError):  # noqa: PT011 - the subject is that nothing is written
            session.reserve("h", LONG_S, lines, amount)
        with pytest.raises(ValueError):  # noqa: PT011
            session.settle("h", lines, amount)
    with pytest.raises(ValueError):  # noqa: PT011
        session.extend(a_line(), amount)
    assert session.read() == []


def test_unlimited_units_never_refuse_and_are_told_as_they_are(place: Any, session: Session) -> None:
    third = place.most // 3
    for _ in range(2):
        reply = session.reserve(an_id(), LONG_S, [a_line()], (third, third, third))
        assert reply.ok
        assert of(reply).caps == FREE
    extended = session.extend(a_line(), (1, 1, 1))
    assert (extended.caps, extended.granted) == (FREE, (1, 1, 1))
    assert session.reserve(an_id(), LONG_S, [a_line()], (third, third, third)).ok


@pytest.mark.parametrize("unit", range(3))
def test_large_amounts_are_exact_to_the_last_nano(place: Any, session: Session, unit: int) -> None:
    """A double forgets single units from 2**53 on: nine million dollars in nano-USD."""

    def many(number: int) -> Amount:
        return tuple(number if i == unit else 0 for i in range(3))  # type: ignore[return-value]

    large = (place.most - 1) // 2
    line = a_line(caps=tuple(large + 2 if i == unit else UNLIMITED for i in range(3)))
    assert of(session.reserve("a", LONG_S, [line], many(large))).held == many(large)
    assert not session.reserve("b", LONG_S, [line], many(3)).ok
    assert session.reserve("b", LONG_S, [line], many(2)).ok
    assert of(session.settle("a", [line], many(large - 1))).spent == many(large - 1)
    assert session.reserve("c", LONG_S, [line], many(1)).ok
    assert not session.reserve("d", LONG_S, [line], many(1)).ok
    session.release("b")
    session.release("c")
    assert session.extend(line, many(large - 2)).granted == many(large - 2)
    settled = of(session.settle("a", [line], many(large)))
    assert (settled.spent, settled.held, settled.closed) == (many(large), NOTHING, False)
    hold = past(session, line, many(large - 1))
    assert (the(session).spent, the(session).expired) == (many(2 * large - 1), many(large - 1))
    closing = of(session.settle(hold, [line], many(large + 1)))
    assert (closing.spent, closing.overrun, closing.closed) == (many(2 * large + 1), many(1), True)


def test_the_largest_amount_there_is_can_be_held_and_settled(place: Any, session: Session) -> None:
    most = (place.most,) * 3
    assert session.reserve("h", LONG_S, [a_line(caps=most)], most).ok
    settled = of(session.settle("h", [a_line(caps=most)], most))
    assert (settled.spent, settled.caps, settled.closed) == (most, most, False)
    assert not session.reserve("g", LONG_S, [a_line(caps=most)], CALL).ok


def test_an_amount_that_a_store_cannot_count_is_refused_and_never_rounded(place: Any, session: Session) -> None:
    for much in ((place.most + 1, 0, 0), (0, place.most + 1, 0), (0, 0, place.most + 1)):
        for deed in (
            lambda a=much: session.reserve("h", LONG_S, [a_line()], a),
            lambda a=much: session.settle("h", [a_line()], a),
            lambda a=much: session.extend(a_line(), a),
        ):
            with pytest.raises((ValueError, StoreError)):
                deed()
    assert session.read() == []


def test_an_expired_hold_of_nothing_poisons_no_later_call(session: Session) -> None:
    """Where zero is written as "-0", the charge fails, and every later reservation with it."""
    line = a_line(caps=calls(2))
    past(session, line, NOTHING)
    assert session.reserve("g", LONG_S, [line], CALL).ok
    assert of(session.settle("g", [line], NOTHING)).spent == NOTHING
    assert session.reserve("f", LONG_S, [line], (0, 0, 2)).ok
    assert (the(session).spent, the(session).held, the(session).expired) == (NOTHING, (0, 0, 2), NOTHING)


ODD_NAMES = (
    "zoë/日本語/🦊/\u202eright-to-left",
    'it\'s "quoted" `back` \\ slash',
    "{braces}{}{{}} [brackets] %s %d %25 ${x} $1 :name ? *",
    "line\nfeed\r\ttab\x1bescape\x7f",
    "; DROP TABLE accounts; --",
    " leading and trailing ",
    "",
    # too long for an index, and not to be compressed
    "".join(random.Random(7).choices(string.ascii_letters, k=20_000)),
    "e\u0301 and \u00e9",  # equal to the eye, not to be folded into one
)


@pytest.mark.parametrize("odd", ODD_NAMES, ids=lambda name: f"{name[:12]!r}")
def test_names_with_odd_characters_are_names_like_any_other(session: Session, odd: str) -> None:
    key, scope = f"{odd}@1h#5", f"user:{odd}"
    lines = [a_line(key, calls(2), scope=scope, window=odd or None), a_line(key + "'", calls(9), scope=scope + "'")]
    hold, other = f"{odd}1", f"{odd}2"
    assert session.reserve(hold, LONG_S, lines, CALL).ok
    assert session.reserve(hold, LONG_S, lines, CALL).ok
    assert session.reserve(other, LONG_S, lines, CALL).ok
    session.settle(hold, lines, CALL)
    session.release(other)
    (balance,) = session.read(scope)
    assert (balance.key, balance.scope, balance.window, balance.spent, balance.held) == (
        key,
        scope,
        odd or None,
        CALL,
        NOTHING,
    )
    assert session.extend(lines[0], CALL).granted == CALL
    past(session, lines[0], CALL, f"{odd}3")
    assert session.read(scope)[0].expired == CALL
    assert session.first(key, odd, 0.5, NOTHING)
    assert not session.first(key, odd, 0.5, NOTHING)
    assert list(session.marks(key)) == [odd]
    session.unmark(key, [odd])
    assert session.marks(key) == {}
    assert session.put(odd, 0, odd)
    assert session.get(odd) == (1, odd)
    session.append(odd, odd, odd)
    assert [record[1:] for record in session.tail(odd, 9)] == [(odd, odd)]
    session.beat(odd, odd, odd)
    assert [(run, worker, text) for run, worker, _, text in session.running(60)] == [(odd, odd, odd)]
    assert session.claim(odd, LONG_S) == "yes"
    assert session.claim(odd, LONG_S) == "pending"


def test_names_that_only_begin_alike_are_different_accounts(session: Session) -> None:
    keys = ["k", "k#", "K#", "k# ", "k#1", "k%", "k_", "k*"]
    for number, key in enumerate(keys, 1):
        session.settle(an_id(), [a_line(key, scope=f"s:{key}")], (number, 0, 0))
    assert {balance.key: balance.spent[0] for balance in session.read()} == {
        key: number for number, key in enumerate(keys, 1)
    }
    for number, key in enumerate(keys, 1):
        assert [balance.spent[0] for balance in session.read(f"s:{key}")] == [number]


# ---- settle ---------------------------------------------------------------------------------------------------------


def test_a_settle_takes_the_hold_away_and_books_what_it_took(session: Session) -> None:
    line = a_line(caps=(100, 100, 5))
    session.reserve("a", LONG_S, [line], (10, 20, 1))
    session.reserve("b", LONG_S, [line], (1, 2, 1))
    settled = session.settle("a", [line], (7, 8, 1))
    assert settled.ok
    assert (
        of(settled) == the(session) == Balance("k#", SCOPE, None, None, (100, 100, 5), spent=(7, 8, 1), held=(1, 2, 1))
    )


def test_a_settle_told_twice_is_booked_once(session: Session, connect: Connect) -> None:
    line = a_line(caps=calls(5))
    session.reserve("h", LONG_S, [line], CALL)
    for again in (session, session, connect()):
        assert of(again.settle("h", [line], CALL)).spent == CALL
    assert (the(session).spent, the(session).held) == (CALL, NOTHING)


@pytest.mark.parametrize("second", [(3, 0, 1), (12, 50, 1), NOTHING])
def test_a_settle_with_another_amount_replaces_the_earlier_one(session: Session, second: Amount) -> None:
    session.reserve("h", LONG_S, [a_line()], (10, 10, 1))
    session.settle("h", [a_line()], (7, 20, 1))
    assert of(session.settle("h", [a_line()], second)).spent == second
    assert of(session.settle("h", [a_line()], (5, 5, 1))).spent == (5, 5, 1)
    assert the(session).held == NOTHING


def test_a_settle_of_an_unknown_hold_is_booked_once_too(session: Session) -> None:
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


def test_a_settle_after_a_release_is_booked(session: Session) -> None:
    """The caller thought that the call had not left; the bill says otherwise."""
    session.reserve("h", LONG_S, [a_line()], CALL)
    session.release("h")
    assert of(session.settle("h", [a_line()], (5, 5, 1))).spent == (5, 5, 1)
    session.settle("h", [a_line()], (5, 5, 1))
    assert (the(session).spent, the(session).held) == ((5, 5, 1), NOTHING)


def test_a_settle_is_never_refused_however_full_or_closed_the_account_is(session: Session) -> None:
    line = a_line(caps=calls(0))
    for number in range(1, 4):
        reply = session.settle(an_id(), [line], CALL)
        assert reply.ok
        assert of(reply).spent == (0, 0, number)


@pytest.mark.parametrize("looked", [True, False], ids=["charged", "not yet charged"])
@pytest.mark.parametrize("actual", [(4, 5, 1), (10, 10, 1), (14, 10, 1), NOTHING])
def test_a_late_settle_books_the_difference_to_what_was_charged(session: Session, actual: Amount, looked: bool) -> None:
    hold = past(session, a_line(), (10, 10, 1))
    if looked:
        assert the(session).expired == (10, 10, 1)
    for _ in range(2):
        settled = of(session.settle(hold, [a_line()], actual))
        assert (settled.spent, settled.held, settled.expired) == (actual, NOTHING, NOTHING)
    assert the(session) == settled


def test_an_overrun_closes_the_account_until_it_is_extended(session: Session) -> None:
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


def test_a_wider_cap_alone_does_not_open_a_closed_account(session: Session) -> None:
    session.settle("h", [a_line(caps=calls(1))], (0, 0, 2))
    assert not session.reserve("g", LONG_S, [a_line(caps=calls(9))], CALL).ok
    assert session.extend(a_line(caps=calls(9)), NOTHING).closed is False


def test_billing_more_than_was_held_closes_nothing_while_the_cap_has_room(session: Session) -> None:
    line = a_line(caps=(100, UNLIMITED, UNLIMITED))
    session.reserve("h", LONG_S, [line], (10, 0, 1))
    settled = of(session.settle("h", [line], (100, 0, 1)))
    assert (settled.closed, settled.overrun) == (False, NOTHING)


def test_other_calls_holds_count_when_an_excess_is_measured(session: Session) -> None:
    line = a_line(caps=(100, UNLIMITED, UNLIMITED))
    session.reserve("a", LONG_S, [line], (50, 0, 1))
    session.reserve("b", LONG_S, [line], (50, 0, 1))
    settled = of(session.settle("a", [line], (52, 0, 1)))
    assert (settled.closed, settled.overrun) == (True, (2, 0, 0))
    settled = of(session.settle("b", [line], (10, 0, 1)))
    assert (settled.closed, settled.overrun, settled.spent) == (True, (2, 0, 0), (62, 0, 2))


def test_only_the_account_whose_cap_broke_is_closed(session: Session) -> None:
    lines = [a_line("narrow#", (10, UNLIMITED, UNLIMITED)), a_line("wide#", (1000, UNLIMITED, UNLIMITED))]
    session.reserve("h", LONG_S, lines, (10, 0, 1))
    session.settle("h", lines, (15, 0, 1))
    assert {balance.key: (balance.closed, balance.overrun) for balance in session.read()} == {
        "narrow#": (True, (5, 0, 0)),
        "wide#": (False, NOTHING),
    }


def test_a_lowered_cap_alone_closes_nothing(session: Session) -> None:
    session.reserve("h", LONG_S, [a_line(caps=calls(5))], (0, 0, 5))
    session.reserve("g", LONG_S, [a_line(caps=calls(1))], CALL)
    settled = of(session.settle("h", [a_line(caps=calls(1))], (0, 0, 5)))  # as much as it held: nobody's fault
    assert (settled.closed, settled.overrun, settled.spent) == (False, NOTHING, (0, 0, 5))


# ---- release --------------------------------------------------------------------------------------------------------


def test_a_release_gives_everything_back(session: Session) -> None:
    lines = [a_line("a#", calls(1)), a_line("b#", calls(1))]
    session.reserve("h", LONG_S, lines, CALL)
    assert session.release("h").ok
    assert [(balance.held, balance.spent) for balance in session.read()] == [(NOTHING, NOTHING)] * 2
    assert session.reserve("g", LONG_S, lines, CALL).ok


def test_a_second_release_gives_nothing_more(session: Session) -> None:
    session.reserve("h", LONG_S, [a_line()], CALL)
    session.reserve("g", LONG_S, [a_line()], CALL)
    session.release("h")
    assert session.release("h").ok
    assert the(session).held == CALL


def test_many_calls_that_never_left_leave_no_trace_in_the_budget(session: Session) -> None:
    """Phantom spend comes in clean multiples of what was reserved."""
    line = a_line(caps=(100, 100, 2))
    for _ in range(20):
        session.reserve(hold := an_id(), LONG_S, [line], (60, 60, 1))
        refused = session.reserve(an_id(), LONG_S, [line], (60, 60, 1))
        assert not refused.ok
        session.release(hold)
    assert the(session) == Balance("k#", SCOPE, None, None, (100, 100, 2))
    assert session.reserve("h", LONG_S, [line], (100, 100, 2)).ok


def test_of_a_settled_hold_a_release_takes_nothing_back(session: Session) -> None:
    session.reserve("h", LONG_S, [a_line()], CALL)
    session.settle("h", [a_line()], (5, 5, 1))
    assert session.release("h").ok
    assert (the(session).spent, the(session).held) == ((5, 5, 1), NOTHING)


@pytest.mark.parametrize("looked", [True, False], ids=["charged", "not yet charged"])
def test_of_an_expired_hold_a_release_takes_nothing_back(session: Session, looked: bool) -> None:
    """Whether somebody looked in between must not decide what a call has cost."""
    hold = past(session, a_line(), CALL)
    if looked:
        session.read()
    assert session.release(hold).ok
    assert (the(session).spent, the(session).held, the(session).expired) == (CALL, NOTHING, CALL)


def test_a_release_of_an_unknown_hold_takes_nothing_from_others(session: Session) -> None:
    session.reserve("h", LONG_S, [a_line()], CALL)
    assert session.release("another").ok
    assert the(session).held == CALL


def test_a_reservation_that_arrives_after_its_release_holds_nothing(session: Session, connect: Connect) -> None:
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
    session: Session, connect: Connect
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


def test_an_expired_hold_is_charged_and_shown_as_expired(session: Session) -> None:
    """Its worker is gone, and the provider may have billed: given back, it would be spent twice."""
    lines = [a_line("a#", calls(1)), a_line("b#", calls(9))]
    session.reserve("h", SHORT_S, lines, (3, 4, 1))
    time.sleep(0.02)
    assert [(balance.spent, balance.held, balance.expired) for balance in session.read()] == [
        ((3, 4, 1), NOTHING, (3, 4, 1))
    ] * 2
    assert not session.reserve("g", LONG_S, lines, CALL).ok
    assert all(balance.overrun == NOTHING and not balance.closed for balance in session.read())


def test_an_expired_hold_makes_no_room_even_when_nobody_looked(session: Session) -> None:
    line = a_line(caps=calls(1))
    past(session, line, CALL)
    refused = session.reserve("g", LONG_S, [line], CALL)
    assert not refused.ok
    assert (of(refused).spent, of(refused).held, of(refused).expired) == (CALL, NOTHING, CALL)


def test_a_hold_is_not_charged_before_its_time(session: Session) -> None:
    session.reserve("h", LONG_S, [a_line()], CALL)
    past(session, a_line(), CALL)
    assert (the(session).spent, the(session).held, the(session).expired) == (CALL, CALL, CALL)


def test_a_settled_or_released_hold_does_not_expire(session: Session) -> None:
    session.reserve("h", 0.2, [a_line()], CALL)
    session.settle("h", [a_line()], CALL)
    session.reserve("g", 0.2, [a_line()], CALL)
    session.release("g")
    time.sleep(0.3)
    assert (the(session).spent, the(session).held, the(session).expired) == (CALL, NOTHING, NOTHING)


def test_an_expired_hold_is_charged_once_however_often_one_looks(session: Session, connect: Connect) -> None:
    past(session, a_line(), CALL)
    for looking in (session, connect(), session):
        looking.reserve(an_id(), LONG_S, [a_line("other#")], CALL)
        assert (the(looking).spent, the(looking).expired) == (CALL, CALL)


def test_however_many_holds_expired_a_reader_sees_all_of_them_charged(session: Session) -> None:
    """A fleet dies together: its holds are over together."""
    for _ in range(150):
        session.reserve(an_id(), 1.0, [a_line()], CALL)
    time.sleep(1.1)
    balance = the(session)
    assert (balance.spent, balance.held, balance.expired) == ((0, 0, 150), NOTHING, (0, 0, 150))


# ---- extend and read ------------------------------------------------------------------------------------------------


def test_an_extension_moves_the_cap_and_stays_when_the_caps_are_told_again(session: Session) -> None:
    line = a_line(caps=calls(1))
    session.reserve("a", LONG_S, [line], CALL)
    assert not session.reserve("b", LONG_S, [line], CALL).ok
    extended = session.extend(line, (0, 0, 1))
    assert extended == the(session) == Balance("k#", SCOPE, None, None, calls(1), held=CALL, granted=CALL)
    assert session.reserve("b", LONG_S, [line], CALL).ok
    assert not session.reserve("c", LONG_S, [line], CALL).ok
    assert session.extend(line, (5, 6, 7)).granted == (5, 6, 8)


def test_an_extension_makes_the_account_if_it_is_new(session: Session) -> None:
    ends = session.now() + 900
    made = session.extend(a_line(caps=calls(3), window="15m", ends=ends), (1, 2, 3))
    assert (made.caps, made.granted, made.window, made.spent, made.closed) == (
        calls(3),
        (1, 2, 3),
        "15m",
        NOTHING,
        False,
    )
    assert session.reserve("h", LONG_S, [a_line(caps=calls(3))], (0, 0, 6)).ok


def test_an_extension_of_one_account_leaves_the_others(session: Session) -> None:
    session.settle("x", [a_line("a#", calls(1)), a_line("b#", calls(1))], (0, 0, 2))
    session.extend(a_line("a#", calls(1)), CALL)
    assert {balance.key: (balance.closed, balance.granted) for balance in session.read()} == {
        "a#": (False, CALL),
        "b#": (True, NOTHING),
    }


def test_an_extension_does_not_close_what_was_open(session: Session) -> None:
    line = a_line(caps=calls(1))
    session.reserve("a", LONG_S, [line], (0, 0, 5), force=True)
    assert session.extend(line, CALL).closed is False


def test_a_reader_sees_one_scope_or_all(session: Session) -> None:
    for scope, key in [("user:a/x", "1"), ("user:a/x", "2"), ("user:a/xy", "3"), ("app:a", "4")]:
        session.reserve(an_id(), LONG_S, [a_line(key, scope=scope)], CALL)
    assert sorted(balance.key for balance in session.read("user:a/x")) == ["1", "2"]
    assert [balance.key for balance in session.read("app:a")] == ["4"]
    assert session.read("user:a/") == session.read("user:%") == session.read("") == []
    assert sorted(balance.key for balance in session.read()) == ["1", "2", "3", "4"]


def test_an_empty_store_has_nothing_to_tell(session: Session) -> None:
    assert session.read() == []
    assert session.marks("k#") == {}
    assert session.get("control") == (0, "")
    assert session.tail("alert", 9) == []
    assert session.running(60) == []
    assert session.release("h").control == 0


def test_what_one_connection_did_the_next_one_sees_at_once(session: Session, connect: Connect) -> None:
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


def test_answers_carry_the_stores_clock_and_it_goes_forward(session: Session) -> None:
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
    place: Any, session: Session, monkeypatch: pytest.MonkeyPatch, ahead: float
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


# ---- marks ----------------------------------------------------------------------------------------------------------


def test_first_is_true_once_per_account_and_mark(session: Session, connect: Connect) -> None:
    assert session.first("a#", "0.8:warn", 0.8, (10, UNLIMITED, 0))
    assert not session.first("a#", "0.8:warn", 0.8, (10, UNLIMITED, 0))
    assert not connect().first("a#", "0.8:warn", 0.9, NOTHING)
    assert session.first("a#", "0.9:warn", 0.9, NOTHING)
    assert session.first("b#", "0.8:warn", 0.8, NOTHING)
    assert session.marks("a#") == {"0.8:warn": (0.8, (10, UNLIMITED, 0)), "0.9:warn": (0.9, NOTHING)}
    assert session.marks("b#") == {"0.8:warn": (0.8, NOTHING)}
    assert session.marks("c#") == {}
    assert all(isinstance(limit, tuple) for _, limit in session.marks("a#").values())


def test_unmark_arms_what_it_names_and_nothing_else(session: Session) -> None:
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


def test_a_document_is_replaced_only_by_who_has_seen_its_version(session: Session, connect: Connect) -> None:
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


def test_a_long_document_comes_back_as_it_was(session: Session) -> None:
    text = "".join(random.Random(1).choices("añ日🦊\n\"'\\{}", k=200_000))
    assert session.put("d", 0, text)
    assert session.get("d") == (1, text)


def test_every_answer_carries_the_version_of_the_control_document(session: Session) -> None:
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


def test_the_last_records_of_a_kind_come_oldest_first(session: Session) -> None:
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


def test_all_records_about_one_thing_come_oldest_first(session: Session, connect: Connect) -> None:
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


def test_a_store_from_before_there_was_an_index_is_opened_and_gets_one(place: Any, connect: Connect) -> None:
    old = connect()
    old.append("call", "run:1", "text")
    if place.kind == "sqlite":
        old._db.execute("DROP INDEX records_about")  # type: ignore[attr-defined]
    elif place.kind == "postgres":
        old._db.execute(f'DROP INDEX "{old._schema}".records_about')  # type: ignore[attr-defined]
    else:  # a record that is in no index is in no answer, and goes with the others
        old._client.xadd(f"{old._prefix}r:call", {"at": "1.0", "ref": "run:1", "text": "older"})  # type: ignore[attr-defined]
    old.close()
    new = connect()
    assert [text for _, text in new.about("call", "run:1")] == ["text"]
    if place.kind == "sqlite":
        assert new._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'records_about'").fetchone()  # type: ignore[attr-defined]
    elif place.kind == "postgres":
        assert new._call("SELECT to_regclass(%s::text)", (f'"{new._schema}".records_about',))[0][0]  # type: ignore[attr-defined]
    time.sleep(0.002)
    new.purge(0)
    assert new.tail("call", 9) == new.about("call", "run:1") == []


def test_what_is_purged_is_not_told_about_any_more(session: Session) -> None:
    session.append("call", "run:1", "old")
    session.append("call", "run:2", "old")
    time.sleep(0.6)
    session.append("call", "run:1", "new")
    session.purge(0.3)
    assert [text for _, text in session.about("call", "run:1")] == ["new"]
    assert session.about("call", "run:2") == []


def test_a_run_gives_signs_of_life_until_it_ends(session: Session, connect: Connect) -> None:
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


def test_a_run_that_gave_no_sign_for_too_long_is_not_running(session: Session) -> None:
    session.beat("quiet", "w", "")
    session.beat("busy", "w", "")
    time.sleep(0.6)
    session.beat("busy", "w", "")
    assert [run for run, *_ in session.running(0.5)] == ["busy"]
    assert sorted(run for run, *_ in session.running(60)) == ["busy", "quiet"]


def test_a_side_effect_is_claimed_by_one_and_done_once(session: Session, connect: Connect) -> None:
    other = connect()
    assert session.claim("mail", LONG_S) == "yes"
    assert other.claim("mail", LONG_S) == "pending"
    assert session.claim("mail", LONG_S) == "pending"
    assert other.claim("another", LONG_S) == "yes"
    session.finish("mail", done=True)
    assert other.claim("mail", LONG_S) == session.claim("mail", SHORT_S) == "done"
    session.finish("mail", done=False)  # what is done stays done
    assert other.claim("mail", LONG_S) == "done"


def test_a_claim_that_failed_or_whose_worker_is_gone_is_free_again(session: Session, connect: Connect) -> None:
    other = connect()
    session.claim("failed", LONG_S)
    session.finish("failed", done=False)
    assert other.claim("failed", LONG_S) == "yes"
    assert session.claim("failed", LONG_S) == "pending"
    session.claim("gone", SHORT_S)
    time.sleep(0.02)
    assert other.claim("gone", LONG_S) == "yes"
    assert session.claim("gone", LONG_S) == "pending"


def test_what_was_done_stays_done_when_the_claims_time_is_over(session: Session) -> None:
    session.claim("mail", SHORT_S)
    session.finish("mail", done=True)
    session.finish("never claimed", done=True)
    time.sleep(0.02)
    assert session.claim("mail", LONG_S) == session.claim("never claimed", LONG_S) == "done"


# ---- purge ----------------------------------------------------------------------------------------------------------


def test_purge_drops_what_is_over_and_old_and_nothing_else(session: Session) -> None:
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


def test_purge_drops_nothing_that_is_young(session: Session) -> None:
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


def test_purge_charges_an_expired_hold_before_it_forgets_anything(session: Session) -> None:
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


# ---- any sequence, against a model ----------------------------------------------------------------------------------


@dataclass
class OnPaper:
    """A hold as one would write it down."""

    keys: tuple[str, ...]
    state: str
    holds: Amount
    took: Amount = NOTHING


@dataclass
class AccountOnPaper:
    caps: Amount
    granted: Amount = NOTHING
    overrun: Amount = NOTHING
    closed: bool = False


@dataclass
class Paper:
    """The accounts without any cleverness: every hold is kept, and every balance is added up anew."""

    holds: dict[str, OnPaper] = field(default_factory=dict)
    accounts: dict[str, AccountOnPaper] = field(default_factory=dict)

    def touch(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.accounts.setdefault(line.key, AccountOnPaper(line.caps)).caps = line.caps

    def balance(self, key: str, scope: str) -> Balance:
        mine, account = [hold for hold in self.holds.values() if key in hold.keys], self.accounts[key]
        spent = _total(hold.took for hold in mine)
        held = _total(hold.holds for hold in mine if hold.state == "open")
        expired = _total(hold.took for hold in mine if hold.state == "expired")
        return Balance(
            key, scope, None, None, account.caps, spent, held, account.granted, account.overrun, expired, account.closed
        )

    def beyond(self, key: str) -> Amount:
        """How far above the cap spend and holds stand; negative where there is room."""
        b = self.balance(key, "")
        return tuple(b.spent[i] + b.held[i] - b.caps[i] - b.granted[i] for i in range(3))  # type: ignore[return-value]

    def reserve(self, hold: str, lines: Sequence[Line], want: Amount, force: bool) -> bool:
        if (known := self.holds.get(hold)) is not None:
            return known.state == "open"
        self.touch(lines)
        for line in lines:
            if not force and (
                self.accounts[line.key].closed
                or any(b + w > 0 for b, w in zip(self.beyond(line.key), want, strict=True))
            ):
                return False
        self.holds[hold] = OnPaper(tuple(line.key for line in lines), "open", want)
        return True

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount) -> None:
        if hold not in self.holds:
            self.touch(lines)
            self.holds[hold] = OnPaper(tuple(line.key for line in lines), "unknown", NOTHING)
        known = self.holds[hold]
        if known.state == "released" and not known.keys:  # released before it was made: nobody knew its accounts
            self.touch(lines)
            known.keys = tuple(line.key for line in lines)
        expected = known.holds if known.state == "open" else known.took
        known.state, known.took = "settled", actual
        for account, over in ((self.accounts[key], self.beyond(key)) for key in known.keys):
            old = account.overrun
            excess = [actual[i] - expected[i] for i in range(3)]
            broke = [excess[i] > 0 and over[i] > 0 for i in range(3)]
            account.overrun = tuple(
                max(old[i], min(over[i], old[i] + excess[i])) if broke[i] else old[i] for i in range(3)
            )  # type: ignore[assignment]
            account.closed = account.closed or any(broke)

    def end(self, hold: str, state: str) -> None:
        known = self.holds.setdefault(hold, OnPaper((), state, NOTHING))
        if known.state == "open":
            known.state = state
            known.took = known.holds if state == "expired" else NOTHING

    def extend(self, line: Line, more: Amount) -> None:
        self.touch([line])
        account = self.accounts[line.key]
        account.granted = _total([account.granted, more])
        account.closed = account.closed and any(over > 0 for over in self.beyond(line.key))


def _total(amounts: Any) -> Amount:
    return tuple(map(sum, zip(NOTHING, *amounts, strict=True)))  # type: ignore[return-value]


AMOUNTS = st.tuples(*[st.integers(0, 6)] * 2, st.integers(0, 3))
CAPS = st.tuples(*[st.sampled_from([0, 5, 10, 20, UNLIMITED])] * 3)
HOLDS = st.integers(0, 9)  # few, so that ids come again
SETS = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 0), (2, 1, 0), ()])
_examples = count()


class AgainstPaper(RuleBasedStateMachine):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.paper, self.example = session, Paper(), next(_examples)
        self.scope = f"user:a/{self.example}"
        self.caps: list[Amount] = [(10, 10, 10)] * 3

    def lines(self, which: Sequence[int]) -> list[Line]:
        return [a_line(f"{self.example}.{i}#", self.caps[i], scope=self.scope) for i in which]

    def hold(self, number: int) -> str:
        return f"{self.example}.{number}"

    def check(self, reply: Reply) -> None:
        assert not reply.stale
        for balance in reply.balances:
            told = self.paper.balance(balance.key, self.scope)
            assert (balance.caps, balance.granted, balance.overrun, balance.closed) == (
                told.caps,
                told.granted,
                told.overrun,
                told.closed,
            )
            assert _total([balance.spent, balance.held]) == _total([told.spent, told.held])

    @initialize(caps=st.tuples(CAPS, CAPS, CAPS))
    def begin(self, caps: tuple[Amount, Amount, Amount]) -> None:
        self.caps = list(caps)

    @rule(number=HOLDS, which=SETS, want=AMOUNTS, force=st.sampled_from([False, False, False, True]))
    def reserve(self, number: int, which: Sequence[int], want: Amount, force: bool) -> None:
        lines = self.lines(which)
        reply = self.session.reserve(self.hold(number), LONG_S, lines, want, force=force)
        assert reply.ok is self.paper.reserve(self.hold(number), lines, want, force)
        self.check(reply)

    @rule(number=HOLDS, which=SETS, want=AMOUNTS)
    def die_with_a_hold(self, number: int, which: Sequence[int], want: Amount) -> None:
        lines, is_new = self.lines(which), self.hold(number) not in self.paper.holds
        reply = self.session.reserve(self.hold(number), SHORT_S, lines, want)
        assert reply.ok is self.paper.reserve(self.hold(number), lines, want, force=False)
        if is_new and reply.ok:
            time.sleep(0.003)
            self.paper.end(self.hold(number), "expired")

    @rule(number=HOLDS, which=SETS, actual=AMOUNTS)
    def settle(self, number: int, which: Sequence[int], actual: Amount) -> None:
        lines = self.lines(which)
        reply = self.session.settle(self.hold(number), lines, actual)
        self.paper.settle(self.hold(number), lines, actual)
        assert reply.ok
        self.check(reply)

    @rule(number=HOLDS)
    def release(self, number: int) -> None:
        assert self.session.release(self.hold(number)).ok
        self.paper.end(self.hold(number), "released")

    @rule(which=st.integers(0, 2), more=AMOUNTS)
    def extend(self, which: int, more: Amount) -> None:
        (line,) = self.lines([which])
        balance = self.session.extend(line, more)
        self.paper.extend(line, more)
        told = self.paper.balance(line.key, self.scope)
        assert (balance.caps, balance.granted, balance.closed) == (told.caps, told.granted, told.closed)

    @rule(which=st.integers(0, 2), caps=CAPS)
    def change_the_policy(self, which: int, caps: Amount) -> None:
        self.caps[which] = caps
        lines, hold = self.lines([which]), an_id()
        reply = self.session.reserve(hold, LONG_S, lines, NOTHING)
        assert reply.ok is self.paper.reserve(hold, lines, NOTHING, force=False)

    @invariant()
    def the_store_has_what_is_on_paper(self) -> None:
        told = {balance.key: balance for balance in self.session.read(self.scope)}
        assert told == {key: self.paper.balance(key, self.scope) for key in self.paper.accounts}


def test_whatever_happens_in_whatever_order_the_store_has_what_is_on_paper(session: Session) -> None:
    run_state_machine_as_test(
        lambda: AgainstPaper(session),
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            # a failure is told as it was found: making it smaller takes minutes on a real store
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---- many at once ---------------------------------------------------------------------------------------------------


def at_once(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """The results of so many threads that begin together. An error in one of them is an error."""
    start, results, errors = threading.Barrier(threads), [None] * threads, []

    def run(number: int) -> None:
        try:
            start.wait(PATIENCE_S)
            results[number] = work(number)
        except BaseException as error:  # told below
            errors.append(error)

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(PATIENCE_S * 2)
    assert not any(thread.is_alive() for thread in running), "somebody still waits"
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def sessions(connect: Connect) -> list[Session]:
    return [connect() for _ in range(THREADS)]


def test_sixteen_threads_on_a_budget_of_five_never_make_a_sixth_call(sessions: list[Session]) -> None:
    """Who checks first and adds later overspends a small budget by three quarters."""
    for turn in range(10):
        line = a_line(f"{turn}#", calls(5))
        won = at_once(lambda number, line=line: sessions[number].reserve(an_id(), LONG_S, [line], CALL).ok)
        assert sum(won) == 5
        assert the(sessions[0], line.key).held == (0, 0, 5)


def test_holds_that_are_settled_and_released_at_once_add_up_exactly(sessions: list[Session]) -> None:
    line = a_line(caps=(400, UNLIMITED, UNLIMITED))

    def work(number: int) -> tuple[int, int]:
        spent = most = 0
        for turn in range(12):
            if (reply := sessions[number].reserve(hold := an_id(), LONG_S, [line], (10, 10, 1))).ok:
                most = max(most, of(reply).spent[0] + of(reply).held[0])
                if turn % 3 == 0:
                    sessions[number].release(hold)
                else:
                    sessions[number].settle(hold, [line], (number % 10, 1, 1))
                    spent += number % 10
        return spent, most

    results = at_once(work)
    balance = the(sessions[0])
    assert (balance.spent[0], balance.held) == (sum(spent for spent, _ in results), NOTHING)
    assert max(most for _, most in results) <= 400
    assert not balance.closed


def test_opposite_orders_of_lines_do_not_lock_each_other_out(sessions: list[Session]) -> None:
    lines = [a_line("a#"), a_line("b#"), a_line("c#")]

    def work(number: int) -> None:
        mine = lines if number % 2 else lines[::-1]
        for _ in range(10):
            hold = an_id()
            assert sessions[number].reserve(hold, LONG_S, mine, CALL).ok
            sessions[number].settle(hold, mine, CALL)
            sessions[number].settle(an_id(), mine[::-1], CALL)

    at_once(work)
    assert [balance.spent for balance in sessions[0].read()] == [(0, 0, THREADS * 20)] * 3


def test_one_hold_settled_by_many_at_once_is_booked_once(sessions: list[Session]) -> None:
    sessions[0].reserve("h", LONG_S, [a_line()], CALL)
    at_once(lambda number: sessions[number].settle("h", [a_line()], (7, 7, 1)))
    at_once(lambda number: sessions[number].settle("unknown", [a_line()], (7, 7, 1)))
    assert (the(sessions[0]).spent, the(sessions[0]).held) == ((14, 14, 2), NOTHING)


def test_one_id_reserved_by_many_at_once_holds_once(sessions: list[Session]) -> None:
    assert all(at_once(lambda number: sessions[number].reserve("h", LONG_S, [a_line()], CALL).ok))
    assert the(sessions[0]).held == CALL


def test_an_expired_hold_that_many_find_at_once_is_charged_once(sessions: list[Session]) -> None:
    for _ in range(5):
        past(sessions[0], a_line(), CALL)
    at_once(
        lambda number: (
            sessions[number].read() if number % 2 else sessions[number].reserve(an_id(), LONG_S, [a_line("b#")], CALL)
        )
    )
    assert (the(sessions[0]).spent, the(sessions[0]).expired, the(sessions[0]).held) == ((0, 0, 5), (0, 0, 5), NOTHING)


def test_first_is_true_for_one_of_sixteen(sessions: list[Session]) -> None:
    for turn in range(5):
        assert sum(at_once(lambda number, turn=turn: sessions[number].first("k#", f"m{turn}", 0.5, NOTHING))) == 1


def test_put_loses_no_update(sessions: list[Session]) -> None:
    def add(number: int) -> None:
        for _ in range(5):
            while True:
                version, text = sessions[number].get("sum")
                if sessions[number].put("sum", version, f"{int(text or 0) + 1}"):
                    break

    at_once(add)
    assert sessions[0].get("sum") == (THREADS * 5, f"{THREADS * 5}")


def test_a_claim_has_one_winner_also_when_the_last_ones_time_is_over(sessions: list[Session]) -> None:
    for turn in range(5):
        if turn % 2:
            sessions[0].claim(f"c{turn}", SHORT_S)
            time.sleep(0.02)
        assert sorted(at_once(lambda number, turn=turn: sessions[number].claim(f"c{turn}", LONG_S))) == ["pending"] * (
            THREADS - 1
        ) + ["yes"]


def test_no_record_is_lost_when_many_write(sessions: list[Session]) -> None:
    at_once(lambda number: [sessions[number].append("alert", f"{number}", f"{turn}") for turn in range(5)])
    told = sessions[0].tail("alert", 1000)
    assert sorted((ref, text) for _, ref, text in told) == sorted(
        (f"{n}", f"{turn}") for n in range(THREADS) for turn in range(5)
    )
    for number in range(THREADS):  # each writer's own records keep their order
        assert [text for _, ref, text in told if ref == f"{number}"] == [f"{turn}" for turn in range(5)]


# ---- other processes ------------------------------------------------------------------------------------------------

# Each worker is a process of its own, forked from one that has imported everything: to start one costs milliseconds,
# and it can be killed.
WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload(
    ["runguard.ledger.sqlite", "runguard.ledger.redis", "redis", "runguard.ledger.postgres", "psycopg", "pytest"]
)
PREAMBLE = """
import os, random, resource, sys, time
from importlib import import_module
from runguard.core.budget import UNLIMITED
from runguard.ledger.store import Line, StoreError, StoreOutage
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


RACER = """
session = store.connect(20)
say("ready")
hear()
won = []
for turn in range(30):
    for attempt in range(5):
        lines = [line(f"{turn}#", (UNLIMITED, UNLIMITED, 5))]
        if session.reserve(f"{os.getpid()}.{turn}.{attempt}", 300, lines, (0, 0, 1)).ok:
            won.append(turn)
say(won)
"""


def test_four_processes_on_a_budget_of_five_never_make_a_sixth_call(place: Any, session: Session) -> None:
    with contextlib.ExitStack() as at_the_end:
        racers = [at_the_end.enter_context(Worker(place, RACER)) for _ in range(4)]
        assert [racer.told() for racer in racers] == ["ready"] * 4
        for racer in racers:
            racer.tell("go")
        won = [turn for racer in racers for turn in racer.told()]
    assert {turn: won.count(turn) for turn in range(30)} == dict.fromkeys(range(30), 5)
    assert [balance.held for balance in session.read()] == [(0, 0, 5)] * 30


HOLDER = """
session = store.connect(20)
session.settle("before", [line("k#")], (1, 1, 1))
session.reserve("orphan", 2.0, [line("k#")], (10, 10, 1))
say("held")
time.sleep(60)
"""


def test_the_hold_of_a_killed_worker_is_charged_at_its_time_and_a_late_bill_corrects_it(
    place: Any, session: Session
) -> None:
    """kill -9 between reserve and settle: one call too many is counted, never one too few."""
    with Worker(place, HOLDER) as doomed:
        assert doomed.told() == "held"
        held = the(session)
    assert (held.spent, held.held) == ((1, 1, 1), (10, 10, 1))
    deadline = time.monotonic() + PATIENCE_S
    while the(session).held != NOTHING and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (the(session).spent, the(session).held, the(session).expired) == ((11, 11, 2), NOTHING, (10, 10, 1))
    late = of(session.settle("orphan", [a_line()], (3, 3, 1)))
    assert (late.spent, late.expired) == ((4, 4, 2), NOTHING)


SPENDER = """
log, dice, number = os.open(bills, os.O_WRONLY | os.O_APPEND | os.O_CREAT), random.Random(os.getpid()), 0
pot, own = line("pot#", (UNLIMITED, cap, UNLIMITED)), line(f"own{os.getpid()}#")
session = store.connect(20)
while True:
    number += 1
    hold = f"{os.getpid()}.{number}"
    if session.reserve(hold, ttl, [pot, own], (0, 10, 1)).ok:
        took = dice.randint(1, 10)
        os.write(log, f"{took}\\n".encode())  # the provider's bill: it outlives any of us
        time.sleep(0.002)
        session.settle(hold, [pot, own], (0, took, 1))
"""


def test_workers_killed_at_random_overspend_nothing_and_lose_nothing(
    place: Any, session: Session, tmp_path: Path
) -> None:
    cap, ttl, kills, dice, bills = 4_000, 0.8, 0, random.Random(3), tmp_path / "bills"
    facts = {"cap": cap, "ttl": ttl, "bills": str(bills)}
    spenders = [Worker(place, SPENDER, **facts) for _ in range(3)]
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end or kills < 8:
            time.sleep(dice.choice([0.001, 0.03, 0.1, 0.2]))  # some die while they connect
            victim = dice.randrange(3)
            spenders[victim].kill()
            kills += 1
            spenders[victim] = Worker(place, SPENDER, **facts)
    finally:
        for spender in spenders:
            spender.kill()
            kills += 1
    time.sleep(ttl + 0.1)
    pot = a_line("pot#", (UNLIMITED, cap, UNLIMITED))
    left = 0  # whoever comes after them spends the rest
    while session.reserve(hold := an_id(), LONG_S, [pot], (0, 10, 1)).ok:
        session.settle(hold, [pot], (0, 10, 1))
        left += 1
    billed = [int(bill) for bill in bills.read_text().split()]
    there = the(session, "pot#")
    assert len(billed) > kills, "they hardly worked"
    assert sum(billed) + 10 * left <= cap  # overspend: none
    assert cap - 10 < there.spent[1] <= cap
    assert there.held == NOTHING
    assert there.spent[1] >= sum(billed) + 10 * left  # what was billed is in the books
    assert there.spent[2] - len(billed) - left <= kills  # counted too much: at most one call for each kill
    assert there.expired[2] <= kills
    own = [balance for balance in session.read() if balance.key.startswith("own")]
    assert sum(balance.spent[2] for balance in own) == there.spent[2] - left  # all lines or none
    assert all(balance.held == NOTHING and not balance.closed for balance in own)


# ---- SQLite: the file and the machine -------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "accounts.db"


@pytest.fixture
def file(path: Path) -> Iterator[Session]:
    """A session on a SQLite file in which five calls of nine are spent."""
    session = SqliteStore(f"sqlite:///{path}").connect(PATIENCE_S)
    session.settle("first", [a_line(caps=calls(9))], (5, 5, 5))
    yield session
    session.close()


@dataclass(frozen=True)
class FileAt:
    """A place, as workers need it."""

    url: str
    module: str = "runguard.ledger.sqlite"
    name: str = "SqliteStore"


def opened(path: Path, timeout: float = PATIENCE_S) -> Session:
    return SqliteStore(f"sqlite:///{path}").connect(timeout)


def digest(path: Path) -> dict[str, bytes]:
    return {
        found.name: found.read_bytes() for found in sorted(path.parent.iterdir()) if not found.name.endswith("-shm")
    }


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite://host/a.db",
        "sqlite:///a.db?mode=ro",
        "sqlite:///a.db?synchronous=off",
        "sqlite:///a#b.db",
    ],
)
def test_sqlite_refuses_an_address_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(PolicyError):
        SqliteStore(url)


def test_sqlite_reads_its_address_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert SqliteStore("sqlite:///a%20b/c.db").path == tmp_path / "a b" / "c.db"
    assert SqliteStore("sqlite:////x/c.db").path == Path("/x/c.db")
    assert SqliteStore("sqlite:///~/c.db").path == Path.home() / "c.db"


def test_sqlite_waits_for_the_disk_unless_told_otherwise(path: Path) -> None:
    """Only what was synced survives a power cut."""
    for option, level in (("", 2), ("?synchronous=full", 2), ("?synchronous=normal", 1)):
        store = SqliteStore(f"sqlite:///{path}{option}")
        with contextlib.closing(store.connect(PATIENCE_S)) as session:
            assert session._db.execute("PRAGMA synchronous").fetchone() == (level,)
        assert ("loses nothing" in store.durable) is (level == 2)


def test_a_relative_path_is_the_same_file_after_the_process_went_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next connection would find an empty ledger, with the full budget."""
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("sqlite:///here.db")
    with contextlib.closing(store.connect(PATIENCE_S)) as session:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        session.settle("h", [a_line()], CALL)
        with contextlib.closing(store.connect(PATIENCE_S)) as other:
            assert the(other).spent == CALL
    assert not list((tmp_path / "elsewhere").iterdir())


def test_workers_that_make_a_file_at_the_same_moment_all_find_their_own_schema(tmp_path: Path) -> None:
    """One of them makes it while the others look:
    they must not take the half of it that they see for somebody else's.
    """
    for turn in range(15):
        at_once(lambda _, turn=turn: opened(tmp_path / f"{turn}.db").close(), threads=8)


def test_a_period_begins_at_its_first_moment_and_is_over_at_its_last(
    file: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two periods that touch have no moment in common and none between them."""
    clock = [1_700_000_000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    begins, ends = 1_700_000_000.0, 1_700_003_600.0
    line, following = a_line("p#1", begins=begins, ends=ends), a_line("p#2", begins=ends, ends=ends + 3600)
    assert file.reserve(an_id(), LONG_S, [line], CALL).ok
    assert file.reserve(an_id(), LONG_S, [following], CALL).stale
    clock[0] = begins - 0.001
    assert file.reserve(an_id(), LONG_S, [line], CALL).stale
    clock[0] = ends - 0.001
    assert file.reserve(an_id(), LONG_S, [line], CALL).ok
    clock[0] = ends
    assert file.reserve(an_id(), LONG_S, [line], CALL).stale
    assert file.reserve(an_id(), LONG_S, [following], CALL).ok


def test_a_hold_is_charged_at_the_end_of_its_time_and_no_moment_before(
    file: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_700_000_000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    file.reserve("h", 60, [a_line("p#")], CALL)
    clock[0] += 59.99
    assert the(file, "p#").held == CALL
    clock[0] += 0.02
    assert the(file, "p#").expired == CALL


def test_a_connection_that_has_read_may_write_after_another_wrote(path: Path, file: Session) -> None:
    """A read that turns into a write is refused at once by SQLite, whatever the timeout."""
    with contextlib.closing(opened(path)) as other:
        for turn in range(5):
            for one, two in ((file, other), (other, file)):
                one.get("control")
                one.read()
                two.settle(an_id(), [a_line()], CALL)
                assert one.reserve(an_id(), LONG_S, [a_line(f"{turn}#")], CALL).ok
        assert the(file).spent == (5, 5, 15)


def test_a_full_disk_is_an_outage_that_leaves_the_accounts_whole(file: Session, path: Path) -> None:
    file.reserve("h", LONG_S, [a_line(caps=calls(9))], CALL)
    before, pages = the(file), file._db.execute("PRAGMA page_count").fetchone()[0]
    file._db.execute(f"PRAGMA max_page_count={pages}")  # SQLITE_FULL, as from a disk without room
    with pytest.raises(StoreOutage, match="full"):  # noqa: PT012 - how many still fit is not the subject
        for number in range(1_000):
            file.append("alert", f"{number}", "x" * 500)
    assert the(file) == before  # reading goes on
    with contextlib.closing(opened(path)) as other:
        assert the(other) == before
    file._db.execute("PRAGMA max_page_count=100000")
    assert of(file.settle("h", [a_line(caps=calls(9))], CALL)).spent == (5, 5, 6)


FILLER = """
import signal
session = store.connect(20)
session.settle("mine", [line("k#")], (1, 1, 1))
size = max(os.path.getsize(path + end) for end in ("", "-wal"))
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3 * 4096, resource.RLIM_INFINITY))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    for number in range(1_000):
        session.settle(f"fill{number}", [line("k#")], (1, 1, 1))
    say("never full")
except StoreOutage:
    say(number)
say(session.read()[0].spent[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
session.settle(f"fill{number}", [line("k#")], (1, 1, 1))
say(session.read()[0].spent[2])
"""


def test_a_write_that_the_system_cuts_short_is_an_outage_and_can_be_told_again(path: Path, file: Session) -> None:
    with Worker(FileAt(f"sqlite:///{path}"), FILLER, path=str(path)) as filler:
        booked = filler.told()
        assert isinstance(booked, int)
        assert filler.told() == 6 + booked  # all that was acknowledged, and nothing of what was not
        assert filler.told() == 7 + booked
    assert the(file).spent[2] == 7 + booked


UNPRIVILEGED = """
if os.geteuid() == 0:  # root may write everywhere, so somebody else tries
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    session = store.connect(2)
    session.settle("h", [line("k#")], (0, 0, 1))
except StoreError as error:
    say(str(error))
else:
    say("written")
"""


@pytest.mark.parametrize("what", ["writable", "folder", "file", "unreadable", "missing folder"])
def test_a_file_or_folder_without_permission_is_an_error_that_names_it(what: str) -> None:
    """No outage: no second attempt will help."""
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, which only its owner may enter
        folder = Path(name) / "accounts"
        folder.mkdir()
        Path(name).chmod(0o755)
        path = folder / "a.db"
        opened(path).close()
        for found in folder.iterdir():
            found.chmod({"file": 0o444, "unreadable": 0o000}.get(what, 0o666))
        folder.chmod(0o555 if what in ("folder", "missing folder") else 0o777)
        target = folder / "deeper" / "a.db" if what == "missing folder" else path
        with Worker(FileAt(f"sqlite:///{target}"), UNPRIVILEGED) as somebody:
            answer = somebody.told()
        folder.chmod(0o755)
    if what == "writable":  # so the others fail for the reason that they name
        assert answer == "written"
    else:
        assert str(target) in answer
        assert "damaged" not in answer


def damaged(path: Path, how: str) -> None:
    """As a bad disk leaves it. The file has several pages, and no log beside it."""
    with contextlib.closing(opened(path)) as session:
        for number in range(200):
            session.settle(f"{number}", [a_line(f"{number}#", scope=f"s{number}")], CALL)
        session._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    assert len(content) > 8 * 4096
    if how == "header":
        content[:100] = b"\0" * 100
    elif how == "text":
        content = bytearray(b"these are not the accounts you are looking for\n" * 500)
    elif how == "pages":
        content[4096:] = os.urandom(len(content) - 4096)
    else:
        content = content[: len(content) // 2]
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["header", "text", "pages", "cut in half"])
def test_a_damaged_file_is_an_error_and_is_never_begun_anew(path: Path, how: str) -> None:
    """A store that helps itself with an empty file gives everybody the full budget again."""
    damaged(path, how)
    before = path.read_bytes()

    def work() -> None:
        with contextlib.closing(opened(path)) as session:
            session.read()
            for number in range(200):
                session.reserve(an_id(), LONG_S, [a_line(f"{number}#", scope=f"s{number}")], CALL)

    with pytest.raises(StoreError, match="damaged"):  # some damage shows when the file is opened, some when it is read
        work()
    assert path.read_bytes()[:4096] == before[:4096]
    assert len(path.read_bytes()) == len(before)


@pytest.mark.parametrize("how", ["unlinked", "replaced", "replaced by a copy"])
def test_a_file_that_goes_away_under_a_live_session_is_an_outage(path: Path, file: Session, how: str) -> None:
    """Writes into a file without a name succeed, and are lost."""
    moved = path.with_name("moved.db")
    if how == "replaced by a copy":
        shutil.copy(path, moved)
    path.unlink()
    if how == "replaced":
        opened(path).close()
    elif how == "replaced by a copy":
        moved.rename(path)
    deeds: list[Callable[[], Any]] = [
        lambda: file.reserve("h", LONG_S, [a_line()], CALL),
        lambda: file.settle("first", [a_line()], CALL),
        lambda: file.release("first"),
        lambda: file.extend(a_line(), CALL),
        lambda: file.put("control", 0, "stop"),
        lambda: file.append("alert", "r", "t"),
        lambda: file.claim("c", LONG_S),
        lambda: file.first("k#", "m", 0.5, NOTHING),
        lambda: file.beat("r", "w", "t"),
        file.read,
    ]
    for deed in deeds:
        with pytest.raises(StoreOutage):
            deed()


def test_a_file_locked_by_another_program_is_an_outage_after_the_timeout(path: Path, file: Session) -> None:
    with (
        contextlib.closing(opened(path, timeout=0.2)) as waiting,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(StoreOutage, match="locked"):
            waiting.reserve("h", LONG_S, [a_line()], CALL)
        with pytest.raises(StoreOutage, match="locked"):
            waiting.settle("h", [a_line()], CALL)
        took = time.monotonic() - began
        assert 0.3 < took < 5  # it waited, and not for ever
        other.execute("ROLLBACK")
        assert waiting.reserve("h", LONG_S, [a_line()], CALL).ok
    assert (the(file).spent, the(file).held) == ((5, 5, 5), CALL)


IN_THE_MIDDLE = """
session = store.connect(20)
with session._write():
    session._db.execute("UPDATE accounts SET spent_calls = spent_calls + 100")
    session._db.execute("DELETE FROM holds")
    say("writing")
    time.sleep(60)
"""


def test_a_worker_stopped_in_the_middle_of_a_write_is_an_outage_for_the_others_and_killed_it_leaves_nothing(
    path: Path, file: Session
) -> None:
    """A lock that dies with its process never has to be broken."""
    with contextlib.closing(opened(path, timeout=0.2)) as waiting:
        with Worker(FileAt(f"sqlite:///{path}"), IN_THE_MIDDLE) as stuck:
            assert stuck.told() == "writing"
            with pytest.raises(StoreOutage, match="locked"):
                waiting.settle("h", [a_line()], CALL)
            assert waiting.get("control") == (0, "")  # readers do not wait for writers
        # at once, with a fifth of a second's patience
        assert of(waiting.settle("h", [a_line()], CALL)).spent == (5, 5, 6)
        assert not waiting.reserve("first", LONG_S, [a_line()], CALL).ok  # the holds are all there


def test_a_call_that_fails_half_way_leaves_nothing_and_the_session_goes_on(
    file: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read()
    with monkeypatch.context() as broken:
        broken.setattr(type(file), "_control", lambda _: 1 / 0)  # the last thing a reserve and a settle do
        for deed in (
            lambda: file.reserve("h", LONG_S, [a_line("new#")], CALL),
            lambda: file.settle("first", [a_line()], (9, 9, 9)),
            lambda: file.release("h"),
        ):
            with pytest.raises(ZeroDivisionError):
                deed()
    assert file.read() == before
    assert file.reserve("h", LONG_S, [a_line("new#")], CALL).ok


@pytest.mark.parametrize("version", [0, 1, SCHEMA_VERSION, SCHEMA_VERSION + 1, 99])
def test_another_programs_database_is_refused_and_stays_as_it_was(path: Path, version: int) -> None:
    """Version 1 is what nearly every program writes into its first schema."""
    with contextlib.closing(sqlite3.connect(path)) as foreign:
        foreign.executescript(
            "CREATE TABLE accounts (key TEXT, balance REAL); INSERT INTO accounts VALUES ('mine', 1.5); "
            f"PRAGMA user_version={version}"
        )
    before = digest(path)
    for _ in range(2):
        with pytest.raises(StoreError, match=re.escape(str(path))):
            opened(path)
    assert digest(path) == before


def test_a_schema_of_a_newer_version_is_refused_and_stays_as_it_was(path: Path, file: Session) -> None:
    file._db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    file.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer"):
        opened(path)
    assert path.read_bytes() == before


def test_a_store_in_memory_is_refused_because_each_session_would_have_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((StoreError, PolicyError)):
        SqliteStore("sqlite:///:memory:").connect(PATIENCE_S)
