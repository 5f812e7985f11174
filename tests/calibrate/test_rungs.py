"""Rungs move only where recordings show that it saves something and harms nobody."""

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runguard.calibrate import Choice, calibrate
from runguard.calibrate.measure import TRIED, Measuring, changed, outcome_of, scaled, variants
from runguard.calibrate.proposal import ENOUGH
from runguard.core.decision import Rungs
from runguard.policy import Policy
from runguard.replay import replay_run
from runguard.replay.sources import run_of
from runguard.replay.steps import Faults
from tests.kit.recordings import repeating, rungs_of, working, write

NOW = rungs_of("repetition")
TIGHTER = scaled(NOW, 0.75)
BETWEEN = TIGHTER["stop"]  # as often as a tighter setting stops at, less often than the present one does


def good(many: int = 80) -> list[dict[str, Any]]:
    return [working(f"good-{n}", 1) for n in range(many)]


def bad(many: int, **facts: Any) -> list[dict[str, Any]]:
    return [repeating(f"bad-{n}", BETWEEN, **facts) for n in range(many)]


def choice(path: Path, *runs: dict[str, Any], rule: str = "repetition", **options: Any) -> Choice:
    made = calibrate(write(path / "runs.jsonl", *runs), **options)
    return next(choice for choice in made.settings.choices if choice.rule == rule)


def test_a_tighter_setting_that_saves_and_stops_nobody_is_proposed(tmp_path: Path) -> None:
    assert NOW.stop is not None
    assert NOW.stop > BETWEEN
    found = choice(tmp_path, *good(), *bad(10))
    assert found.rungs is not None
    assert found.rungs["stop"] <= BETWEEN
    assert found.after is not None
    assert (found.after.stopped, found.after.caught, found.after.saves_more) == (0, 10, 10)
    assert found.after.tokens > found.before.tokens
    assert f"in 10 recordings and stops 0 of {found.after.successes} successful ones" in found.why


def test_a_few_recordings_are_chance(tmp_path: Path) -> None:
    found = choice(tmp_path, *good(10), *bad(ENOUGH - 1))
    assert found.rungs is None
    assert f"in {ENOUGH - 1} recordings: too few to tell from chance ({ENOUGH} needed)" in found.why


def test_successful_runs_that_do_the_same_keep_it_as_it_is(tmp_path: Path) -> None:
    found = choice(tmp_path, *good(10), *bad(10), *(repeating(f"fine-{n}", BETWEEN, success=True) for n in range(3)))
    assert found.rungs is None
    assert found.why == "no other setting saves more without touching more successful recordings"
    tighter = next(point for rungs, point in found.curve if rungs == TIGHTER)
    assert tighter.stopped == 3
    assert tighter.tokens > found.before.tokens


def test_few_successful_runs_cannot_rule_out_false_stops(tmp_path: Path) -> None:
    found = choice(tmp_path, *good(30), *bad(10))
    assert found.rungs is None
    assert "30 successful recordings cannot rule out that it stops 5% of them (at most 11.4%)" in found.why


def test_without_labels_nothing_is_moved(tmp_path: Path) -> None:
    runs = [run | {"success": None} for run in [*good(10), *bad(6)]]
    found = choice(tmp_path, *runs)
    assert found.rungs is None
    assert "nothing is labelled a success" in found.why


def test_a_saving_that_does_not_matter_moves_nothing(tmp_path: Path) -> None:
    spender = working("spender", 30, success=False)
    for step in spender["steps"]:
        if step["kind"] == "model":
            step["input_tokens"] = 100_000_000
    found = choice(tmp_path, *good(10), *bad(10), spender)
    assert found.rungs is None
    assert "less than 1% of what they spent" in found.why


def test_false_stops_of_the_present_setting_loosen_it_when_there_are_enough(tmp_path: Path) -> None:
    assert NOW.stop is not None
    often = int(NOW.stop)
    few = choice(tmp_path, *good(10), *(repeating(f"fine-{n}", often, success=True) for n in range(2)))
    assert few.rungs is None
    assert "stops 2 of 12 successful recordings, 0 allowed" in few.why
    assert "too few to tell from chance" in few.why
    many = choice(tmp_path, *good(10), *(repeating(f"fine-{n}", often, success=True) for n in range(8)))
    assert many.rungs is not None
    assert many.rungs["stop"] > often
    assert many.after is not None
    assert (many.before.stopped, many.after.stopped, many.after.spared) == (8, 0, 8)
    allowed = choice(
        tmp_path, *good(10), *(repeating(f"fine-{n}", often, success=True) for n in range(8)), max_false_stops=0.5
    )
    assert allowed.rungs is None


def test_rules_that_are_off_stay_off_and_settings_can_all_fire() -> None:
    off = Policy.validated({"rules": {"repetition": False}}, "")
    assert "repetition" not in {variant.rule for variant in variants(off)}
    policy = Policy.validated({}, "")
    tried = variants(policy)
    assert {variant.rule for variant in tried} == set(TRIED)
    for variant in tried:
        with_variant = changed(policy, variant.change)  # raises for a rung that cannot fire
        if variant.rungs is not None:
            assert with_variant.rungs(variant.rule) == Rungs(**dict(variant.rungs))
            assert with_variant.rungs(variant.rule) != policy.rungs(variant.rule)


CALLS = st.tuples(
    st.sampled_from(["look", "grep"]), st.integers(0, 1), st.sampled_from(["same", "new", "fails", "empty", "words"])
)


@given(st.lists(st.tuples(CALLS, st.integers(1, 9)), min_size=1, max_size=6), st.booleans())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_setting_that_is_not_played_would_have_changed_nothing(
    stretches: list[tuple[tuple[str, int, str], int]], starts_afresh: bool
) -> None:
    """Settings of rules that find nothing to count in a recording are passed over: the outcome must be that of the
    present policy.
    """
    steps: list[dict[str, Any]] = [{"kind": "message", "agent": "user", "text": "go"}]
    for (tool, arg, kind), times in stretches:
        for _ in range(times):
            n = len(steps)
            if kind == "words":
                steps.append(
                    {"kind": "model", "agent": "a", "text": f"well {arg}", "input_tokens": 10, "output_tokens": 1}
                )
                continue
            result: Any = {
                "same": {"seen": 1},
                "new": {"seen": n},
                "fails": {"error": "no such file"},
                "empty": {"result": []},
            }[kind]
            steps.append({"kind": "model", "agent": "a", "text": "", "input_tokens": 10, "output_tokens": 1})
            steps.append({"kind": "tool_call", "agent": "a", "tool": tool, "args": {"at": arg}, "call_id": str(n)})
            steps.append({"kind": "tool_result", "agent": "a", "tool": tool, "result": result, "call_id": str(n)})
        if starts_afresh:
            steps.append({"kind": "message", "agent": "user", "text": "on"})
    run = {"id": "r", "model": "gpt-4o", "steps": steps}
    policy = Policy.validated({}, "")
    tried = variants(policy)
    measured = Measuring(policy, tried)(run_of(run, "here", Faults()))
    for number, variant in enumerate(tried):
        plain = outcome_of(replay_run(run_of(run, "here", Faults()), changed(policy, variant.change)))
        assert measured.tried.get(number, measured.now) == plain, variant
