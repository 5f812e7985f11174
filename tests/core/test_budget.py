"""What a budget may say, also in a policy; money, periods, scopes and the status of a budget."""

import decimal
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runguard.core.money import (
    DEFAULT_THRESHOLDS,
    UNLIMITED,
    Budget,
    BudgetStatus,
    Per,
    Scope,
    Threshold,
    Window,
    to_count,
    to_nano,
    to_usd,
    usd_text,
)
from runguard.errors import PolicyError
from runguard.policy import Policy
from tests.kit.budgets import ABSURD_USD, NO_USD, SOMEONE, window
from tests.kit.examples import each_row, examples
from tests.kit.optional import present

# ---- what a budget may say ------------------------------------------------------------------------------------------


@each_row("value", [v for v in [*ABSURD_USD, *NO_USD] if v is not None])
def test_a_budget_is_as_strict_about_dollars(value: Any) -> None:
    with pytest.raises(PolicyError, match="usd = "):
        Budget(usd=value)


@each_row("unit", ["tokens", "calls"])
@each_row("value", [0, -5, True, 1.5, "100", float("inf")])
def test_a_budget_is_as_strict_about_counts(unit: str, value: float | str) -> None:
    cap: dict[str, Any] = {unit: value}
    with pytest.raises(PolicyError, match=f"{unit} = "):
        Budget(**cap)


def test_a_budget_without_an_amount_limits_nothing_and_is_refused() -> None:
    with pytest.raises(PolicyError, match="give usd=, tokens= or calls="):
        Budget(per="user")


@each_row(
    ("per", "says"),
    [
        ("users", "did you mean 'user'"),
        ("Run", "did you mean 'run'"),
        ("nonsense", "known: run, session, user"),
        ("", "give one of"),
        (None, "give one of"),
        (5, "give one of"),
        ("label", "label:team"),
        ("label:", "label:team"),
        ("agent:", "nothing after the colon"),
        ("run:abc", "a run has no name"),
        ("session:abc", "a session has no name"),
        ("run+run", "'run' twice"),
        ("agent+agent:x*", "'agent' twice"),
        ("run+", "no scope ''"),
        ("+run", "no scope ''"),
        ("run agent", "no scope 'run agent'"),
    ],
)
def test_a_scope_that_does_not_exist_is_refused_with_a_hint(per: Any, says: str) -> None:
    with pytest.raises(PolicyError) as error:
        Budget(usd=1, per=per)
    assert says in str(error.value)


@each_row(
    "per",
    [
        "run",
        "session",
        "user",
        "app",
        "agent",
        "model",
        "tool",
        "label:team",
        "agent:research*",
        "run+agent",
        "user+model",
        "app+label:team",
    ],
)
def test_every_scope_there_is_can_have_a_budget(per: str) -> None:
    assert Per.parse(Budget(usd=1, per=per).per).key(SOMEONE) is not None or per == "agent:research*"


@each_row(
    ("options", "says"),
    [
        ({"window": "7h"}, "window = '7h': must divide a day evenly"),
        ({"window": "25h"}, "window = '25h': must divide a day evenly"),
        ({"window": "7m"}, "window = '7m': must divide"),
        ({"window": "0d"}, "window = '0d': not a window"),
        ({"window": "-1d"}, "not a window"),
        ({"window": "1y"}, "not a window"),
        ({"window": "d"}, "not a window"),
        ({"window": "1D"}, "not a window"),
        ({"window": "months"}, "not a window"),
        ({"window": ""}, "not a window"),
        ({"window": "9999d"}, "longer than ten years"),
        ({"window": "600w"}, "longer than ten years"),
        ({"window": 3600}, "window = 3600: give a text"),
        ({"window": True}, "give a text"),
        ({"tz": "Europe/Berlin"}, "tz = 'Europe/Berlin' without a window"),
        ({"window": "1h", "tz": "UTC"}, "tz = 'UTC' does nothing for window = '1h'"),
        ({"window": "24h", "tz": "Europe/Berlin"}, "does nothing for window = '24h'"),
        ({"window": "1d", "tz": "Mars/Olympus"}, "tz = 'Mars/Olympus': no such time zone"),
        ({"window": "1d", "tz": ""}, "no such time zone"),
        ({"window": "1d", "tz": "../../etc/passwd"}, "no such time zone"),
        ({"window": "1d", "tz": 1}, "tz = 1: give the name"),
    ],
)
def test_windows_that_contradict_themselves_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PolicyError) as error:
        Budget(usd=1, per="user", **options)
    assert says in str(error.value)


