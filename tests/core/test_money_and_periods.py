"""Money, periods, scopes and the status of a budget."""

import decimal
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runguard.core.money import (
    Budget,
    BudgetStatus,
    Per,
    Scope,
    Window,
    to_count,
    to_nano,
    to_usd,
    usd_text,
)
from runguard.errors import PolicyError
from tests.kit.budgets import ABSURD_USD, NO_USD, SOMEONE, window
from tests.kit.examples import each_row, examples
from tests.kit.optional import present

HOUR, DAY = 3_600, 86_400


def moment(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0, tz: str = "UTC") -> float:
    return datetime(year, month, day, hour, minute, second, tzinfo=ZoneInfo(tz)).timestamp()


# ---- money ----------------------------------------------------------------------------------------------------------


@each_row(
    ("written", "nano"),
    [
        (1, 1_000_000_000),
        (0.1, 100_000_000),
        ("2.50", 2_500_000_000),
        (Decimal("0.000000001"), 1),
        (1_000_000_000, 10**18),
        (0.1 + 0.2, 300_000_000),  # what the float has beyond a nano is not meant
        ("1e-3", 1_000_000),
    ],
)
def test_dollars_are_taken_as_they_are_written(written: Decimal | float | str, nano: int) -> None:
    assert to_nano(written) == nano


def test_a_cap_is_never_wider_than_it_was_written() -> None:
    assert to_nano("0.0000000019") == 1
    # More digits than Decimal keeps in a product: rounded there, this would be 0.3.
    assert to_nano("0.2" + "9" * 40) == 299_999_999


@given(st.integers(-(10**18), 10**18))
def test_nano_to_dollars_and_back_is_exact(nano: int) -> None:
    dollars = to_usd(nano)
    assert dollars * 10**9 == nano
    if nano > 0:
        assert to_nano(dollars) == nano
        assert Decimal(usd_text(nano).removeprefix("$")) == dollars


def test_the_precision_that_a_host_program_sets_changes_no_amount() -> None:
    with decimal.localcontext() as context:
        context.prec = 2
        assert to_nano("1.99") == 1_990_000_000
        assert str(to_usd(1_234_567_890)) == "1.23456789"
        context.traps[decimal.Inexact] = True
        assert to_nano(Decimal("123.456")) == 123_456_000_000
        assert str(to_usd(123_456_000_001)) == "123.456000001"


@each_row(
    ("nano", "text", "dollars"),
    [
        (0, "$0.00", "0"),
        (100_000_000, "$0.10", "0.1"),
        (1_000_000_000, "$1.00", "1"),
        (100_000_000_000, "$100.00", "100"),
        (1, "$0.000000001", "0.000000001"),
        (1_234_500_000, "$1.2345", "1.2345"),
    ],
)
def test_dollars_are_shown_in_full_and_never_in_powers_of_ten(nano: int, text: str, dollars: str) -> None:
    assert usd_text(nano) == text
    assert f"{to_usd(nano):f}" == dollars
    assert "E" not in str(to_usd(nano)) or nano == 1  # str() of a Decimal below a millionth is its own affair


@each_row("value", [*ABSURD_USD, *NO_USD])
def test_an_amount_of_dollars_that_cannot_be_meant_is_refused_by_name(value: Any) -> None:
    with pytest.raises(PolicyError) as error:
        to_nano(value, "max_usd")
    shown = repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"
    assert f"max_usd = {shown}: " in str(error.value)


@each_row("value", [0, -1, 10**15 + 1, True, False, 1.5, float("nan"), float("inf"), "5", None, Decimal(5)])
def test_a_count_that_cannot_be_meant_is_refused_by_name(value: Decimal | float | str | None) -> None:
    with pytest.raises(PolicyError) as error:
        to_count(value, "tokens")
    assert f"tokens = {value!r}: " in str(error.value)


def test_a_whole_number_written_as_a_float_is_a_count() -> None:
    assert to_count(1e6, "tokens") == 1_000_000
    assert type(to_count(1e6, "tokens")) is int


@each_row("unit", ["usd", "tokens", "calls"])
@each_row("value", [10**5_000, -(10**5_000)])
def test_a_number_too_long_to_be_written_out_is_still_a_policy_error(unit: str, value: int) -> None:
    cap: dict[str, Any] = {unit: value}
    with pytest.raises(PolicyError, match=unit):
        Budget(**cap)


