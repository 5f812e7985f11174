"""Limits on recordings whose answers are known."""

from pathlib import Path
from typing import Any

import pytest

from runguard.calibrate import Limit, Proposal, calibrate
from runguard.calibrate.proposal import rounded_up
from runguard.policy import Policy
from tests.kit.examples import each_row
from tests.kit.recordings import sized, working, write


def limits(made: Proposal) -> dict[str, Limit]:
    return {limit.setting: limit for limit in made.limits}


def hundred(**facts: Any) -> list[dict[str, Any]]:
    """A prompt of 100 to 10,000 tokens, one to a hundred model calls."""
    return [sized(f"run-{n}", prompt=100 * n, calls=1, **facts) for n in range(1, 101)]


def test_a_limit_is_two_and_a_half_times_the_95th_percentile(tmp_path: Path) -> None:
    made = calibrate(write(tmp_path / "runs.jsonl", *hundred()))
    found = limits(made)
    tokens = found["max_tokens"]
    assert tokens.quantile is not None
    assert (tokens.quantile.value, tokens.quantile.runs) == (9_510, 100)
    assert (tokens.quantile.low, tokens.quantile.high) == (9_010, 10_010)  # the 90th and the 100th of a hundred
    assert tokens.value == 23_800  # 23,775, three digits, never down
    usd = found["max_usd"]
    assert usd.quantile is not None
    assert usd.quantile.value == pytest.approx(9_500 * 2.5e-6 + 10 * 10e-6)  # gpt-4o
    assert usd.value == pytest.approx(2.5 * usd.quantile.value, rel=0.01)
    assert usd.value is not None
    assert usd.value >= 2.5 * usd.quantile.value
    assert (found["max_model_calls"].value, found["max_tool_calls"].value) == (3, 3)
    assert found["max_seconds"].value == 25  # each took ten seconds
    assert made.changes["max_tokens"] == 23_800


def test_too_few_runs_are_refused_with_their_number(tmp_path: Path) -> None:
    made = calibrate(write(tmp_path / "runs.jsonl", *hundred()[:71]))
    assert made.changes == {}
    for limit in made.limits:
        assert limit.value is None
        assert limit.why_not.startswith(
            "71 successful recordings, 72 are needed: with fewer, even the largest lies below the true P95 in "
            "more than 2.5%"
        )
    assert limits(calibrate(write(tmp_path / "more.jsonl", *hundred()[:72])))["max_tokens"].value is not None


def test_failed_runaways_do_not_raise_a_limit(tmp_path: Path) -> None:
    runaways = [sized(f"away-{n}", prompt=1_000_000, success=False) for n in range(5)]
    made = calibrate(write(tmp_path / "runs.jsonl", *hundred(), *runaways))
    assert limits(made)["max_tokens"].value == 23_800
    assert (made.basis.kind, made.basis.recordings) == ("successful", 100)
    cut = made.cuts["max_tokens"]
    assert cut.by_label == {"success": 0, "failure": 5, "unlabelled": 0}


def test_what_a_limit_cuts_is_told_with_the_successful_ones_by_name(tmp_path: Path) -> None:
    giants = [sized(f"giant-{n}", prompt=20_000, calls=3) for n in range(3)]
    made = calibrate(
        write(tmp_path / "runs.jsonl", *hundred(), *giants, sized("away", prompt=20_000, calls=10, success=False))
    )
    assert limits(made)["max_tokens"].value == 24_600  # the 98th of 103 took 9,810
    cut = made.cuts["max_tokens"]
    assert cut.by_label == {"success": 3, "failure": 1, "unlabelled": 0}
    assert cut.successes == ["giant-0", "giant-1", "giant-2"]
    assert cut.tokens == 3 * 2 * 20_010 + 9 * 20_010  # all after the first call, which alone fits
    assert made.proposed["success"].stopped == 3
    assert made.now["success"].stopped == 0


def test_without_labels_all_runs_are_the_basis_and_it_is_said(tmp_path: Path) -> None:
    made = calibrate(write(tmp_path / "runs.jsonl", *hundred(success=None)))
    assert made.basis.kind == "unlabelled"
    assert limits(made)["max_tokens"].value == 23_800
    assert "100 without a label" in made.to_toml()
    assert "runaways among them raise the limits" in " ".join(made.to_toml().replace("#", " ").split())


def test_where_too_few_are_labelled_the_unlabelled_join_them_and_failures_never(tmp_path: Path) -> None:
    runs = hundred()
    for number, run in enumerate(runs):
        run["success"] = True if number < 30 else None if number < 80 else False
    made = calibrate(write(tmp_path / "runs.jsonl", *runs))
    assert (made.basis.kind, made.basis.recordings) == ("successful and unlabelled", 80)
    quantile = limits(made)["max_tokens"].quantile
    assert quantile is not None
    assert quantile.high <= 8_010
    alone = calibrate(write(tmp_path / "failed.jsonl", *hundred(success=False)))
    assert alone.changes == {}


def test_models_without_a_price_are_named_and_no_dollars_proposed(tmp_path: Path) -> None:
    runs = hundred()[:75]
    runs[5]["model"] = "in-house-7b"
    made = calibrate(write(tmp_path / "runs.jsonl", *runs))
    refused = limits(made)["max_usd"]
    assert refused.value is None
    assert "no price for in-house-7b (1 recordings)" in refused.why_not
    priced = calibrate(
        tmp_path / "runs.jsonl", Policy.validated({"prices": {"in-house-7b": {"input": 1, "output": 1}}}, "")
    )
    assert limits(priced)["max_usd"].value is not None


