"""The story of a stop, from steps and from model calls."""

import shlex
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, text
from runguard.view.store import StoreView
from runguard.view.story import Call, build_story, notes_of
from tests.kit.adk_runs import play
from tests.kit.examples import each_row
from tests.kit.rule_agents import Tool, agent

TRIP = {
    "id": "t",
    "rule": "repetition",
    "run_id": "r",
    "model_calls": 3,
    "tool": "look",
    "observed": 3,
    "unit": "identical calls",
    "recorded_at": 105.0,
}


def calls(*prices: int | None, begin: float = 100.0) -> list[Call]:
    return [
        Call(begin + n, "r", str(n), "app", "u", "a", "m", "", 1_000, 250, nano, False) for n, nano in enumerate(prices)
    ]


def step(kind: str, at: float, **more: Any) -> dict[str, Any]:
    return {"k": kind, "t": at, "l": "", "a": "boss", **more}


def loop() -> list[dict[str, Any]]:
    steps = [step("enter", 1_000.0)]
    for n in range(3):
        at = 1_000.0 + n
        steps += [
            step("ask", at + 0.1, n=n + 1, model="m-1", **{"in": 900}),
            step("got", at + 0.2, **{"in": 1_000, "out": 50}),
            {"k": "paid", "t": at + 0.3, "n": n + 1, "usd": "0.25", "in": 1_001, "out": 51},
            step("call", at + 0.4, tool="look", call="c1", id=f"call {n}", b="x"),
            step(
                "answers",
                at + 0.5,
                b="x",
                of=[{"tool": "look", "call": "c1", "id": f"call {n}", "as": "failed", "answer": 77}],
            ),
        ]
    return [
        *steps,
        step(
            "decision", 1_003.0, do="stop", rule="repetition", tool="look", observed=3, limit=3, unit="identical calls"
        ),
        step("what", 1.0),
    ]


def test_a_loop_reads_as_one() -> None:
    story = build_story(TRIP, calls(250_000_000, 250_000_000, 250_000_000), loop())
    assert story.source == "steps"
    assert [row.kind for row in story.rows] == ["begin", *("model", "tool") * 3, "decision"]
    model, tool, decision = story.rows[-3], story.rows[-2], story.rows[-1]
    assert (model.name, model.tokens_in, model.tokens_out, model.usd) == ("m-1", 1_001, 51, Decimal("0.25"))
    assert (tool.name, tool.nth_call, tool.nth_answer, tool.outcome) == ("look", 3, 3, "failed")
    assert (decision.decision, decision.what, decision.name, decision.outcome) == (
        "stop",
        "repetition",
        "look",
        "3 identical calls, limit 3",
    )
    assert [(repeat.what, repeat.name, repeat.times, repeat.same_answer) for repeat in story.repeats] == [
        ("call", "look", 3, 3)
    ]
    assert round(decision.after_s, 6) == 3.0
    assert story.usd == Decimal("0.75")
    assert story.projection is not None
    assert (story.projection.mean_usd, story.projection.more_usd, story.projection.total_usd) == (
        Decimal("0.25"),
        Decimal("124.25"),
        Decimal(125),
    )


def test_parallel_strands_keep_their_own_answers() -> None:
    one, two = {"l": "one"}, {"l": "two"}
    steps = [
        {**step("ask", 1.0, n=1, model="m"), **one},
        {**step("ask", 1.1, n=2, model="m"), **two},
        {**step("got", 1.2, **{"in": 22, "out": 2}), **two},
        {**step("got", 1.3, **{"in": 11, "out": 1}), **one},
        {"k": "paid", "t": 1.4, "n": 2, "usd": "2"},
        {"k": "paid", "t": 1.5, "n": 1},
    ]
    story = build_story(TRIP, [], steps)
    assert [(row.lane, row.tokens_in, row.tokens_out, row.usd) for row in story.rows] == [
        ("one", 11, 1, None),
        ("two", 22, 2, Decimal(2)),
    ]


def test_a_call_that_was_given_back_was_not_made() -> None:
    story = build_story(TRIP, [], [step("ask", 1.0, n=1, model="m"), {"k": "back", "n": 1}])
    assert [(row.kind, row.outcome, row.usd) for row in story.rows] == [("model", "not made", Decimal(0))]


@each_row(
    "steps",
    [
        [{"k": "unspent", "n": 2, "denied": True}, step("decision", 2.0, do="stop", rule="budget")],
        [{**step("decision", 2.0, do="stop", rule="kill_switch"), "a": ""}, {"k": "unspent", "n": 2, "denied": False}],
        [{**step("decision", 2.0, do="stop", rule="kill_switch"), "a": ""}, {"k": "unspent"}],
        [{"k": "unspent", "n": 2, "denied": False}, step("decision", 2.0, do="stop", rule="deadline")],
        [step("decision", 2.0, do="stop", rule="model_calls")],
    ],
)
def test_a_call_that_was_refused_costs_nothing(steps: list[dict[str, Any]]) -> None:
    paid = [step("ask", 1.0, n=1, model="m", **{"in": 70}), {"k": "paid", "n": 1, "usd": "2", "in": 70, "out": 7}]
    story = build_story(TRIP, [], [*paid, step("ask", 2.0, n=2, model="m", **{"in": 80}), *steps])
    made, refused = (row for row in story.rows if row.kind == "model")
    assert (made.outcome, made.usd) == ("", Decimal(2))
    assert (refused.outcome, refused.usd, refused.tokens_in, refused.tokens_out) == ("refused", Decimal(0), 0, 0)


