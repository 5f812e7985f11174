"""Every store reserves alike."""

import math
import random
import string
import time
from decimal import Decimal
from typing import Any

import pytest

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import StoreError, StoreSession
from tests.kit.conformance import (
    CALL,
    LONG_S,
    SHORT_S,
    Connect,
    a_line,
    an_id,
    calls,
    of,
    past,
    the,
)

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


# ---- reserve --------------------------------------------------------------------------------------------------------


def amount(unit: int, number: int, others: int = 0) -> Amount:
    """This number of one unit: dollars, tokens or calls."""
    usd, tokens, calls = (number if at == unit else others for at in range(3))
    return usd, tokens, calls


@pytest.mark.parametrize("unit", range(3))
def test_the_cap_itself_fits_and_one_more_does_not(session: StoreSession, unit: int) -> None:
    """Where the boundary is said twice, it is soon said differently: `<` here and `>=` there."""
    three, one = amount(unit, 100_000_000), amount(unit, 1)
    line = a_line(caps=amount(unit, 300_000_000, UNLIMITED))
    for _ in range(3):  # three tenths of a dollar under a limit of three tenths: exact
        assert session.reserve(an_id(), LONG_S, [line], three).ok
    assert session.reserve(an_id(), LONG_S, [line], NOTHING).ok  # nothing fits even now
    refused = session.reserve(an_id(), LONG_S, [line], one)
    assert not refused.ok
    assert of(refused).held[unit] == 300_000_000


@pytest.mark.parametrize("unit", range(3))
def test_a_cap_of_0_holds_nothing_but_nothing(session: StoreSession, unit: int) -> None:
    one = amount(unit, 1)
    line = a_line(caps=amount(unit, 0, UNLIMITED))
    assert session.reserve("free", LONG_S, [line], NOTHING).ok
    assert not session.reserve("paid", LONG_S, [line], one).ok
    session.settle("free", [line], NOTHING)
    assert not the(session).closed
    assert session.extend(line, one).granted == one
    assert session.reserve("granted", LONG_S, [line], one).ok


def test_a_refusal_holds_nothing_not_even_the_part_that_would_fit(session: StoreSession) -> None:
    line = a_line(caps=(100, UNLIMITED, UNLIMITED))
    session.reserve("a", LONG_S, [line], (60, 0, 1))
    refused = session.reserve("b", LONG_S, [line], (41, 0, 1))
    assert (refused.ok, refused.stale) == (False, False)
    assert of(refused).held == the(session).held == (60, 0, 1)
    assert session.reserve("c", LONG_S, [line], (40, 0, 1)).ok


def test_a_refused_id_may_ask_again_when_there_is_room(session: StoreSession) -> None:
    line = a_line(caps=calls(1))
    session.reserve("a", LONG_S, [line], CALL)
    assert not session.reserve("b", LONG_S, [line], CALL).ok
    session.release("a")
    assert session.reserve("b", LONG_S, [line], CALL).ok
    assert the(session).held == CALL


@pytest.mark.parametrize("tight", range(3))
def test_when_one_of_several_lines_refuses_none_holds(session: StoreSession, tight: int) -> None:
    lines = [a_line(f"{i}#", calls(0 if i == tight else 9)) for i in range(3)]
    refused = session.reserve("h", LONG_S, lines, CALL)
    assert not refused.ok
    assert sorted(balance.key for balance in refused.balances) == ["0#", "1#", "2#"]
    assert all(balance.held == NOTHING for balance in [*refused.balances, *session.read()])
    assert all(balance.caps == calls(0 if balance.key == f"{tight}#" else 9) for balance in refused.balances)
    for i in range(3):  # the refused id holds nothing that a settle could find
        assert session.reserve(an_id(), LONG_S, [lines[i]], CALL).ok is (i != tight)


def test_a_known_id_changes_nothing_and_answers_as_before(session: StoreSession, connect: Connect) -> None:
    """The reply was lost and the call is told again, perhaps through another connection."""
    line = a_line(caps=calls(1))
    first = session.reserve("h", LONG_S, [line], CALL)
    for again in (session, connect()):
        reply = again.reserve("h", LONG_S, [line], CALL)
        assert reply.ok
        assert of(reply) == of(first)
    assert the(session).held == CALL


def test_a_known_id_is_not_asked_a_second_time_even_when_its_account_is_full_or_closed(session: StoreSession) -> None:
    line = a_line(caps=calls(2))
    session.reserve("h", LONG_S, [line], CALL)
    session.settle("other", [line], (0, 0, 5))
    assert the(session).closed
    assert session.reserve("h", LONG_S, [line], CALL).ok
    assert the(session).held == CALL


def test_a_known_id_with_other_amounts_or_lines_changes_nothing(session: StoreSession) -> None:
    session.reserve("h", LONG_S, [a_line(caps=calls(5))], CALL)
    session.reserve("h", LONG_S, [a_line(caps=calls(7))], (0, 0, 3))
    session.reserve("h", LONG_S, [a_line("z#", calls(7))], (0, 0, 3))
    assert [(b.key, b.held, b.caps) for b in session.read() if b.held != NOTHING] == [("k#", CALL, calls(5))]
    session.settle("h", [a_line("z#", calls(7))], CALL)  # it settles where it was held
    assert the(session).spent == CALL
    assert all(balance.spent == NOTHING for balance in session.read() if balance.key != "k#")


