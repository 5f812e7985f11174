"""The story of a stop, from steps and from model calls."""

from decimal import Decimal
from typing import Any

from runguard.view.records import Call
from runguard.view.story import tell

TRIP = {"id": "t", "rule": "repetition", "run_id": "r", "model_calls": 3, "tool": "look", "observed": 3, "unit": "identical calls", "recorded_at": 105.0}


def calls(*prices: int | None, begin: float = 100.0) -> list[Call]:
    return [Call(begin + n, "r", str(n), "app", "u", "a", "m", "", 1_000, 250, nano, False) for n, nano in enumerate(prices)]


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
            step("answers", at + 0.5, b="x", of=[{"tool": "look", "call": "c1", "id": f"call {n}", "as": "failed", "answer": 77}]),
        ]
    return [*steps, step("decision", 1_003.0, do="stop", rule="repetition", tool="look", observed=3, limit=3, unit="identical calls"), step("what", 1.0)]


def test_a_loop_reads_as_one() -> None:
    story = tell(TRIP, calls(250_000_000, 250_000_000, 250_000_000), loop())
    assert story.source == "steps"
    assert [row.kind for row in story.rows] == ["begin", *("model", "tool") * 3, "decision"]
    model, tool, decision = story.rows[-3], story.rows[-2], story.rows[-1]
    assert (model.name, model.tokens_in, model.tokens_out, model.usd) == ("m-1", 1_001, 51, Decimal("0.25"))
    assert (tool.name, tool.nth_call, tool.nth_answer, tool.outcome) == ("look", 3, 3, "failed")
    assert (decision.decision, decision.what, decision.name, decision.outcome) == ("stop", "repetition", "look", "3 identical calls, limit 3")
    assert [(repeat.what, repeat.name, repeat.times, repeat.same_answer) for repeat in story.repeats] == [("call", "look", 3, 3)]
    assert round(decision.after_s, 6) == 3.0
    assert story.usd == Decimal("0.75")
    assert story.projection is not None
    assert (story.projection.mean_usd, story.projection.more_usd, story.projection.total_usd) == (Decimal("0.25"), Decimal("124.25"), Decimal(125))


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
    story = tell(TRIP, [], steps)
    assert [(row.lane, row.tokens_in, row.tokens_out, row.usd) for row in story.rows] == [("one", 11, 1, None), ("two", 22, 2, Decimal(2))]


def test_a_call_that_was_given_back_was_not_made() -> None:
    story = tell(TRIP, [], [step("ask", 1.0, n=1, model="m"), {"k": "back", "n": 1}])
    assert [(row.kind, row.outcome, row.usd) for row in story.rows] == [("model", "not made", None)]


def test_hand_offs_that_repeat_are_named() -> None:
    steps = [step("hand", float(n), to="clerk") if n % 2 == 0 else {**step("hand", float(n), to="boss"), "a": "clerk"} for n in range(6)]
    story = tell({**TRIP, "rule": "handoff", "tool": None}, [], steps)
    assert {(repeat.what, repeat.name, repeat.times) for repeat in story.repeats} == {("hand-off", "boss → clerk", 3), ("hand-off", "clerk → boss", 3)}
    assert (story.rows[-1].name, story.rows[-1].nth_call) == ("boss", 3)


def test_an_older_store_has_model_calls_only() -> None:
    story = tell(TRIP, calls(10, 20, 30), [])
    assert (story.source, [row.usd for row in story.rows]) == ("calls", [Decimal("1E-8"), Decimal("2E-8"), Decimal("3E-8")])
    assert [(repeat.what, repeat.name, repeat.times) for repeat in story.repeats] == [("identical calls", "look", 3)]


def test_nothing_but_the_trip_is_left() -> None:
    story = tell(TRIP, [], [])
    assert (story.source, story.rows, story.usd, story.projection) == ("trip", (), None, None)


def test_unknown_prices_are_not_zero() -> None:
    story = tell(TRIP, calls(None, None), [])
    assert (story.usd, story.unpriced, story.projection) == (None, 2, None)
    story = tell(TRIP, calls(5, None), [])
    assert (story.usd, story.unpriced, story.projection) == (Decimal("5E-9"), 1, None)


def test_a_branch_that_was_stopped_leaves_what_others_spent_apart() -> None:
    story = tell({**TRIP, "branch": "b"}, calls(*[1_000_000_000] * 8), [])
    assert (story.usd, story.later_usd) == (6, 2)
    story = tell(TRIP, calls(*[1_000_000_000] * 8), [])
    assert (story.usd, story.later_usd) == (8, 0), "what was in flight belongs to a stopped run"


def test_a_run_at_adks_own_cap_has_no_projection() -> None:
    assert tell({**TRIP, "model_calls": 500}, calls(5), []).projection is None


def test_the_projection_goes_to_the_cap_that_the_run_had() -> None:
    story = tell(TRIP, calls(1_000_000_000), [{"k": "start", "t": 1.0, "model_call_limit": 10}])
    assert story.projection is not None
    assert (story.projection.cap, story.projection.more_usd) == (10, 7)
    assert tell(TRIP, calls(1_000_000_000), [{"k": "start", "t": 1.0}]).projection is None, "a run without a cap has no end to project to"


def test_steps_that_make_no_sense_are_shown_as_far_as_they_go() -> None:
    nonsense: list[dict[str, Any]] = [
        {}, {"k": "ask"}, {"k": "got", "t": "now"}, {"k": "answers", "of": "none"}, {"k": "answers", "of": [1, {"id": 4}]},
        {"k": "call", "tool": 5}, {"k": "paid", "usd": "lots", "n": "x"}, {"k": "decision"}, {"k": "hand"}, {"k": ["ask"]},
    ]  # fmt: skip
    story = tell({}, [], nonsense)
    assert [row.kind for row in story.rows] == ["model", "tool", "tool", "decision", "hand"]
    assert story.projection is None


def test_a_very_long_story_is_cut_at_its_beginning() -> None:
    steps = [step("ask", float(n), model=f"m{n}") for n in range(700)]
    story = tell(TRIP, [], steps)
    assert (len(story.rows), story.left_out, story.rows[-1].name) == (500, 200, "m699")