@pytest.mark.parametrize("window", ["1d", "1w", "month"])
def test_a_run_has_no_days(window: str) -> None:
    with pytest.raises(PolicyError, match="a run ends before its window does"):
        Budget(usd=1, per="run", window=window)
    assert Budget(usd=1, per="run", window="1h").window == "1h"  # a rate


@each_row(
    ("thresholds", "says"),
    [
        (0.8, "0.8"),
        (None, "None"),
        ([1.5], "1.5"),
        ([0], "not 0"),
        ([-0.1], "-0.1"),
        ([True], "not True"),
        ([float("nan")], "nan"),
        (["80%"], "80%"),
        ([{"percent": 0.8, "action": "shout"}], "shout"),
        ([{"percent": 0.8, "at": 1}], "Threshold.at: no such setting"),
        ([None], "None"),
    ],
)
def test_thresholds_that_cannot_be_meant_are_refused_by_name(thresholds: Any, says: str) -> None:
    with pytest.raises(PolicyError, match="thresholds") as error:
        Budget(usd=1, thresholds=thresholds)
    assert says in str(error.value)


def test_thresholds_may_be_written_as_fractions_and_tables() -> None:
    thresholds: list[Any] = [0.5, {"percent": 0.9, "action": "nudge"}, Threshold(1, action="stop")]
    budget = Budget(usd=1, thresholds=thresholds)
    assert budget.thresholds == (Threshold(0.5), Threshold(0.9, action="nudge"), Threshold(1, action="stop"))
    assert Budget(usd=1).thresholds == DEFAULT_THRESHOLDS
    assert Budget(usd=1, thresholds=[]).thresholds == ()


@each_row("percent", [0, -0.1, 1.01, True, float("nan"), float("inf"), "0.5", None])
def test_a_threshold_alone_says_what_is_wrong_with_it(percent: Any) -> None:
    with pytest.raises(ValueError, match="percent must be a fraction") as error:
        Threshold(percent)
    assert repr(percent) in str(error.value)


