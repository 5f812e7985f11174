"""The script for the usual case of a next call does what a settlement and a reservation do one after the other."""

import random
from dataclasses import replace
from typing import Any

import pytest

from runguard.ledger import redis as sessions
from runguard.ledger.ledger import Balance, Line, SettledCall, StoreError, StoreReply
from runguard.ledger.redis import RedisSession
from tests.kit.redis_stores import CALL, a_line, key_of

CAPS = {"a": (400, 700, 40), "b": (250, 10_000, 60)}


def lines_of(twin: str, keys: str) -> list[Line]:
    return [a_line(f"{twin}{key}", caps=CAPS[key]) for key in keys]


def plain(reply: StoreReply) -> tuple[bool, bool, list[Balance]]:
    return reply.ok, reply.stale, [replace(b, key=b.key[1:], scope="") for b in reply.balances]


@pytest.mark.parametrize("seed", range(2))
def test_the_usual_case_books_what_two_operations_book(session: RedisSession, raw: Any, seed: int) -> None:
    chance, last, usual = random.Random(seed), {"x": ("x0", "a"), "y": ("y0", "a")}, 0
    for number in range(1, 60):
        actual = (chance.randrange(7), chance.randrange(7), chance.randrange(2))
        keys, want = chance.choice(["a", "a", "ab", ""]), (chance.randrange(4, 12), chance.randrange(4, 14), 1)
        record = chance.choice([None, ("call", "run", "{}")])
        replies = []
        for twin in "xy":
            hold, billed_on = last[twin]
            new, bill, lines = f"{twin}{number}", lines_of(twin, billed_on), lines_of(twin, keys or billed_on)
            about = None if record is None else (record[0], f"{twin}{record[1]}", record[2])
            if twin == "x":
                settled = session.settle(hold, bill, actual, about)
                reserved = session.reserve(new, 900, lines, want)
            else:
                session._unusual = 0
                call = SettledCall(hold, bill, actual, about)
                settled, reserved = session.settle_and_reserve(call, new, 900, lines, want)
                usual += session._unusual == 0 and bill == lines
            replies.append((plain(settled), plain(reserved), reserved.ok))
            last[twin] = (new, keys or billed_on)
        assert replies[0] == replies[1]
        assert _kept(raw, session, "x") == _kept(raw, session, "y")
        if chance.random() < 0.1:
            for twin in "xy":
                session.extend(lines_of(twin, "a")[0], (5, 5, 0))
    assert usual > 15


def _kept(raw: Any, session: RedisSession, twin: str) -> Any:
    """Everything that the store keeps about one twin, without times."""
    accounts, holds = [], {}
    for key in CAPS:
        account = raw.hgetall(key_of(session, f"a:{twin}{key}"))
        account.pop("updated", None)
        account.pop("scope", None)
        accounts.append(account)
    for name in raw.keys(key_of(session, f"h:{twin}*")):
        hold = name.rpartition(":")[2]
        score = raw.zscore(key_of(session, "holds"), hold)
        holds[hold[1:]] = raw.get(name).replace(f":{twin}", ":"), raw.ttl(name) > 0, score is not None and score > 0
    return accounts, holds, len(session.about("call", f"{twin}run"))


def test_the_oldest_records_go_in_the_usual_case_too(session: RedisSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RECORDS_KEPT", 3)
    line, hold = a_line(), "h0"
    session.reserve(hold, 900, [line], CALL)
    for number in range(1, 8):
        session._unusual = 0
        session.settle_and_reserve(
            SettledCall(hold, [line], CALL, ("call", "run", str(number))), f"h{number}", 900, [line], CALL
        )
        hold = f"h{number}"
    assert [text for _, text in session.about("call", "run")] == ["5", "6", "7"]


def test_an_unusual_case_is_not_tried_again_at_once(session: RedisSession) -> None:
    line = a_line(caps=(100, 100, 2))
    session.reserve("h0", 900, [line], CALL)
    _, refused = session.settle_and_reserve(SettledCall("h0", [line], (101, 0, 1)), "h1", 900, [line], CALL)
    assert not refused.ok
    assert session._unusual > 0


def test_an_index_of_another_type_is_found_before_anything_is_written(session: RedisSession, raw: Any) -> None:
    line = a_line()
    session.reserve("h0", 900, [line], CALL)
    raw.set(key_of(session, "kinds"), "not a set")
    before = session.read()
    with pytest.raises(StoreError, match="not of the right type"):
        session._next_call(SettledCall("h0", [line], CALL, ("call", "run", "{}")), "h1", 900, CALL)
    assert session.read() == before
