"""One recorded run past one policy: what is said where, and what came after."""

from decimal import Decimal
from pathlib import Path
from threading import Event
from typing import Any

from runguard import Budget, Threshold
from runguard.pricing.rates import Usage
from runguard.replay.output import explain
from runguard.replay.player import Judge, play
from runguard.replay.results import RunResult
from runguard.replay.sources import run_of
from runguard.replay.steps import Answered, Asked, Called, Faults, RecordedRun, Step, Turn
from tests.kit.examples import each_row
from tests.kit.recordings import early, looping, working


def judged(run: dict[str, Any], **policy: Any) -> RunResult:
    return Judge(early(**policy)).play(run_of(run, "here", Faults()))


def test_a_loop_is_nudged_refused_and_stopped_where_live_would() -> None:
    result = judged(looping())
    assert [(v.action, v.rule, v.turn, v.observed) for v in result.verdicts] == [
        ("nudge", "repetition", 3, 3),
        ("block", "repetition", 4, 4),
        ("stop", "repetition", 5, 5),
    ]
    stop = result.first("stop")
    assert stop is not None
    assert (stop.tool, stop.agent, stop.unit) == ("look", "a", "identical calls and answers")
    assert stop.evidence[0]["tool"] == "look"


def test_what_came_after_the_stop_is_counted_to_the_token() -> None:
    result = judged(looping(times=8))
    assert (result.model_calls, result.tool_calls) == (8, 8)
    after = [1_000 + 100 * turn + 50 for turn in range(5, 8)]  # the sixth call and those after it
    assert (result.saved.model_calls, result.saved.tokens) == (3, sum(after))
    stop = result.first("stop")
    assert stop is not None
    assert stop.after == result.saved
    assert result.saved.tool_calls == 3


def test_callbacks_of_budgets_hear_nothing_of_recorded_runs() -> None:
    called = Event()
    threshold = Threshold(percent=0.1, callback=lambda _: called.set(), action="nudge")
    result = judged(working(times=8), budgets=[Budget(tokens=100_000, per="run", thresholds=[threshold])])
    assert [verdict.rule for verdict in result.verdicts] == ["budget"]
    assert not called.wait(0.3)


def test_work_is_left_alone() -> None:
    assert judged(working(times=20)).verdicts == []


def test_cost_is_that_of_the_price_list_and_of_the_policy() -> None:
    result = judged(looping(times=2), prices={"gpt-4o": {"input": 1, "output": 10}})
    assert result.usd == Decimal("0.0031")
    unknown = judged(looping(times=2, model="nobody-knows-it"))
    assert (unknown.usd, unknown.unpriced) == (None, 2)


def test_a_budget_stops_before_the_call_that_does_not_fit() -> None:
    result = judged(working(times=8), max_tokens=5_000)
    stop = result.first("stop")
    assert stop is not None
    assert stop.rule == "budget"
    spent = [1_000 + 100 * turn + 50 for turn in range(8)]
    made = stop.turn
    assert (
        sum(spent[:made]) + 1_000 + 100 * made + 1_024
        > 5_000
        >= sum(spent[: made - 1]) + 1_000 + 100 * (made - 1) + 1_024
    )


def test_a_dollar_limit_refuses_what_has_no_price_as_live() -> None:
    stop = judged(looping(model="nobody-knows-it"), max_usd=1).first("stop")
    assert stop is not None
    assert (stop.rule, stop.turn) == ("unpriced", 0)


def test_recorded_time_is_the_clock() -> None:
    stop = judged(working(times=8), max_seconds=12).first("stop")
    assert stop is not None
    assert (stop.rule, stop.turn) == ("deadline", 4)


def test_without_times_no_rule_about_time_speaks() -> None:
    run = working(times=8)
    for step in run["steps"]:
        step.pop("ts")
    assert judged(run, max_seconds=0.001).verdicts == []


def test_a_message_of_the_user_starts_afresh() -> None:
    first, second = looping(times=3), looping(times=3)
    run = {**first, "steps": first["steps"] + second["steps"]}
    result = judged(run)
    assert result.runs == 2
    assert [v.action for v in result.verdicts] == ["nudge", "nudge"]
    assert len({v.run for v in result.verdicts}) == 2


def test_a_message_after_a_stop_is_judged_again_and_not_saved() -> None:
    first, second = looping(times=7), working(times=5)
    result = judged({**first, "steps": first["steps"] + second["steps"]})
    assert result.saved.model_calls == 2