@each_row(
    "options",
    [{"callback": "print"}, {"recurring": "false"}, {"recurring": 1}, {"action": "block"}, {"action": None}],
)
def test_the_other_parts_of_a_threshold_are_as_strict(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Threshold(0.5, **options)


def test_limits_hold_in_the_units_that_were_given() -> None:
    assert Budget(usd="0.5", calls=3).limits(SOMEONE) == (500_000_000, UNLIMITED, 3)
    assert Budget(tokens=1_000).limits(SOMEONE) == (UNLIMITED, 1_000, UNLIMITED)


def test_an_amount_may_depend_on_the_scope() -> None:
    budget = Budget(
        usd=lambda scope: 5 if scope.user == "ann" else None, tokens=lambda scope: len(scope.labels or {}), per="user"
    )
    assert budget.limits(SOMEONE) == (5 * 10**9, 1, UNLIMITED)
    assert budget.limits(Scope("user", "k", user="bob", labels={"a": "b", "c": "d"})) == (UNLIMITED, 2, UNLIMITED)


@each_row(
    ("given_value", "cap"),
    [(0, 0), (0.0, 0), (-0.0, 0), ("0", 0), (Decimal(0), 0), ("1e-999999", 0), ("0.5", 500_000_000)],
)
def test_a_function_may_give_0(given_value: Decimal | float | str, cap: int) -> None:
    assert Budget(usd=lambda _: given_value).limits(SOMEONE) == (cap, UNLIMITED, UNLIMITED)


def test_a_function_may_give_0_tokens_and_0_calls() -> None:
    assert Budget(tokens=lambda _: 0, calls=lambda _: 0.0).limits(SOMEONE) == (UNLIMITED, 0, 0)


@each_row("amount", [{"usd": 0}, {"usd": "0"}, {"usd": 0.0}, {"tokens": 0}, {"calls": 0}])
def test_a_fixed_amount_of_0_is_rejected(amount: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Budget(**amount)


class Hostile:
    """Its text must not be asked for."""

    def __repr__(self) -> str:
        raise AssertionError("code of a foreign object ran")

    __str__ = __repr__


def test_what_a_function_gave_is_shown_without_running_its_code() -> None:
    with pytest.raises(PolicyError, match="gave a Hostile for"):
        Budget(usd=lambda _: Hostile()).limits(SOMEONE)


@pytest.mark.parametrize("limit", [Decimal(0), 0])
def test_the_utilization_of_a_limit_of_0(limit: Decimal | int) -> None:
    def status(spent: Any) -> BudgetStatus:
        return BudgetStatus("user:a/b", "usd", spent, limit, limit, limit, None, None, False)

    assert (status(limit).utilization, status(limit).remaining) == (0.0, 0)
    assert status(limit + 3).utilization == 1.0


@each_row("given_value", [-1, True, "x", float("nan")])
def test_a_function_that_gives_nonsense_is_named_with_what_it_gave(given_value: float | str) -> None:
    with pytest.raises(PolicyError) as error:
        Budget(usd=lambda _: given_value, per="user").limits(Scope("user", "user:app/ann"))
    assert f"gave {given_value!r} for user:app/ann" in str(error.value)


# ---- in a policy ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to work in, with nobody else's policy file above it."""
    for name in ("RUNGUARD_POLICY", "RUNGUARD_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRONG = [
    ({"max_usd": -1}, ["max_usd = -1", "greater than 0"]),
    ({"max_usd": 0}, ["max_usd = 0", "greater than 0"]),
    ({"max_usd": True}, ["max_usd = True", "dollars"]),
    ({"max_usd": "a lot"}, ["max_usd = 'a lot'"]),
    ({"max_tokens": 0}, ["max_tokens = 0"]),
    ({"max_tokens": -5}, ["max_tokens = -5"]),
    ({"budgets": [{"usd": -1}]}, ["budgets.0", "usd = -1"]),
    ({"budgets": [{"usd": 1}, {"per": "user"}]}, ["budgets.1", "give usd=, tokens= or calls="]),
    ({"budgets": [{"usd": 1, "per": "usr"}]}, ["budgets.0", "did you mean 'user'"]),
    ({"budgets": [{"usd": 1, "windows": "1d"}]}, ["budgets.0", "windows", "did you mean 'window'"]),
    ({"budgets": [{"usd": 1, "per": "user", "window": "7h"}]}, ["budgets.0", "'7h'"]),
    ({"budgets": [{"usd": 1, "per": "user", "thresholds": [1.2]}]}, ["budgets.0", "thresholds", "1.2"]),
    ({"budgets": [{"usd": 1, "per": "user", "thresholds": 0.8}]}, ["budgets.0", "thresholds", "0.8"]),
    ({"budgets": [5]}, ["budgets.0", "Budget(...)"]),
    ({"budgets": {"usd": 1}}, ["budgets", "list"]),
    ({"prices": {"m": {"input": -1, "output": 1}}}, ["prices.m.input", "-1"]),
    ({"prices": {"m": {"input": 1}}}, ["prices.m.output"]),
    ({"prices": {"m": 3}}, ["prices.m = 3"]),
    ({"on_unpriced": "ignore"}, ["on_unpriced = 'ignore'", "refuse"]),
    ({"on_unpriced": {"input": 1}}, ["on_unpriced.output"]),
    ({"on_unpriced": {"input": -1, "output": 1}}, ["on_unpriced.input", "-1"]),
    ({"min_output_tokens": 0}, ["min_output_tokens = 0"]),
    ({"max_wait_seconds": -1}, ["max_wait_seconds = -1"]),
]


@pytest.mark.parametrize(("values", "says"), WRONG, ids=[repr(values) for values, _ in WRONG])
def test_a_policy_names_the_path_the_value_and_what_would_be_right(
    here: Path, values: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(PolicyError) as error:
        Policy.build(**values)
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_usd = -2.5", ["runguard.toml", "max_usd = -2.5"]),
        ("max_usd = nan", ["max_usd = nan", "finite"]),
        ("max_usd = inf", ["max_usd = inf", "finite"]),
        ("[[budgets]]\nusd = 1\nper = 'user'\nwindow = '0d'", ["budgets.0", "'0d'"]),
        ("[[budgets]]\nusd = 1\n\n[[budgets]]\nper = 'app'\ntz = 'UTC'\nusd = 1", ["budgets.1", "without a window"]),
        ("[[budgets]]\nusd = true", ["budgets.0", "usd = True"]),
        ("[prices.'my-model']\ninput = 'free'\noutput = 0", ["prices.my-model.input", "'free'"]),
        ("on_unpriced = 'guess'", ["on_unpriced = 'guess'"]),
    ],
)
def test_a_policy_file_is_held_to_the_same(here: Path, text: str, says: list[str]) -> None:
    (here / "runguard.toml").write_text(text)
    with pytest.raises(PolicyError) as error:
        Policy.build()
    for part in says:
        assert part in str(error.value)


def test_budgets_from_a_file_are_those_from_code(here: Path) -> None:
    (here / "runguard.toml").write_text(
        """
        max_usd = "0.30"
        [[budgets]]
        usd = 5
        per = "user"
        window = "1d"
        tz = "Europe/Berlin"
        thresholds = [0.5, {percent = 0.9, action = "stop"}]
        """
    )
    policy = Policy.build()
    written = Budget(
        usd=5, per="user", window="1d", tz="Europe/Berlin", thresholds=[Threshold(0.5), Threshold(0.9, action="stop")]
    )
    assert policy.budgets == (written,)
    assert policy.max_usd == Decimal("0.30")
    assert policy.digest == Policy.build(budgets=[written], max_usd="0.30").digest
    assert policy.digest != Policy.build(budgets=[Budget(usd=6, per="user")]).digest


# ---- Money, periods, scopes and the status of a budget --------------------------------------------------------------


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
    name, _, ends = w.bounds(at)
    assert at < ends
    following, _, later = w.bounds(ends)  # no gap: its end is in the next one
    assert following != name
    assert later > ends
    assert w.bounds(ends - 1)[0] == name  # no overlap: until then it is the same one
    assert w.bounds(at) == (name, w.bounds(ends - 1)[1], ends)
    assert w.bounds(at)[1] <= at
    assert w.bounds(ends)[1] == ends


@given(text=st.sampled_from(WINDOWS), tz=st.sampled_from(ZONES), moments=st.lists(times, min_size=2, max_size=30))
@examples(200)
def test_periods_follow_each_other_in_time_and_two_moments_share_one_or_none(
    text: str, tz: str, moments: list[int]
) -> None:
    w = window(text, tz)
    found = [(at, *w.bounds(at)[::2]) for at in sorted(moments)]
    for (_, name, ends), (at, later_name, later_ends) in pairwise(found):
        assert (at < ends) == (name == later_name)
        assert later_ends >= ends


def test_days_of_23_and_25_hours_are_one_day() -> None:
    berlin = Window.parse("1d", "Europe/Berlin")
    for day, hours in ((29, 23), (30, 24)):  # summer begins on 29 March 2026
        begin = moment(2026, 3, day, tz="Europe/Berlin")
        assert berlin.bounds(begin)[::2] == (f"2026-03-{day}", begin + hours * HOUR)
    begin = moment(2026, 10, 25, tz="Europe/Berlin")  # and ends on 25 October
    assert berlin.bounds(begin)[::2] == ("2026-10-25", begin + 25 * HOUR)
    assert berlin.bounds(begin + 25 * HOUR - 1)[0] == "2026-10-25"
    assert berlin.bounds(begin - 1)[0] == "2026-10-24"


def test_a_day_begins_by_the_calendar_of_its_zone() -> None:
    late = moment(2026, 7, 1, 23, 30)
    assert Window.parse("1d").bounds(late)[::2] == ("2026-07-01", moment(2026, 7, 2))
    assert Window.parse("1d", "Asia/Kathmandu").bounds(late)[::2] == (
        "2026-07-02",
        moment(2026, 7, 3, tz="Asia/Kathmandu"),
    )


def test_weeks_begin_on_mondays_and_months_on_the_first() -> None:
    friday = moment(2026, 5, 15, 12)
    assert Window.parse("1w").bounds(friday)[::2] == ("2026-05-11", moment(2026, 5, 18))
    assert Window.parse("month").bounds(friday)[::2] == ("2026-05", moment(2026, 6, 1))
    assert Window.parse("month").bounds(moment(2026, 12, 31))[::2] == ("2026-12", moment(2027, 1, 1))
    assert Window.parse("month").bounds(moment(2028, 2, 29))[::2] == ("2028-02", moment(2028, 3, 1))
    assert Window.parse("month", "Europe/Berlin").bounds(moment(2026, 3, 31, 23))[0] == "2026-04"


def test_hours_begin_at_the_same_times_every_day() -> None:
    at = moment(2026, 5, 15, 13, 20)
    assert Window.parse("6h").bounds(at)[2] == moment(2026, 5, 15, 18)
    assert Window.parse("1h").bounds(at)[2] == moment(2026, 5, 15, 14)
    assert Window.parse("1m").bounds(at)[2] == at + 60
    assert Window.parse("24h").bounds(at)[2] == moment(2026, 5, 16)


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