def test_of_a_conversation_the_largest_run_counts(tmp_path: Path) -> None:
    talks = []
    for n in range(1, 101):
        talk = sized(f"talk-{n}", prompt=100)
        talk["steps"] += sized("", prompt=100 * n)["steps"] + sized("", prompt=100)["steps"]
        for at, step in enumerate(talk["steps"]):
            step |= {"ts": 1_000 + at} | ({"call_id": f"c{at}"} if "call_id" in step else {})
        talks.append(talk)
    made = calibrate(write(tmp_path / "talks.jsonl", *talks))
    assert limits(made)["max_tokens"].value == 23_800  # as if each were one run
    assert (made.basis.recordings, made.basis.runs) == (100, 300)
    assert "the largest of the 300 runs in them" in " ".join(made.to_toml().replace("#", " ").split())


def test_without_times_there_is_no_limit_in_seconds(tmp_path: Path) -> None:
    runs = hundred()[:75]
    for run in runs:
        for step in run["steps"]:
            del step["ts"]
    untimed = limits(calibrate(write(tmp_path / "runs.jsonl", *runs)))["max_seconds"]
    assert untimed.value is None
    assert untimed.why_not.startswith("0 successful recordings contain the seconds, 72 are needed")


def test_runs_of_which_nobody_called_a_tool_get_no_limit_on_tools(tmp_path: Path) -> None:
    runs = hundred()
    for run in runs:
        run["steps"] = [step for step in run["steps"] if "tool" not in step["kind"]]
    found = limits(calibrate(write(tmp_path / "runs.jsonl", *runs)))
    assert found["max_tool_calls"].value is None
    assert found["max_tool_calls"].why_not.startswith("95% of the recordings have none")
    assert found["max_tokens"].value == 23_800


def test_a_limit_for_large_answers_is_none_for_small_ones(tmp_path: Path) -> None:
    """An answer of five characters is the rule, an error of fifty the exception that the model must read."""
    runs = hundred()
    small = limits(calibrate(write(tmp_path / "small.jsonl", *runs)))["max_tool_result_chars"]
    assert small.value is None
    assert "answers are small" in small.why_not
    for run in runs:
        for step in run["steps"]:
            if step["kind"] == "tool_result":
                step["result"] = "x" * 8_000
    assert limits(calibrate(write(tmp_path / "large.jsonl", *runs)))["max_tool_result_chars"].value == 20_100


def test_a_limit_that_ends_all_work_of_one_source_is_withheld(tmp_path: Path) -> None:
    small = [sized(f"small-{n}", prompt=100, source="clerk") for n in range(155)]  # enough for either half
    large = [working(f"large-{n}", 6, source="coder") for n in range(3)]
    made = calibrate(write(tmp_path / "runs.jsonl", *small, *large))
    calls = limits(made)["max_model_calls"]
    assert calls.value is None
    assert calls.why_not == (
        "2.5 x P95 is 3, but that stops most successful recordings of coder: another kind of work; calibrate each "
        "source separately"
    )
    assert made.cuts["max_model_calls"].by_label["success"] == 3
    assert "max_model_calls" not in made.changes
    assert set(made.changes) == {"max_seconds"}  # what cuts nothing stays
    assert made.proposed["success"].stopped == 0
    assert made.proposed["success"].runs == 158
    assert made.held_out.by_label["success"] == [158, 0, 0]
    one = calibrate(write(tmp_path / "one.jsonl", *({**run, "source": "clerk"} for run in (*small[:75], *large))))
    assert limits(one)["max_model_calls"].value == 3  # of one kind of work it is what it is, and the three are named
    assert one.cuts["max_model_calls"].successes == [f"large-{n}" for n in range(3)]


def test_limits_fitted_on_one_half_are_counted_on_the_other(tmp_path: Path) -> None:
    runs = [sized(f"run-{n}", prompt=100 * (n % 100 + 1)) for n in range(155)]
    made = calibrate(write(tmp_path / "runs.jsonl", *runs, sized("away", prompt=1_000_000, success=False)))
    assert made.held_out.by_label["success"] == [155, 0, 0]
    assert made.held_out.by_label["failure"][1] == 1
    assert "of 155 held-out successful recordings 0 would have been stopped (0.0% to 2.4%)" in made.held_out.words()
    halves = made.held_out.fitted
    assert len(halves) == 2
    assert all(half["max_tokens"] > 20_000 for half in halves)
    few = calibrate(write(tmp_path / "few.jsonl", *hundred()[:75]))
    assert "max_tokens" in few.held_out.missing  # a half of so few is too few
    assert "half of the runs are too few" in few.held_out.words()


@each_row(
    ("value", "is_whole", "up"),
    [
        (23_775, True, 23_800),
        (0.30851, False, 0.309),
        (2.5, True, 3),
        (999.5, True, 1_000),
        (0, True, 0),
        (1234.5, False, 1240.0),
        (100, True, 100),
    ],
)
def test_a_proposed_number_has_three_digits_and_is_never_rounded_down(value: float, is_whole: bool, up: float) -> None:
    assert rounded_up(value, is_whole) == up