@pytest.mark.parametrize("end", ["settled", "released", "expired"])
def test_an_id_whose_hold_is_over_is_never_admitted_again(session: StoreSession, end: str) -> None:
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


def test_force_holds_whatever_the_caps_say(session: StoreSession) -> None:
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


def test_force_does_not_hold_on_a_stale_line(session: StoreSession) -> None:
    reply = session.reserve("h", LONG_S, [a_line(ends=session.now() - 1)], CALL, force=True)
    assert (reply.ok, reply.stale) == (False, True)
    assert session.read() == []


@pytest.mark.parametrize("mark", ["over", "not begun", "second line over"])
def test_a_line_of_another_period_is_stale_and_nothing_is_held(session: StoreSession, mark: str) -> None:
    now = session.now()
    over, early = a_line("old#", ends=now - 0.5, begins=now - 60), a_line("new#", begins=now + 60, ends=now + 120)
    lines = {"over": [over], "not begun": [early], "second line over": [a_line(), over]}[mark]
    reply = session.reserve("h", LONG_S, lines, CALL)
    assert (reply.ok, reply.stale) == (False, True)
    assert all(balance.held == NOTHING for balance in [*reply.balances, *session.read()])
    # the id is still free for the right period
    assert session.reserve("h", LONG_S, [a_line(begins=now - 60, ends=now + 60)], CALL).ok


def test_a_known_id_asked_again_after_its_periods_end_still_answers_as_before(session: StoreSession) -> None:
    """A retry across midnight: "stale, nothing is held" would be a lie, and the caller would hold twice."""
    line = a_line(ends=session.now() + 0.3)
    assert session.reserve("h", LONG_S, [line], CALL).ok
    time.sleep(0.4)
    again = session.reserve("h", LONG_S, [line], CALL)
    assert (again.ok, again.stale) == (True, False)
    assert the(session).held == CALL


def test_a_hold_outlives_its_period_and_settles_there(session: StoreSession) -> None:
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
def test_what_is_no_amount_is_refused_before_anything_is_written(session: StoreSession, bad: Any) -> None:
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
            with pytest.raises(ValueError, match="not an amount"):
                deed()
    assert session.read() == before
    assert session.reserve("h", LONG_S, [line], CALL).ok  # the id was not taken either


@pytest.mark.parametrize(
    "bad", [*(value for value in BAD_AMOUNTS if value != UNLIMITED), UNLIMITED + 1], ids=lambda value: f"{value!r:.12}"
)
def test_a_cap_that_is_no_amount_is_refused_before_anything_is_written(session: StoreSession, bad: Any) -> None:
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
def test_an_amount_has_three_parts(session: StoreSession, amount: Any) -> None:
    for lines in ([], [a_line()]):
        with pytest.raises(ValueError):  # noqa: PT011 - the subject is that nothing is written
            session.reserve("h", LONG_S, lines, amount)
        with pytest.raises(ValueError):  # noqa: PT011
            session.settle("h", lines, amount)
    with pytest.raises(ValueError):  # noqa: PT011
        session.extend(a_line(), amount)
    assert session.read() == []


@pytest.mark.parametrize("unit", range(3))
def test_large_amounts_are_exact_to_the_last_nano(place: Any, session: StoreSession, unit: int) -> None:
    """A double forgets single units from 2**53 on: nine million dollars in nano-USD."""

    def many(number: int) -> Amount:
        return amount(unit, number)

    large = (place.most - 1) // 2
    line = a_line(caps=amount(unit, large + 2, UNLIMITED))
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


def test_the_largest_amount_there_is_can_be_held_and_settled(place: Any, session: StoreSession) -> None:
    most = (place.most,) * 3
    assert session.reserve("h", LONG_S, [a_line(caps=most)], most).ok
    settled = of(session.settle("h", [a_line(caps=most)], most))
    assert (settled.spent, settled.caps, settled.closed) == (most, most, False)
    assert not session.reserve("g", LONG_S, [a_line(caps=most)], CALL).ok


def test_an_amount_that_a_store_cannot_count_is_refused_and_never_rounded(place: Any, session: StoreSession) -> None:
    for much in ((place.most + 1, 0, 0), (0, place.most + 1, 0), (0, 0, place.most + 1)):
        for deed in (
            lambda a=much: session.reserve("h", LONG_S, [a_line()], a),
            lambda a=much: session.settle("h", [a_line()], a),
            lambda a=much: session.extend(a_line(), a),
        ):
            with pytest.raises((ValueError, StoreError)):
                deed()
    assert session.read() == []


def test_an_expired_hold_of_nothing_poisons_no_later_call(session: StoreSession) -> None:
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
def test_names_with_odd_characters_are_names_like_any_other(session: StoreSession, odd: str) -> None:
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