# ---- periods --------------------------------------------------------------------------------------------------------


ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Sao_Paulo",  # midnight did not exist on days when summer began
    "America/Havana",  # midnight comes twice on days when it ends
    "Africa/Cairo",
    "Asia/Beirut",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",  # half an hour of summer time
    "Pacific/Apia",  # has no 30 December 2011
    "America/St_Johns",  # until 2011 the clock went back over midnight
]


WINDOWS = ["30s", "1m", "15m", "1h", "6h", "24h", "1d", "2d", "1w", "2w", "month"]


times = st.integers(int(moment(2005, 1, 1)), int(moment(2037, 1, 1)))


@given(text=st.sampled_from(WINDOWS), tz=st.sampled_from(ZONES), at=times)
@example(text="1d", tz="America/St_Johns", at=1_257_043_500)
@example(text="1d", tz="Pacific/Apia", at=1_325_239_200)
@examples(400)
def test_a_period_contains_its_moment_and_ends_where_the_next_begins(text: str, tz: str, at: int) -> None:
    w = window(text, tz)
    name, ends = w.period(at)
    assert at < ends
    following, later = w.period(ends)  # no gap: its end is in the next one
    assert following != name
    assert later > ends
    assert w.period(ends - 1)[0] == name  # no overlap: until then it is the same one
    assert w.bounds(at) == (name, w.bounds(ends - 1)[1], ends)
    assert w.bounds(at)[1] <= at
    assert w.bounds(ends)[1] == ends


@given(text=st.sampled_from(WINDOWS), tz=st.sampled_from(ZONES), moments=st.lists(times, min_size=2, max_size=30))
@examples(200)
def test_periods_follow_each_other_in_time_and_two_moments_share_one_or_none(
    text: str, tz: str, moments: list[int]
) -> None:
    w = window(text, tz)
    found = [(at, *w.period(at)) for at in sorted(moments)]
    for (_, name, ends), (at, later_name, later_ends) in pairwise(found):
        assert (at < ends) == (name == later_name)
        assert later_ends >= ends


def test_days_of_23_and_25_hours_are_one_day() -> None:
    berlin = Window.parse("1d", "Europe/Berlin")
    for day, hours in ((29, 23), (30, 24)):  # summer begins on 29 March 2026
        begin = moment(2026, 3, day, tz="Europe/Berlin")
        assert berlin.period(begin) == (f"2026-03-{day}", begin + hours * HOUR)
    begin = moment(2026, 10, 25, tz="Europe/Berlin")  # and ends on 25 October
    assert berlin.period(begin) == ("2026-10-25", begin + 25 * HOUR)
    assert berlin.period(begin + 25 * HOUR - 1)[0] == "2026-10-25"
    assert berlin.period(begin - 1)[0] == "2026-10-24"


def test_a_day_begins_by_the_calendar_of_its_zone() -> None:
    late = moment(2026, 7, 1, 23, 30)
    assert Window.parse("1d").period(late) == ("2026-07-01", moment(2026, 7, 2))
    assert Window.parse("1d", "Asia/Kathmandu").period(late) == ("2026-07-02", moment(2026, 7, 3, tz="Asia/Kathmandu"))


def test_weeks_begin_on_mondays_and_months_on_the_first() -> None:
    friday = moment(2026, 5, 15, 12)
    assert Window.parse("1w").period(friday) == ("2026-05-11", moment(2026, 5, 18))
    assert Window.parse("month").period(friday) == ("2026-05", moment(2026, 6, 1))
    assert Window.parse("month").period(moment(2026, 12, 31)) == ("2026-12", moment(2027, 1, 1))
    assert Window.parse("month").period(moment(2028, 2, 29)) == ("2028-02", moment(2028, 3, 1))
    assert Window.parse("month", "Europe/Berlin").period(moment(2026, 3, 31, 23))[0] == "2026-04"


def test_hours_begin_at_the_same_times_every_day() -> None:
    at = moment(2026, 5, 15, 13, 20)
    assert Window.parse("6h").period(at)[1] == moment(2026, 5, 15, 18)
    assert Window.parse("1h").period(at)[1] == moment(2026, 5, 15, 14)
    assert Window.parse("1m").period(at)[1] == at + 60
    assert Window.parse("24h").period(at)[1] == moment(2026, 5, 16)


# ---- whom it counts -------------------------------------------------------------------------------------------------


names = st.text(alphabet="ab/%+=:@#25F~ ", max_size=6)


