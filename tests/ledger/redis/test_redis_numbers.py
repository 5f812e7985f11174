"""Redis: large numbers, and what stays stored."""

import time
from typing import Any

import pytest
import redis

from runguard.core.money import UNLIMITED
from runguard.ledger.ledger import MOST, StoreError
from runguard.ledger.redis import MOST_EXACT as EXACT
from runguard.ledger.redis import RedisSession, script_of
from tests.kit.redis_stores import CALL, a_line, key_of

NO_CAP = (UNLIMITED, UNLIMITED, UNLIMITED)


NO_RECORD = ["", "", "", ""]  # kind, ref, text and most of the record that a settlement appends
EMPTY = ("schema", "t:identity", "v:identity")  # the keys of a store in which nothing is


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_amounts_are_exact_up_to_2_to_the_53(session: RedisSession) -> None:
    line = a_line(caps=(EXACT, EXACT, EXACT))
    assert session.reserve("a", 60, [line], (EXACT - 1, 0, 0)).ok
    assert not session.reserve("b", 60, [line], (2, 0, 0)).ok
    held = session.reserve("c", 60, [line], (1, EXACT, 0)).balances[0].held
    assert held == (EXACT, EXACT, 0)
    assert session.settle("a", [line], (EXACT - 2, 0, 0)).balances[0].spent == (EXACT - 2, 0, 0)
    assert session.read()[0].caps == (EXACT,) * 3
    with pytest.raises(StoreError, match=r"2\^53"):
        session.extend(line, (1, 0, 0))


def test_beyond_that_everything_is_refused_before_it_is_written(session: RedisSession) -> None:
    much, wide = (EXACT + 1, 0, 0), a_line(caps=(EXACT + 1, UNLIMITED, UNLIMITED))
    assert much[0] < MOST
    for call in (
        lambda: session.reserve("h", 60, [a_line(caps=NO_CAP)], much),
        lambda: session.settle("h", [a_line()], much),
        lambda: session.extend(a_line(), much),
        lambda: session.reserve("h", 60, [a_line(), wide], CALL),
        lambda: session.settle("h", [wide], CALL),
    ):
        with pytest.raises(StoreError, match=r"9,007,199\.25"):
            call()
    assert session.read() == []


BAD = [
    "0x10 0 0",
    "1e3 0 0",
    "-5 0 0",
    "-0 0 0",
    "00012 0 0",
    "0 00 0",
    "nan 0 0",
    "inf 0 0",
    "1.5 0 0",
    "1 2",
    "1 2 3 4",
    "",
    " 1 2 3",
    "9007199254740992 0 0",
    "1 2 3\n",
]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("script", ["reserve", "settle", "extend"])
def test_a_script_takes_whole_numbers_and_nothing_else(session: RedisSession, raw: Any, script: str, bad: str) -> None:
    session.settle("before", [a_line()], CALL)
    before = sorted(raw.keys(key_of(session, "*")))
    line = ["user:ann", "user:ann", "- - 1000 - - "]
    scripts = {"reserve": ["h", bad, "60", "1", *line], "settle": ["h", bad, *NO_RECORD, *line], "extend": [bad, *line]}
    args = scripts[script]
    with pytest.raises(redis.ResponseError, match="RUNGUARD amount"):
        raw.eval(script_of(script)[1], 1, key_of(session, ""), *args, raw.get(key_of(session, "t:identity")), "1")
    assert sorted(raw.keys(key_of(session, "*"))) == before
    assert session.read()[0].spent == CALL


@pytest.mark.parametrize(
    "caps", ["0x10 - -", "1e3 - -", "-5 - -", "00012 - -", "nan - -", "-- - -", "9007199254740992 - -", "- -"]
)
@pytest.mark.parametrize("script", ["reserve", "settle", "extend"])
def test_a_script_takes_no_other_caps_either(session: RedisSession, raw: Any, script: str, caps: str) -> None:
    line = ["user:ann", "user:ann", f"- - {caps} "]
    scripts = {
        "reserve": ["h", "1 1 1", "60", "1", *line],
        "settle": ["h", "1 1 1", *NO_RECORD, *line],
        "extend": ["1 1 1", *line],
    }
    args = scripts[script]
    with pytest.raises(redis.ResponseError, match="RUNGUARD"):
        raw.eval(script_of(script)[1], 1, key_of(session, ""), *args, raw.get(key_of(session, "t:identity")), "1")
    assert sorted(raw.keys(key_of(session, "*"))) == [key_of(session, key) for key in EMPTY]