def test_unknown_tokens_are_estimated_from_the_texts() -> None:
    run = looping(times=3)
    for step in run["steps"]:
        step.pop("input_tokens", None)
        step.pop("output_tokens", None)
    result = judged(run)
    assert result.estimated == 3
    assert result.prompt_tokens > 0


def test_a_simulated_customers_own_calls_are_not_the_agents() -> None:
    run = looping(times=2)
    run["steps"][1:1] = [
        {"kind": "tool_call", "agent": "user", "tool": "phone", "args": {}},
        {"kind": "tool_result", "agent": "user", "tool": "phone"},
    ]
    assert judged(run).tool_calls == 2


def test_a_hand_off_is_one_and_circles_are_seen() -> None:
    steps: list[dict[str, Any]] = [{"kind": "message", "agent": "user", "text": "go"}]
    for turn in range(14):
        here, there = ("a", "b") if turn % 2 == 0 else ("b", "a")
        steps.append({"kind": "model", "agent": here, "text": "", "input_tokens": 10, "output_tokens": 1})
        steps.append({"kind": "tool_call", "agent": here, "tool": "transfer_to_agent", "args": {"agent_name": there}})
    result = judged({"id": "x", "steps": steps})
    assert result.tool_calls == 0
    assert [(v.action, v.rule) for v in result.verdicts] == [("nudge", "handoff"), ("stop", "handoff")]


def test_nothing_is_written_told_or_enforced(tmp_path: Path) -> None:
    store = tmp_path / "guard.db"
    heard: list[object] = []
    policy = early(
        store=f"sqlite:///{store}", on_trip=heard.append, on_decision=heard.append, alerts={"log": "warning"}
    )
    assert Judge(policy).play(run_of(looping(), "here", Faults())).first("stop") is not None
    assert not store.exists()
    assert heard == []


def test_two_policies_see_one_walk() -> None:
    judges = [Judge(early(**values)) for values in ({}, {"max_model_calls": 2})]
    mine, other = play(run_of(looping(), "here", Faults()), judges)
    assert [r.first("stop").rule for r in (mine, other)] == ["repetition", "model_calls"]  # type: ignore[union-attr]
    assert mine.tokens == other.tokens


# ---- strands --------------------------------------------------------------------------------------------------------


def branches(stuck: str) -> list[Step]:
    """Two branches, in turn; one of them repeats itself."""
    steps: list[Step] = [Turn(0.0, "inv")]
    for turn in range(8):
        for name in ("par.p1", "par.p2"):
            agent, id_ = name[-2:], f"{name}-{turn}"
            steps.append(Asked(None, agent, name, "gpt-4o", Usage(100, 10), batch=id_, goes_on=True))
            steps.append(Called(None, agent, name, id_, id_, "look", {"n": 0 if agent == stuck else turn}))
            steps.append(Answered(None, agent, id_, "look", {"seen": 0 if agent == stuck else turn}))
    return steps


def test_a_stop_in_a_branch_spares_that_branch_alone() -> None:
    result = Judge(early()).play(RecordedRun("x", iter(branches("p2"))))
    stop = result.first("stop")
    assert stop is not None
    assert (stop.lane, stop.agent) == ("/par.p2", "p2")
    assert result.saved.model_calls == 3
    assert result.saved.tokens == stop.after.tokens == 3 * 110


# ---- why did it not stop
# ----------------------------------------------------------------------------------------------


def test_an_explanation_says_how_near_each_rule_came() -> None:
    told = explain(run_of(looping(times=4), "here", Faults()), Judge(early(), to_the_end=True))
    near = {each.rule: each for each in told.rules}
    assert near["repetition"].peak is not None
    assert near["repetition"].peak.observed == 4
    assert near["repetition"].why == "4 of 5 needed to stop; reached its block"
    assert near["stall"].why == "no event to count"
    assert near["cycle"].why == "off in this policy"
    assert near["max_model_calls"].rungs == {"stop": 500}
    assert "depth" in told.not_recorded


def test_an_explanation_changes_no_verdict() -> None:
    plain = judged(looping())
    told = explain(run_of(looping(), "here", Faults()), Judge(early(), to_the_end=True))
    assert [v for v in told.result.verdicts if not v.moot] == plain.verdicts


@each_row("broken", [None, 7, "x", [], {"kind": "dance"}, {"kind": ["model"]}])
def test_broken_steps_are_counted_and_skipped(broken: Any) -> None:
    run, faults = looping(), Faults()
    run["steps"].insert(4, broken)
    result = Judge(early()).play(run_of(run, "here", faults))
    assert faults.count == 1
    assert "here (loop) step 4" in faults.first[0]
    assert result.first("stop") is not None