@pytest.mark.parametrize(
    "steps",
    [
        [step("decision", 2.0, do="nudge", rule="stall")],
        [step("decision", 2.0, do="stop", rule="model_calls", enforced=False)],
        [{**step("decision", 2.0, do="stop", rule="fan_out"), "l": "another"}],
    ],
)
def test_a_call_that_a_decision_does_not_keep_back_is_not_refused(steps: list[dict[str, Any]]) -> None:
    story = build_story(TRIP, [], [step("ask", 1.0, n=1, model="m"), *steps])
    assert (story.rows[0].outcome, story.rows[0].usd) == ("", None)


def test_why_is_said_in_words() -> None:
    def why(**facts: Any) -> tuple[str, ...]:
        return build_story({**TRIP, **facts}, [], []).why

    assert why() == ()
    switched = {
        "rule": "kill_switch",
        "scope_id": "all",
        "model_calls": 0,
        "agent_path": ["a", "b"],
        "message": MESSAGE,
    }
    assert why(**switched) == ("everything was stopped by root: again in time; 0 model calls too",)
    long = {"model_calls": 1_200, "message": MESSAGE.replace("; 0 model calls, 0 tool", "; 1,200 model calls, 0 tool")}
    assert why(**{**switched, **long}) == why(**switched)
    assert why(**{**switched, "message": "cut"}) == ("cut",)
    assert why(
        rule="budget",
        scope_id="app:x",
        unit="tokens",
        evidence=[{"unit": "tokens", "spent": "1", "reserved": "0", "wanted": "2500", "limit": "2000"}],
    ) == (
        "app:x had spent 1 token and reserved 0 tokens of its 2,000 tokens.",
        "This call could have cost 2,500 tokens, more than was left.",
    )
    assert why(rule="budget", message="stopped by budget", evidence=[{"unit": ["usd"]}]) == ("stopped by budget",)
    assert why(rule="deadline", observed=61.25, limit=60, unit="seconds") == (
        "The rule “deadline” counted 61.25 seconds; its limit is 60 seconds.",
    )


MESSAGE = (
    "stopped by kill_switch: all, stopped by root: again in time; 0 model calls too, in a→b; 0 model calls, 0 tool "
    "calls, 0 tokens so far"
)


def test_a_command_to_go_on_is_one_word_to_a_shell() -> None:
    hostile = "user:app/x; touch PWNED #"
    story = build_story({**TRIP, "rule": "kill_switch", "scope_id": hostile}, [], [], "sqlite:////a b.db")
    assert shlex.split(story.command, comments=True) == ["runguard", "resume", hostile, "--store", "sqlite:////a b.db"]
    money = {**TRIP, "rule": "budget", "scope": "user", "scope_id": hostile, "unit": "usd", "limit": "0.03"}
    assert build_story(money, [], [], "redis://:hunter2@cache/0").command.endswith(" --store URL --usd 0.03"), (
        "no password, and no store of somebody else"
    )
    assert shlex.split(build_story(money, [], []).command, comments=True) == [
        "runguard",
        "extend",
        hostile,
        "--usd",
        "0.03",
    ]
    assert build_story({**money, "scope": "run"}, [], []).command == build_story(TRIP, [], []).command == "", (
        "a run that was stopped is not extended"
    )


def test_a_run_that_made_no_call_cost_nothing() -> None:
    assert build_story({**TRIP, "model_calls": 0}, [], []).usd == 0


def test_hand_offs_that_repeat_are_named() -> None:
    steps = [
        step("hand", float(n), to="clerk") if n % 2 == 0 else {**step("hand", float(n), to="boss"), "a": "clerk"}
        for n in range(6)
    ]
    story = build_story({**TRIP, "rule": "handoff", "tool": None}, [], steps)
    assert {(repeat.what, repeat.name, repeat.times) for repeat in story.repeats} == {
        ("hand-off", "boss → clerk", 3),
        ("hand-off", "clerk → boss", 3),
    }
    assert (story.rows[-1].name, story.rows[-1].nth_call) == ("boss", 3)


def test_an_older_store_has_model_calls_only() -> None:
    story = build_story(TRIP, calls(10, 20, 30), [])
    assert (story.source, [row.usd for row in story.rows]) == (
        "calls",
        [Decimal("1E-8"), Decimal("2E-8"), Decimal("3E-8")],
    )
    assert [(repeat.what, repeat.name, repeat.times) for repeat in story.repeats] == [("identical calls", "look", 3)]