@pytest.mark.parametrize(("begins", "ends"), [("nan", "-"), ("-", "nan"), ("x", "-"), ("-", "")])
def test_a_script_takes_no_time_that_is_none(session: RedisSession, raw: Any, begins: str, ends: str) -> None:
    identity = raw.get(key_of(session, "t:identity"))
    with pytest.raises(redis.ResponseError, match="RUNGUARD"):
        raw.eval(
            script_of("reserve")[1],
            1,
            key_of(session, ""),
            "h",
            "1 1 1",
            "60",
            "0",
            "k",
            "k",
            f"{begins} {ends} 1 1 1 ",
            identity,
            "1",
        )
    with pytest.raises(redis.ResponseError, match="RUNGUARD"):
        raw.eval(
            script_of("reserve")[1],
            1,
            key_of(session, ""),
            "h",
            "1 1 1",
            "nan",
            "0",
            "k",
            "k",
            "- - 1 1 1 ",
            identity,
            "1",
        )


# ---- what it keeps --------------------------------------------------------------------------------------------------


def test_finished_holds_end_by_themselves_and_open_ones_do_not(session: RedisSession, raw: Any) -> None:
    for hold in ("open", "settled", "released"):
        session.reserve(hold, 60, [a_line(caps=NO_CAP)], CALL)
    session.reserve("expired", 0.01, [a_line(caps=NO_CAP)], CALL)
    session.settle("settled", [a_line(caps=NO_CAP)], CALL)
    session.release("released")
    time.sleep(0.02)
    session.read()
    lives = {hold: raw.ttl(key_of(session, f"h:{hold}")) for hold in ("open", "settled", "released", "expired")}
    assert lives.pop("open") == -1
    assert all(86_000 < seconds <= 86_400 for seconds in lives.values())


def test_periods_long_past_are_dropped_when_a_new_one_begins(session: RedisSession, raw: Any) -> None:
    now = session.now()
    old, recent = a_line("old", ends=now - 41 * 86_400), a_line("recent", ends=now - 39 * 86_400)
    session.settle("a", [old, recent], CALL)
    session.first("old", "m", 0.5, CALL)
    session.settle("b", [a_line("x", ends=4e9)], CALL)
    assert {balance.key for balance in session.read()} == {"old", "recent", "x"}  # it was written to just now
    raw.hset(key_of(session, "a:old"), "updated", f"{now - 41 * 86_400:.6f}")
    session.settle("c", [a_line("y", ends=4e9)], CALL)
    assert {balance.key for balance in session.read()} == {"recent", "x", "y"}
    assert not raw.exists(key_of(session, "m:old"), key_of(session, "s:old"))


def test_a_purge_of_many_leaves_no_trace_but_the_schema_and_the_id(session: RedisSession, raw: Any) -> None:
    for n in range(1_203):
        session.settle(f"h{n}", [a_line(f"run:{n}")], CALL)
        session.append("k", f"{n}", "t")
    session.first("run:7", "m", 0.5, CALL)
    session.beat("run:7", "w", "t")
    session.claim("c", 0.001)
    session.reserve("open", 60, [a_line("run:kept")], CALL)
    time.sleep(0.01)
    session.purge(0)
    assert [balance.key for balance in session.read()] == ["run:kept"]
    session.settle("open", [], CALL)
    time.sleep(0.001)
    session.purge(0)
    assert sorted(raw.keys(key_of(session, "*"))) == [key_of(session, key) for key in EMPTY]


def test_records_are_capped(session: RedisSession, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runguard.ledger.redis.RECORDS_KEPT", 100)
    for n in range(500):
        session.append("k", str(n), "t")
    assert 100 <= raw.xlen(key_of(session, "r:k")) <= 250
    assert [ref for _, ref, _ in session.tail("k", 2)] == ["498", "499"]
