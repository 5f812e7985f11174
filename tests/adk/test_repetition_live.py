"""Repeated calls and cycles on real ADK runs."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, SequentialAgent
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard import ToolRule
from runguard.testing import (
    ScriptedModel,
    assert_calls_answered,
    assert_stopped,
    call,
    text,
)
from tests.kit.adk_runs import observe
from tests.kit.rule_agents import Tool, agent, always, ask_new

# ---- repetition -----------------------------------------------------------------------------------------------------


async def test_repetition_is_nudged_then_refused_then_stopped() -> None:
    look, model = Tool("look", [{"name": "Ann"}]), ScriptedModel([call("look", q=1)])
    seen = await observe(agent(model, look))
    assert seen.rules == [("nudge", "repetition"), ("block", "repetition"), ("stop", "repetition")]
    assert (look.runs, model.calls) == (7, 9)
    trip = assert_stopped(seen.result, "repetition")
    assert (trip.tool, trip.observed, trip.limit, trip.unit) == ("look", 9, 9, "identical calls and answers")
    assert trip.evidence
    assert assert_calls_answered(seen.result.session) == 9


@pytest.mark.parametrize(
    "answers",
    [
        lambda n: {"name": "Ann", "took": f"{n}.2 ms"},
        lambda n: {"name": "Ann", "request_id": f"a{n}f{n}"},
        lambda n: f"Ann, as of 2026-01-01T10:00:{n:02d}Z",
        lambda n: [{"name": "Ann"}],
        lambda n: None,
    ],
    ids=["duration", "request id", "time", "list", "nothing"],
)
async def test_repetition_is_seen_through_what_always_differs(answers: Any) -> None:
    look, model = Tool("look", answers), ScriptedModel([call("look", q=1)])
    seen = await observe(agent(model, look))
    assert_stopped(seen.result, "repetition")
    assert (look.runs, model.calls) == (7, 9)


@pytest.mark.parametrize(
    ("script", "answers"),
    [
        (ask_new("look", 30), [{"ok": True}]),
        ([call("look", q=1)] * 2 + [call("look", q=2)] * 2 + [text("done")], [{"ok": True}]),
        ([call("look", q=1)] * 12 + [text("done")], lambda n: {"progress": n}),
        ([call("look", q=1), call("look", q=2), call("look", q=1), text("done")], [{"ok": True}]),
    ],
    ids=["a batch with equal answers", "twice each", "an answer that moves", "looking back once"],
)
async def test_repetition_leaves_healthy_runs_alone(script: Any, answers: Any) -> None:
    look = Tool("look", answers)
    seen = await observe(agent(script, look))
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


async def test_a_pipeline_whose_agents_all_load_the_same_thing_is_healthy() -> None:
    """What is new to an agent is no repetition because another one has asked before."""
    steps = [
        agent([call("load", q=1), text(f"step {n} is done")], Tool("load", [{"document": "text"}]), name=f"a{n}")
        for n in range(6)
    ]
    seen = await observe(SequentialAgent(name="pipeline", sub_agents=steps))
    assert seen.decisions == []
    assert len(seen.result.texts) == 6


async def test_two_agents_that_only_ask_the_same_things_in_turn_are_going_nowhere() -> None:
    """News per agent must not hide a circle of agents."""
    models = [ScriptedModel(always(call("load", q=1), text("over to you"))) for _ in range(2)]
    pair = [agent(model, Tool("load", ["text"]), name=name) for name, model in zip("ab", models, strict=True)]
    seen = await observe(LoopAgent(name="loop", max_iterations=30, sub_agents=pair))
    assert_stopped(seen.result)
    assert sum(model.calls for model in models) <= 40


# ---- circles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "calls"),
    [
        (text("I am still working on it. Please wait."), 19),  # the question is the same when its last four parts are
        (LlmResponse(content=types.Content(role="model", parts=[])), 15),
        (LlmResponse(error_code="SAFETY", error_message="blocked"), 15),
    ],
    ids=["the same words", "nothing", "cut off"],
)
async def test_no_news_ends_a_loop_that_says_the_same_for_ever(response: Any, calls: int) -> None:
    model = ScriptedModel(lambda n, _: response)
    seen = await observe(LoopAgent(name="loop", sub_agents=[agent(model)]))
    assert (assert_stopped(seen.result, "no_news").observed, model.calls) == (14, calls)


def _label(n: int) -> types.Part:
    return text(("positive", "negative")[n % 2])


def _picture(n: int) -> types.Part:
    return types.Part(inline_data=types.Blob(mime_type="image/png", data=bytes(n)))


@pytest.mark.parametrize("answer", [_label, _picture])
async def test_no_news_leaves_equal_answers_to_new_questions_alone(answer: Any) -> None:
    def following(callback_context: Any) -> None:
        callback_context.state["item"] = callback_context.state.get("item", 0) + 1

    model = ScriptedModel(lambda n, _: answer(n))
    classify = LlmAgent(
        name="classify", model=model, instruction="Judge review {item}.", before_agent_callback=following
    )
    assert (await observe(LoopAgent(name="loop", sub_agents=[classify], max_iterations=40))).decisions == []
    assert model.calls == 40


async def test_cycle_repeats_stops_after_its_rounds() -> None:
    tools = [Tool(name, [name]) for name in "abc"]
    model = ScriptedModel(always(*(call(name) for name in "abc")))
    seen = await observe(agent(model, *tools), cycle_repeats=3, max_cycle_len=3)
    assert model.calls == 9
    assert assert_stopped(seen.result, "cycle").observed == 3


async def test_cycle_repeats_leaves_circles_with_new_answers_alone() -> None:
    tools = [Tool(name, lambda n: {"n": n}) for name in "abc"]
    script = lambda n, _: call("abc"[n % 3]) if n <= 15 else text("done")  # noqa: E731
    seen = await observe(agent(script, *tools), cycle_repeats=2, max_cycle_len=3)
    assert seen.decisions == []


# ---- an explicit max_identical_tool_results -------------------------------------------------------------------------


UNFINISHED: list[Any] = [
    {"message": "The index is being rebuilt, please retry later."},
    {"results": []},
    {"status": "retry_later"},
    {"status": "pending"},
    {"state": "incomplete", "data": None},
    {"status": "partial"},
    {"status": "degraded", "rows": [1]},
    "pending",
]


def _asks_in_other_words(answers: Callable[[int], Any]) -> tuple[ScriptedModel, LlmAgent]:
    made: list[str] = []

    def search(query: str) -> Any:
        made.append(query)
        return answers(len(made))

    model = ScriptedModel(lambda n, _: call("search", query=f"question {n}") if n <= 8 else text("done"))
    return model, LlmAgent(name="a", model=model, tools=[search])


@pytest.mark.parametrize("answer", UNFINISHED, ids=str)
async def test_an_explicit_limit_stops_at_the_third_equal_unfinished_answer(answer: Any) -> None:
    model, agent = _asks_in_other_words(lambda n: answer)
    seen = await observe(agent, max_identical_tool_results=3)
    assert assert_stopped(seen.result).rule == "stall"
    assert model.calls == 3
    model, agent = _asks_in_other_words(lambda n: answer)
    seen = await observe(agent)  # the defaults leave it to the later rules
    assert seen.result.trips == []


@pytest.mark.parametrize(
    "answers",
    [
        lambda n: {"status": "ok"},
        lambda n: {"status": "pending", "progress": n * 10},
        lambda n: {"status": "pending"} if n % 3 else {"status": "done", "file": n},
        lambda n: {"results": [n]},
    ],
    ids=["a batch", "a poll that moves", "work in between", "hits"],
)
async def test_an_explicit_limit_leaves_work_alone(answers: Callable[[int], Any]) -> None:
    model, agent = _asks_in_other_words(answers)
    seen = await observe(agent, max_identical_tool_results=3)
    assert seen.result.trips == []
    assert model.calls == 9


@pytest.mark.parametrize(
    "settings",
    [
        {"tool_result_normalizer": {"search": lambda answer: {"status": answer["status"]}}},
        {"tools": {"search": ToolRule(volatile=("why",))}},
    ],
    ids=["normalizer", "volatile"],
)
async def test_the_normalizer_decides_what_identifies_a_failure(settings: dict[str, Any]) -> None:
    words = [
        "the shelf",
        "a wall",
        "no ink",
        "bad light",
        "thin paper",
        "torn edge",
        "wet page",
        "odd font",
        "old scan",
    ]
    model, agent = _asks_in_other_words(lambda n: {"status": "partial_parse_error", "why": words[n]})
    seen = await observe(agent, max_identical_tool_results=3, **settings)
    assert assert_stopped(seen.result, "stall").observed == 3
    assert model.calls == 3
    model, agent = _asks_in_other_words(lambda n: {"status": "partial_parse_error", "why": words[n]})
    seen = await observe(agent, max_identical_tool_results=3)
    assert model.calls > 3, "without it these are different failures"