scopes = st.builds(
    Scope,
    kind=st.just(""),
    key=st.just(""),
    app=names,
    user=names,
    session=names,
    run=names,
    agent=names,
    model=names,
    tool=names.map(lambda text: text or "t"),
    labels=st.fixed_dictionaries({"team": names, "a+b": names}),
)


PARTS: dict[str, Callable[[Scope], tuple[Any, ...]]] = {
    "run": lambda s: (s.run,),
    "session": lambda s: (s.app, s.user, s.session),
    "user": lambda s: (s.app, s.user),
    "app": lambda s: (s.app,),
    "agent": lambda s: (s.app, s.agent),
    "model": lambda s: (s.model,),
    "tool": lambda s: (s.app, s.tool),
    "label:team": lambda s: (present(s.labels)["team"],),
}


@given(
    kinds=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3, unique=True),
    one=scopes,
    other=scopes,
)
@example(
    kinds=["session"],
    one=Scope("", "", app="a", user="b/c", session="d"),
    other=Scope("", "", app="a", user="b", session="c/d"),
)
@example(kinds=["user"], one=Scope("", "", app="a", user="b%2Fc"), other=Scope("", "", app="a", user="b/c"))
@example(
    kinds=["user", "model"],
    one=Scope("", "", app="a", user="x+y", model="z"),
    other=Scope("", "", app="a", user="x", model="y+z"),
)
@examples(500)
def test_two_scopes_have_one_key_only_if_they_are_one(kinds: list[str], one: Scope, other: Scope) -> None:
    per = Per.parse("+".join(kinds))
    same = all(PARTS[kind](one) == PARTS[kind](other) for kind in kinds)
    assert (per.key(one) == per.key(other)) == same


def test_keys_of_different_kinds_never_meet() -> None:
    everyone = Scope("", "", app="x", user="x", session="x", run="x", agent="x", model="x", tool="x", labels={"x": "x"})
    kinds = [
        "run",
        "session",
        "user",
        "app",
        "agent",
        "model",
        "tool",
        "label:x",
        "run+agent",
        "user+agent",
        "user+tool",
    ]
    assert len({Per.parse(kind).key(everyone) for kind in kinds}) == len(kinds)


def test_a_plain_name_stays_readable() -> None:
    mail = Scope("", "", app="shop", user="ann+test@example.com", session="s-1")
    assert Per.parse("user").key(mail) == "user:shop/ann+test@example.com"
    assert Per.parse("session").key(mail) == "session:shop/ann+test@example.com/s-1"
    assert Per.parse("run+agent").key(Scope("", "", app="shop", run="r1", agent="cook")) == "run+agent:r1+shop/cook"
    assert Per.parse("label:team").key(SOMEONE) == "label:team=blue"


@each_row(
    ("per", "matches"),
    [
        ("agent:wr*", True),
        ("agent:writer", True),
        ("agent:Writer", False),
        ("agent:research*", False),
        ("user:ann", True),
        ("user:bob", False),
        ("app:a??", True),
        ("tool:s[ea]*", True),
        ("model:gemini-*", True),
        ("model:gpt*", False),
        ("label:team", True),
        ("label:other", False),
        ("run+agent:wr*", True),
        ("user:bob+agent:wr*", False),
    ],
)
def test_a_pattern_chooses_by_name(per: str, matches: bool) -> None:
    assert (Per.parse(per).key(SOMEONE) is not None) == matches


def test_a_call_outside_of_any_tool_is_on_no_tools_account() -> None:
    assert Per.parse("tool").key(Scope("", "", app="a", agent="b")) is None


@each_row(
    ("per", "stops"),
    [
        ("run", True),
        ("user", True),
        ("label:team", True),
        ("app+label:team", True),
        ("agent", False),
        ("run+agent", False),
        ("model", False),
    ],
)
def test_what_everybody_shares_stops_the_run_and_the_rest_only_whom_it_is_about(per: str, stops: bool) -> None:
    assert Per.parse(per).stops_run is stops


# ---- how it stands --------------------------------------------------------------------------------------------------


def test_a_status_tells_what_is_left_and_how_much_is_used() -> None:
    status = BudgetStatus(
        "user:a/u", "usd", Decimal("0.3"), Decimal("0.1"), Decimal("0.5"), Decimal(0), "1d", 5.0, False
    )
    assert (status.remaining, status.utilization) == (Decimal("0.1"), 0.6)
    over = BudgetStatus("user:a/u", "calls", 12, 1, 10, 2, None, None, True)
    assert (over.remaining, over.utilization) == (0, 1.2)
