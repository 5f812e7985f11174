"""What a budget may say, also in a policy."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from runguard.core.money import DEFAULT_THRESHOLDS, UNLIMITED, Budget, BudgetStatus, Per, Scope, Threshold
from runguard.errors import PolicyError
from runguard.policy import Policy
from tests.kit.budgets import ABSURD_USD, NO_USD, SOMEONE
from tests.kit.examples import each_row

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