def test_nothing_but_the_trip_is_left() -> None:
    story = build_story(TRIP, [], [])
    assert (story.source, story.rows, story.usd, story.projection) == ("trip", (), None, None)


def test_unknown_prices_are_not_zero() -> None:
    story = build_story(TRIP, calls(None, None), [])
    assert (story.usd, story.unpriced, story.projection) == (None, 2, None)
    story = build_story(TRIP, calls(5, None), [])
    assert (story.usd, story.unpriced, story.projection) == (Decimal("5E-9"), 1, None)


def test_a_branch_that_was_stopped_leaves_what_others_spent_apart() -> None:
    story = build_story({**TRIP, "branch": "b"}, calls(*[1_000_000_000] * 8), [])
    assert (story.usd, story.later_usd) == (Decimal(6), Decimal(2))
    story = build_story(TRIP, calls(*[1_000_000_000] * 8), [])
    assert (story.usd, story.later_usd) == (Decimal(8), Decimal(0)), "what was in flight belongs to a stopped run"


def test_a_run_at_adks_own_cap_has_no_projection() -> None:
    assert build_story({**TRIP, "model_calls": 500}, calls(5), []).projection is None


def test_the_projection_goes_to_the_cap_that_the_run_had() -> None:
    story = build_story(TRIP, calls(1_000_000_000), [{"k": "start", "t": 1.0, "model_call_limit": 10}])
    assert story.projection is not None
    assert (story.projection.cap, story.projection.more_usd) == (10, Decimal(7))
    assert build_story(TRIP, calls(1_000_000_000), [{"k": "start", "t": 1.0}]).projection is None, (
        "a run without a cap has no end to project to"
    )


def test_steps_that_make_no_sense_are_shown_as_far_as_they_go() -> None:
    nonsense: list[dict[str, Any]] = [
        {}, {"k": "ask"}, {"k": "got", "t": "now"}, {"k": "answers", "of": "none"}, {"k": "answers", "of": [1,
        {"id": 4}]},
        {"k": "call", "tool": 5}, {"k": "paid", "usd": "lots", "n": "x"}, {"k": "decision"}, {"k": "hand"},
        {"k": ["ask"]},
    ]  # fmt: skip
    story = build_story({}, [], nonsense)
    assert [row.kind for row in story.rows] == ["model", "tool", "tool", "decision", "hand"]
    assert story.projection is None


def test_a_very_long_story_is_cut_at_its_beginning() -> None:
    steps = [step("ask", float(n), model=f"m{n}") for n in range(700)]
    story = build_story(TRIP, [], steps)
    assert (len(story.rows), story.left_out, story.rows[-1].name) == (500, 200, "m699")


# ---- What a store shows of running runs whose model was switched or whose prompt cache is lost


class Cached(ScriptedModel):
    """Two models of one class; the cache of the second one works for its first call."""

    @classmethod
    def supported_models(cls) -> list[str]:
        return ["big-1", "small-1"]


def _answer(n: int, request: Any) -> LlmResponse:
    usage = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=10_000 + n, candidates_token_count=10, cached_content_token_count=9_000 if n == 3 else 0
    )
    part = call("work", q=n) if n < 7 else text("done")
    return LlmResponse(content=types.Content(role="model", parts=[part]), usage_metadata=usage)


async def test_status_and_dashboard_show_the_notes_of_a_run(tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []
    plugin = RunGuardPlugin(
        store=f"sqlite:///{tmp_path}/guard.db",
        budgets=[Budget(usd=10, per="app", thresholds=[Threshold(0.01, model="small-1")])],
        prices={"big-1": {"input": 10, "output": 10}, "small-1": {"input": 1, "output": 1, "cached": "0.1"}},
        models={name: {"context_window": 100_000, "max_output_tokens": 100} for name in ("big-1", "small-1")},
    )

    def work(n: int) -> dict[str, int]:
        plugin.flush(10)
        (run,) = plugin.snapshot()["runs"]
        seen.append(notes_of(run))
        return {"done": n}

    await play(agent(Cached(_answer, model="big-1"), Tool("work", work)), plugins=[plugin])  # type: ignore[misc]
    switched, lost = seen[-1]
    assert switched == "worker on small-1 instead of big-1: 1% of the budget of app:app is spent"
    assert lost.startswith("prompt cache: agent worker: 18,000 prompt tokens of its last 2 calls to small-1")
    assert seen[0] == ()
    assert plugin.flush(10)
    assert StoreView(f"sqlite:///{tmp_path}/guard.db").running() == []


@pytest.mark.parametrize("facts", [{}, {"switched": 3, "prompt_cache": []}, {"switched": {"a": 1}}])
def test_facts_of_another_form_are_no_notes(facts: dict[str, Any]) -> None:
    assert notes_of(facts) == ()
