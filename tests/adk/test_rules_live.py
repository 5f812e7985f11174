"""Every rule through the public entry point: fired by what it is for, silent for the healthy look-alike."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins import ReflectAndRetryToolPlugin
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools import FunctionTool, LongRunningFunctionTool, ToolContext
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

import runguard
from runguard import ToolRule
from runguard.adk import RunGuardPlugin
from runguard.testing import (
    FakeClock,
    ScriptedModel,
    assert_calls_answered,
    assert_stopped,
    call,
    calls,
    text,
    transfer,
)

from .helpers import observe, play, prompts, told


def agent(script: Any, *tools: Any, name: str = "worker", **options: Any) -> LlmAgent:
    model = script if isinstance(script, ScriptedModel) else ScriptedModel(script)
    return LlmAgent(name=name, description=f"does {name}", model=model, tools=list(tools), **options)


class Tool:
    """A tool that answers from a list (the last one repeats) or by a function of its count, and counts."""

    def __init__(self, name: str, answers: Sequence[Any] | Callable[[int], Any]) -> None:
        self.__name__ = name
        self.runs = 0
        self._answers = answers

    def __call__(self, q: int = 0) -> Any:
        """Does something with q."""
        self.runs += 1
        answer = (
            self._answers(self.runs)
            if callable(self._answers)
            else self._answers[min(self.runs, len(self._answers)) - 1]
        )
        if isinstance(answer, BaseException):
            raise answer
        return answer


def always(*steps: Any) -> Callable[[int, Any], Any]:
    """The same steps round and round."""
    return lambda n, _: steps[(n - 1) % len(steps)]


def ask_new(tool: str, until: int = 10**9) -> Callable[[int, Any], Any]:
    """The same tool with new arguments each time, then an answer."""
    return lambda n, _: call(tool, q=n) if n <= until else text("done")


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


async def test_a_reviewer_may_read_again_what_the_writer_has_read() -> None:
    writer, reviewer = (
        agent(ask_new("read", 12), Tool("read", lambda n: {"page": n}), name=name) for name in ("writer", "reviewer")
    )
    seen = await observe(SequentialAgent(name="pipeline", sub_agents=[writer, reviewer]))
    assert seen.decisions == []
    assert seen.result.texts == ["done", "done"]


async def test_two_agents_that_only_ask_the_same_things_in_turn_are_going_nowhere() -> None:
    """News per agent must not hide a circle of agents."""
    models = [ScriptedModel(always(call("load", q=1), text("over to you"))) for _ in range(2)]
    pair = [agent(model, Tool("load", ["text"]), name=name) for name, model in zip("ab", models, strict=True)]
    seen = await observe(LoopAgent(name="loop", max_iterations=30, sub_agents=pair))
    assert_stopped(seen.result)
    assert sum(model.calls for model in models) <= 40


async def test_max_identical_tool_results_stops_at_its_number() -> None:
    look, model = Tool("look", ["same"]), ScriptedModel([call("look", q=1)])
    seen = await observe(agent(model, look), max_identical_tool_results=3)
    assert (look.runs, model.calls) == (3, 3)
    assert assert_stopped(seen.result, "repetition").observed == 3


# ---- circles --------------------------------------------------------------------------------------------------------


async def test_no_news_sees_a_ping_pong_of_two_calls() -> None:
    a, b = Tool("a", ["alpha"]), Tool("b", ["beta"])
    model = ScriptedModel(always(call("a", q=1), call("b", q=1)))
    seen = await observe(agent(model, a, b))
    assert seen.rules == [("nudge", "no_news"), ("stop", "no_news")]
    assert model.calls == a.runs + b.runs == 18  # two with news, two told again, fourteen told a third time or more
    assert assert_stopped(seen.result).observed == 14


async def test_no_news_ends_a_loop_that_says_the_same_for_ever() -> None:
    model = ScriptedModel(lambda n, _: text("I am still working on it. Please wait."))
    seen = await observe(LoopAgent(name="loop", sub_agents=[agent(model)]))
    trip = assert_stopped(seen.result, "no_news")
    assert (model.calls, trip.observed) == (19, 14)  # the question is the same when its last four parts are


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


async def test_no_news_ends_a_loop_whose_model_is_cut_off_every_time() -> None:
    model = ScriptedModel(lambda n, _: LlmResponse(error_code="SAFETY", error_message="blocked"))
    seen = await observe(LoopAgent(name="loop", sub_agents=[agent(model)]))
    assert_stopped(seen.result, "no_news")
    assert model.calls < 25


async def test_no_news_leaves_a_loop_with_new_words_alone() -> None:
    writer = agent(ScriptedModel(lambda n, _: text(f"draft {n}")), name="writer")
    critic = agent(ScriptedModel(lambda n, _: text("Needs more detail.")), name="critic")
    assert (await observe(LoopAgent(name="loop", sub_agents=[writer, critic], max_iterations=20))).decisions == []


async def test_no_news_leaves_edit_test_edit_alone() -> None:
    edit, check = Tool("edit", lambda n: {"saved": n}), Tool("check", [{"status": "failed", "tests": 3}])
    script = lambda n, _: text("gave up") if n > 24 else call("edit", q=n) if n % 2 else call("check")  # noqa: E731
    seen = await observe(agent(script, edit, check))
    assert seen.decisions == []
    assert (edit.runs, check.runs) == (12, 12)


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


async def test_same_call_with_ever_new_answers_ends_late() -> None:
    look, model = Tool("look", lambda n: {"n": n}), ScriptedModel([call("look", q=1)])
    seen = await observe(agent(model, look))
    assert seen.rules == [("nudge", "same_call"), ("stop", "same_call")]
    assert (look.runs, model.calls) == (120, 120)
    assert assert_stopped(seen.result, "same_call").observed == 120


async def test_same_call_leaves_other_calls_between_alone() -> None:
    look = Tool("look", lambda n: {"n": n})
    script = lambda n, _: call("look", q=1 if n % 4 else n) if n <= 20 else text("done")  # noqa: E731
    seen = await observe(agent(script, look), rules={"same_call": {"nudge": 4, "stop": 6}})
    assert seen.decisions == []


# ---- failures -------------------------------------------------------------------------------------------------------

SAME_FAILURES = [
    pytest.param(lambda n: "Error: the file is locked", id="text"),
    pytest.param(lambda n: {"status": "partial_parse_error", "data": None}, id="status"),
    pytest.param(lambda n: {"error": f"timeout after {n} ms"}, id="error key"),
    pytest.param(lambda n: {"ok": False, "reason": "locked"}, id="flag"),
    pytest.param(lambda n: {"content": [{"type": "text", "text": "boom"}], "isError": True}, id="mcp"),
    pytest.param(lambda n: RuntimeError("the file is locked"), id="raised"),
]


def recover(tool: Any, args: Any, tool_context: Any, error: Exception) -> dict[str, Any]:
    """An agent's own on_tool_error callback."""
    return {"note": "something went wrong"}


@pytest.mark.parametrize("answers", SAME_FAILURES)
async def test_stall_is_nudged_then_refused_then_stopped_whatever_the_arguments(answers: Any) -> None:
    read, model = Tool("read", answers), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read, on_tool_error_callback=recover))
    assert seen.rules == [("nudge", "stall"), ("block", "stall"), ("stop", "stall")]
    assert (read.runs, model.calls) == (4, 6)
    assert assert_stopped(seen.result, "stall").tool == "read"
    assert assert_calls_answered(seen.result.session) == 6


@pytest.mark.parametrize("answers", SAME_FAILURES)
async def test_stall_lets_the_very_same_call_be_tried_three_times_more(answers: Any) -> None:
    read, model = Tool("read", answers), ScriptedModel([call("read", q=1)])
    seen = await observe(agent(model, read, on_tool_error_callback=recover))
    assert (read.runs, model.calls) == (7, 9)
    assert_stopped(seen.result)


@pytest.mark.parametrize("answers", SAME_FAILURES)
async def test_stall_obeys_max_identical_tool_results(answers: Any) -> None:
    read, model = Tool("read", answers), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read, on_tool_error_callback=recover), max_identical_tool_results=3)
    assert (read.runs, model.calls) == (3, 3)
    assert_stopped(seen.result, "stall")


async def test_stall_is_seen_through_a_plugin_that_asks_to_try_again() -> None:
    read, model, plugin = (
        Tool("read", lambda n: RuntimeError("the file is locked")),
        ScriptedModel(ask_new("read")),
        RunGuardPlugin(),
    )
    result = await play(agent(model, read), plugins=[plugin, ReflectAndRetryToolPlugin(max_retries=20)])
    assert_stopped(result, "stall")
    assert (read.runs, model.calls) == (4, 6)


async def test_stall_leaves_failures_between_successes_alone() -> None:
    read = Tool("read", lambda n: {"error": "locked"} if n % 3 else {"content": n})
    seen = await observe(agent(ask_new("read", 20), read))
    assert seen.decisions == []


async def test_stall_is_broken_by_another_tools_progress() -> None:
    read, wait = Tool("read", ["Error: locked"]), Tool("wait", lambda n: {"waited": n})
    script = lambda n, _: text("done") if n > 20 else call("read", q=n) if n % 2 else call("wait", q=n)  # noqa: E731
    seen = await observe(agent(script, read, wait))
    assert seen.decisions == []


async def test_a_failure_that_names_its_own_thing_is_about_that_one_alone() -> None:
    """A sweep over codes: eight expired ones are eight answers.

    Another wording of one request that fails is still one failure.
    """
    redeem = Tool("redeem", lambda n: {"success": False, "error": f"coupon {200 + n} has expired"})
    seen = await observe(agent(lambda n, _: call("redeem", q=200 + n) if n <= 8 else text("none is valid"), redeem))
    assert [rule for _, rule in seen.rules] == ["tool_failures"]
    assert seen.result.texts == ["none is valid"]
    again, model = (
        Tool("redeem", lambda n: {"success": False, "error": "coupon 7 has expired"}),
        ScriptedModel(ask_new("redeem")),
    )
    assert_stopped((await observe(agent(model, again))).result, "stall")
    assert model.calls == 6


@pytest.mark.parametrize("args", [{"table": "customers", "row": "C-17"}, {"row": "C-17", "table": "customers"}])
async def test_which_of_its_arguments_a_failure_names_first_does_not_matter(args: dict[str, str]) -> None:
    """A store may keep arguments in another order, and one of them may be the same in every call."""

    def lock(table: str, row: str) -> dict[str, str]:
        return {"error": f"{table} row {row} is busy"}

    script = lambda n, _: call("lock", **{**args, "row": f"C-{n + 10}"}) if n <= 8 else text("done")  # noqa: E731
    seen = await observe(agent(script, lock))
    assert [rule for _, rule in seen.rules] == ["tool_failures"]
    assert seen.result.texts == ["done"]


@pytest.mark.parametrize(
    "failure",
    [{"error": "order A-7 not found"}, RuntimeError("No brokers available"), LookupError("order A-7 not found")],
    ids=repr,
)
async def test_a_side_effect_that_was_told_as_an_error_may_be_tried_again(failure: Any) -> None:
    pay = Tool("pay", lambda n: failure if n == 1 else {"paid": n})
    seen = await observe(
        agent([call("pay", q=1), call("pay", q=1), text("done")], pay, on_tool_error_callback=recover),
        tools={"pay": ToolRule(once=True)},
    )
    assert (pay.runs, seen.decisions) == (2, [])


async def test_a_side_effect_for_another_reason_is_another_one() -> None:
    booked: list[str] = []

    def book(amount: int, justification: str, attempt: int) -> dict[str, bool]:
        booked.append(justification)
        return {"booked": True}

    script = [call("book", amount=20, justification=f"taxi {n}", attempt=n) for n in range(3)]
    seen = await observe(agent([*script, text("done")], book), tools={"book": ToolRule(once=True)})
    assert (booked, seen.decisions) == (["taxi 0", "taxi 1", "taxi 2"], [])


async def test_what_is_raised_about_a_thing_that_is_not_there_is_a_sweep() -> None:
    find = Tool("find", lambda n: LookupError(f"order {n} not found") if n < 20 else {"id": n})
    seen = await observe(agent(ask_new("find", 20), find, on_tool_error_callback=recover))
    assert seen.rules == [("nudge", "empty")]
    assert (find.runs, seen.result.texts) == (20, ["done"])


async def test_stall_is_not_broken_by_what_an_agent_tells_itself() -> None:
    read, think = Tool("read", [{"status": "partial_parse_error"}]), Tool("think", ["noted"])
    model = ScriptedModel(lambda n, _: call("read", q=n) if n % 2 else call("think", q=n))
    assert_stopped((await observe(agent(model, read, think))).result, "stall")
    assert model.calls <= 12


WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


async def test_tool_failures_counts_failures_of_every_kind() -> None:
    read, model = Tool("read", lambda n: {"error": f"{WORDS[n]} is broken"}), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read))
    assert seen.rules == [("nudge", "tool_failures"), ("block", "tool_failures"), ("stop", "tool_failures")]
    assert (read.runs, model.calls) == (9, 11)
    assert_stopped(seen.result, "tool_failures")


async def test_max_tool_failures_allows_exactly_its_number() -> None:
    read, model = Tool("read", lambda n: {"error": f"{WORDS[n]} is broken"}), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read), max_tool_failures=3)
    assert (read.runs, model.calls) == (3, 5)
    assert_stopped(seen.result, "tool_failures")


async def test_tool_failures_leaves_a_tool_that_recovers_alone() -> None:
    read = Tool("read", lambda n: {"ok": True, "n": n} if n % 5 == 0 else {"error": f"{WORDS[n % 12]} is broken"})
    seen = await observe(agent(ask_new("read", 20), read))
    assert seen.decisions == []


@pytest.mark.parametrize("answers", [[[]], [""], [{"results": []}], ["not found"], [{"status": "not_found"}]], ids=str)
async def test_empty_answers_to_new_questions_are_only_nudged(answers: Any) -> None:
    find = Tool("find", answers)
    seen = await observe(agent(ask_new("find", 20), find))
    assert seen.rules == [("nudge", "empty")]
    assert find.runs == 20
    assert seen.result.texts == ["done"]


async def test_empty_can_be_told_to_stop_and_leaves_hits_alone() -> None:
    nothing, something = Tool("find", [[]]), Tool("find", lambda n: [] if n % 3 else [n])
    stopped = await observe(agent(ask_new("find", 20), nothing), rules={"empty": {"stop": 4}})
    assert_stopped(stopped.result, "empty")
    assert nothing.runs == 4
    healthy = await observe(agent(ask_new("find", 20), something), rules={"empty": {"stop": 4}})
    assert healthy.decisions == []


# ---- hand-offs and depth --------------------------------------------------------------------------------------------


async def test_hand_offs_without_news_are_nudged_then_stopped() -> None:
    model = ScriptedModel(always(transfer("B"), transfer("A")))
    root = agent(model, name="A", sub_agents=[agent(model, name="B")])
    seen = await observe(root)
    assert seen.rules == [("nudge", "handoff"), ("stop", "handoff")], "one circle is told once"
    assert model.calls == 11  # the sixth A→B
    assert assert_stopped(seen.result, "handoff").observed == 6


async def test_the_hand_off_nudge_goes_into_the_next_request_and_not_into_the_history() -> None:
    model = ScriptedModel(lambda n, _: text("done") if n >= 9 else transfer("B") if n % 2 else transfer("A"))
    root = agent(model, name="A", sub_agents=[agent(model, name="B")])
    service = InMemorySessionService()
    seen = await observe(root, play_with={"session_service": service})
    said = {decision.for_model for decision in seen.decisions}
    heard = [sum(str(prompts([request])).count(words) for words in said) for request in model.requests]
    assert heard == [0] * 7 + [1, 0]
    again = await play(root, "more?", plugins=[RunGuardPlugin()], session_service=service)
    assert again.texts
    for words in said:
        assert words not in str(told(again.session.events))
        assert words not in str(prompts(model.requests[-1:]))


async def test_one_return_to_the_parent_is_normal() -> None:
    lead = ScriptedModel([transfer("B"), transfer("B"), text("done")])
    child = ScriptedModel([transfer("A")])
    seen = await observe(agent(lead, name="A", sub_agents=[agent(child, name="B")]), max_handoff_repeats=3)
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


def _nest(depth: int) -> tuple[LlmAgent, list[ScriptedModel]]:
    """Agents that call each other as tools, ``depth`` delegations deep."""
    models = [ScriptedModel([text(f"a{depth} is done")])]
    inner = agent(models[0], name=f"a{depth}")
    for level in range(depth - 1, -1, -1):
        models.append(ScriptedModel([call(f"a{level + 1}", request="go on"), text(f"a{level} is done")]))
        inner = agent(models[-1], AgentTool(inner), name=f"a{level}")
    return inner, models[::-1]


async def test_the_sixth_delegation_is_refused_and_its_caller_goes_on() -> None:
    root, models = _nest(7)
    seen = await observe(root)
    assert seen.rules == [("block", "depth")]
    assert [model.calls for model in models] == [2, 2, 2, 2, 2, 2, 0, 0]
    assert seen.result.texts == ["a0 is done"]
    assert seen.plugin.trips == []


async def test_five_delegations_are_allowed() -> None:
    root, models = _nest(5)
    seen = await observe(root)
    assert seen.decisions == []
    assert [model.calls for model in models] == [2, 2, 2, 2, 2, 1]


async def test_an_agent_that_calls_itself_is_held() -> None:
    model = ScriptedModel(lambda n, _: call("again", request=f"{n}") if n <= 3 else text("done"))
    root = agent(model, name="again")
    root.tools.append(AgentTool(root))
    seen = await observe(root, max_delegation_depth=2)
    assert [rule for rule in seen.rules if rule[0] == "block"] == [("block", "depth")]
    assert model.calls == 6  # three levels: each asks once and answers once
    assert seen.result.texts == ["done"]


async def test_a_transfer_ever_deeper_is_refused_where_the_model_hears_it() -> None:
    models = [ScriptedModel([transfer(f"c{level + 1}"), text(f"c{level} answers")]) for level in range(8)]
    below: LlmAgent | None = None
    for level in range(7, -1, -1):
        below = agent(models[level], name=f"c{level}", sub_agents=[below] if below else [])
    seen = await observe(below)
    assert seen.rules == [("block", "depth")]
    assert [model.calls for model in models] == [1, 1, 1, 1, 1, 2, 0, 0]
    assert seen.result.texts == ["c5 answers"]
    assert_calls_answered(seen.result.session)


async def test_containers_are_no_delegations() -> None:
    inner: Any = agent([text("done")])
    for level in range(9):
        inner = SequentialAgent(name=f"s{level}", sub_agents=[inner])
    seen = await observe(inner, max_delegation_depth=1)
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


# ---- growth ---------------------------------------------------------------------------------------------------------


async def test_max_event_cost_ratio_stops_at_its_ratio_and_the_snapshot_shows_it() -> None:
    ratios: list[Any] = []

    def dig(q: int) -> dict[str, int]:
        ratios.append(plugin.snapshot()["runs"][0]["growth"].get("worker"))
        return {"found": q}

    plugin = RunGuardPlugin(max_event_cost_ratio=3, cost_baseline_events=2)
    model = ScriptedModel(ask_new("dig"), prompt_tokens=lambda n: 1_000 * n)
    seen = await observe(agent(model, dig), plugin=plugin)
    assert model.calls == 5  # (4,000 + 5,000) / (1,000 + 2,000)
    trip = assert_stopped(seen.result, "growth")
    assert (trip.observed, trip.limit) == (3, 3)
    assert ratios == [None, None, None, 2.333, 3.0]
    assert_calls_answered(seen.result.session)


async def test_growth_does_not_stop_a_run_whose_last_answer_is_there() -> None:
    model = ScriptedModel(ask_new("dig", 4), prompt_tokens=lambda n: 1_000 * n)
    seen = await observe(
        agent(model, Tool("dig", lambda n: {"found": n})),
        max_event_cost_ratio=3,
        cost_baseline_events=2,
        on_stop="raise",
    )
    assert model.calls == 5  # the fifth answers and reaches the ratio: nothing is left to stop
    assert seen.result.texts == ["done"]
    assert seen.plugin.trips == []


async def test_growth_warns_by_default_and_changes_nothing() -> None:
    dig = Tool("dig", lambda n: {"found": n})
    seen = await observe(agent(ScriptedModel(ask_new("dig", 14), prompt_tokens=lambda n: 1_000 * n), dig))
    assert seen.rules == [("warn", "growth")]
    without = await play(
        agent(ScriptedModel(ask_new("dig", 14), prompt_tokens=lambda n: 1_000 * n), Tool("dig", lambda n: {"found": n}))
    )
    assert told(seen.result.events) == told(without.events)


async def test_growth_compares_an_agent_with_itself_only() -> None:
    def digger(name: str, size: int) -> LlmAgent:
        return agent(
            ScriptedModel(ask_new(f"dig_{name}", 5), prompt_tokens=size),
            Tool(f"dig_{name}", lambda n: {"n": n}),
            name=name,
        )

    root = SequentialAgent(name="seq", sub_agents=[digger("small", 500), digger("large", 50_000)])
    seen = await observe(root, max_event_cost_ratio=2, cost_baseline_events=2)
    assert seen.decisions == []


# ---- plain limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "stopped"), [(3, False), (4, True)])
async def test_max_fan_out_counts_the_branches_of_one_node(size: int, stopped: bool) -> None:
    model = ScriptedModel([text("x")])
    root = ParallelAgent(name="par", sub_agents=[agent(model, name=f"p{i}") for i in range(size)])
    seen = await observe(root, max_fan_out=3)
    assert model.calls == (0 if stopped else size)
    assert [trip.rule for trip in seen.plugin.trips] == (["fan_out"] if stopped else [])


async def test_max_tool_calls_allows_exactly_its_number() -> None:
    step, model = Tool("step", lambda n: {"n": n}), ScriptedModel(ask_new("step"))
    seen = await observe(agent(model, step), max_tool_calls=4)
    assert (step.runs, model.calls) == (4, 5)
    assert assert_stopped(seen.result, "tool_calls").limit == 4
    assert assert_calls_answered(seen.result.session) == 5
    step = Tool("step", lambda n: {"n": n})
    assert (await observe(agent(ask_new("step", 4), step), max_tool_calls=4)).decisions == []


async def test_max_tool_calls_within_one_response_answers_every_call() -> None:
    step, model = (
        Tool("step", lambda n: {"n": n}),
        ScriptedModel([calls(*(call("step", q=n) for n in range(10))), text("done")]),
    )
    seen = await observe(agent(model, step), max_tool_calls=4)
    assert (step.runs, model.calls) == (4, 1)
    assert len(seen.plugin.trips) == 1
    assert assert_calls_answered(seen.result.session) == 10


async def test_a_tools_own_limit_refuses_the_surplus_and_then_stops() -> None:
    step, model = Tool("step", lambda n: {"n": n}), ScriptedModel(ask_new("step"))
    seen = await observe(agent(model, step), tools={"step": ToolRule(max_calls=2)})
    assert seen.rules == [("block", "tool_limit"), ("stop", "tool_limit")]
    assert (step.runs, model.calls) == (2, 4)
    step, other = Tool("step", lambda n: {"n": n}), Tool("other", lambda n: {"n": n})
    script = [call("step", q=1), call("step", q=2), *(call("other", q=n) for n in range(5)), text("done")]
    assert (await observe(agent(script, step, other), tools={"step": ToolRule(max_calls=2)})).decisions == []


async def test_a_tools_own_limit_counts_the_whole_tree() -> None:
    step = Tool("step", lambda n: {"n": n})
    inner = agent(ask_new("step", 3), step, name="inner")
    root = agent([call("inner", request="a"), call("step", q=100), text("done")], AgentTool(inner), step, name="outer")
    seen = await observe(root, tools={"step": ToolRule(max_calls=3)})
    assert step.runs == 3
    assert seen.rules == [("block", "tool_limit")]
    assert seen.result.texts == ["done"]


async def test_a_huge_answer_never_reaches_the_model() -> None:
    fetch, model = (
        Tool("fetch", ["x" * 3_000_000, "small"]),
        ScriptedModel([call("fetch", q=1), call("fetch", q=2), text("done")]),
    )
    seen = await observe(agent(model, fetch), max_tool_result_chars=10_000)
    assert [decision.action.word for decision in seen.decisions] == ["block"]
    assert max(len(str(prompts([request]))) for request in model.requests) < 20_000
    assert len(str(told(seen.result.session.events))) < 30_000
    assert seen.answers[0]["status"] == "answer_left_out"
    assert seen.answers[0]["message"].startswith("'fetch' was executed; its answer was too large")
    assert seen.answers[1] == {"result": "small"}
    assert seen.result.texts == ["done"]


async def test_answers_up_to_the_size_limit_are_untouched() -> None:
    fetch = Tool("fetch", ["x" * 9_000])
    seen = await observe(agent([call("fetch", q=1), text("done")], fetch), max_tool_result_chars=10_000)
    assert seen.decisions == []
    assert seen.answers == [{"result": "x" * 9_000}]


async def test_max_seconds_ends_an_async_tool_in_flight() -> None:
    ended: list[str] = []
    clock = FakeClock()  # only the wait inside the tool is real: what comes before it may be slow

    def thinks_long(n: int, _: Any) -> Any:
        clock.advance(59.9)
        return call("crawl", q=n)

    async def crawl(q: int) -> dict[str, int]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            clock.advance(0.2)
            raise
        return {"q": q}

    model = ScriptedModel(thinks_long)
    seen = await observe(agent(model, crawl), max_seconds=60, clock=clock)
    assert (model.calls, ended) == (1, ["cancelled"])
    assert_stopped(seen.result, "deadline")
    assert assert_calls_answered(seen.result.session) == 1


async def test_max_seconds_judges_a_sync_tool_when_it_returns() -> None:
    clock = FakeClock()

    def crawl(q: int) -> dict[str, int]:
        clock.advance(61)
        return {"q": q}

    model = ScriptedModel(ask_new("crawl"))
    seen = await observe(agent(model, crawl), max_seconds=60, clock=clock)
    assert model.calls == 1
    trip = assert_stopped(seen.result, "deadline")
    assert (trip.observed, trip.limit) == (61, 60)
    assert seen.answers == [{"q": 1}], "the paid answer is kept"


async def test_max_seconds_allows_exactly_its_time() -> None:
    clock = FakeClock()

    def crawl(q: int) -> dict[str, int]:
        clock.advance(20)
        return {"q": q}

    seen = await observe(agent(ask_new("crawl", 3), crawl), max_seconds=60, clock=clock)
    assert seen.decisions == []


async def test_max_seconds_does_not_stop_a_run_whose_last_answer_is_there() -> None:
    clock = FakeClock()

    def late(n: int, _: Any) -> Any:
        clock.advance(61)
        return text("done")

    seen = await observe(agent(late), max_seconds=60, clock=clock, on_stop="raise")
    assert seen.result.texts == ["done"]
    assert seen.plugin.trips == []
    assert not any(event.error_code for event in seen.result.events)


async def test_a_tools_own_time_ends_that_call_and_the_run_goes_on() -> None:
    async def crawl(q: int) -> dict[str, int]:
        await asyncio.sleep(30 if q == 1 else 0)
        return {"q": q}

    seen = await observe(agent(ask_new("crawl", 2), crawl), tools={"crawl": ToolRule(max_seconds=0.1)})
    assert "too long" in str(seen.answers[0])
    assert seen.answers[1] == {"q": 2}
    assert seen.result.texts == ["done"]
    assert seen.plugin.trips == []


async def test_a_tools_own_timeout_error_stays_its_own() -> None:
    async def crawl(q: int) -> dict[str, int]:
        raise TimeoutError("the server took too long")

    seen = await observe(
        agent(ask_new("crawl", 1), crawl, on_tool_error_callback=recover), tools={"crawl": ToolRule(max_seconds=10)}
    )
    assert seen.answers == [{"note": "something went wrong"}]
    assert seen.result.texts == ["done"]


# ---- what is said about a tool --------------------------------------------------------------------------------------


def _slow_job(clock: FakeClock, answers: Callable[[int], Any]) -> Tool:
    def answer(n: int) -> Any:
        clock.advance(200)
        return answers(n)

    return Tool("check_job", answer)


async def test_polling_is_judged_by_time_without_change() -> None:
    clock = FakeClock()
    job, model = _slow_job(clock, lambda n: {"status": "RUNNING"}), ScriptedModel([call("check_job", q=1)])
    seen = await observe(agent(model, job), tools={"check_*": ToolRule(polling=True)}, clock=clock)
    assert seen.rules == [("nudge", "polling"), ("stop", "polling")]
    assert (job.runs, model.calls) == (10, 10)
    assert assert_stopped(seen.result, "polling").observed == 1_800


async def test_polling_that_changes_now_and_then_is_left_alone() -> None:
    clock = FakeClock()
    job = _slow_job(clock, lambda n: {"status": "RUNNING", "step": n // 3})
    seen = await observe(
        agent([call("check_job", q=1)] * 30 + [text("done")], job),
        tools={"check_job": ToolRule(polling=True)},
        clock=clock,
    )
    assert seen.decisions == []


async def test_paging_moves_on_whatever_it_answers() -> None:
    scroll = Tool("scroll", [{"ok": True}])
    script = [call("scroll")] * 30 + [text("done")]
    assert (await observe(agent(script, scroll), tools={"scroll": ToolRule(paging=True)})).decisions == []
    assert assert_stopped((await observe(agent(script, Tool("scroll", [{"ok": True}])))).result).rule == "repetition"


async def test_after_a_write_reading_again_is_no_repetition() -> None:
    def tools() -> list[Tool]:
        return [Tool("read", [{"value": 1}]), Tool("write", [{"ok": True}])]

    script = [step for _ in range(12) for step in (call("read"), call("write"))] + [text("done")]
    assert (await observe(agent(script, *tools()), tools={"write": ToolRule(writes=True)})).decisions == []
    assert assert_stopped((await observe(agent(script, *tools()))).result).rule == "no_news"


async def test_once_is_once_per_session_and_arguments() -> None:
    send, service = Tool("send_mail", [{"sent": True}]), InMemorySessionService()
    plugin = RunGuardPlugin(tools={"send_*": ToolRule(writes=True, once=True)})
    root = agent(
        [
            call("send_mail", q=1),
            call("send_mail", q=1),
            call("send_mail", q=2),
            text("done"),
            call("send_mail", q=1),
            text("done again"),
        ],
        send,
    )
    first = await play(root, plugins=[plugin], session_service=service)
    assert (send.runs, first.texts) == (2, ["done"])
    second = await play(root, "again", plugins=[plugin], session_service=service)
    assert (send.runs, second.texts) == (2, ["done again"])
    other = await play(
        agent([call("send_mail", q=1), text("done")], send), plugins=[plugin], session_service=service, session_id="s2"
    )
    assert (send.runs, other.texts, plugin.trips) == (3, ["done"], [])


async def test_once_lets_a_failure_be_tried_again() -> None:
    send = Tool("send_mail", [{"error": "greylisted"}, {"sent": True}])
    seen = await observe(
        agent([call("send_mail", q=1)] * 3 + [text("done")], send), tools={"send_mail": ToolRule(once=True)}
    )
    assert send.runs == 2
    assert seen.rules == [("block", "once")]


async def test_exempt_leaves_a_tool_to_the_limits_alone() -> None:
    think = Tool("think", ["hm"])
    script = [call("think")] * 15 + [text("done")]
    assert (await observe(agent(script, think), tools={"think": ToolRule(exempt=True)})).decisions == []
    limited = await observe(
        agent(script, Tool("think", ["hm"])), tools={"think": ToolRule(exempt=True)}, max_tool_calls=10
    )
    assert_stopped(limited.result, "tool_calls")


async def test_a_rule_may_stand_beside_the_tool() -> None:
    sent: list[int] = []

    @runguard.tool(once=True)
    def send_mail(to: int) -> dict[str, bool]:
        sent.append(to)
        return {"sent": True}

    seen = await observe(agent([call("send_mail", to=1)] * 2 + [call("send_mail", to=2), text("done")], send_mail))
    assert sent == [1, 2]
    assert seen.rules == [("block", "once")]


async def test_the_policys_word_wins_over_the_one_beside_the_tool() -> None:
    @runguard.tool(exempt=True)
    def think() -> str:
        return "hm"

    assert (await observe(agent([call("think")] * 12 + [text("done")], think))).decisions == []
    seen = await observe(agent([call("think")], think), tools={"think": ToolRule(max_calls=2)})
    assert seen.plugin.trips


async def test_identity_and_volatile_arguments() -> None:
    look = Tool("look", ["same"])
    seen = await observe(agent(ask_new("look"), look), tools={"look": ToolRule(volatile=("q",))})
    assert_stopped(seen.result, "repetition")
    assert look.runs == 7


async def test_failed_says_what_a_failure_is() -> None:
    look = Tool("look", lambda n: {"verdict": "nope", "n": 7})
    seen = await observe(agent(ask_new("look"), look), tools={"look": ToolRule(failed={"verdict": ["nope"]})})
    assert_stopped(seen.result, "stall")
    assert (await observe(agent(ask_new("look", 9), Tool("look", [{"verdict": "nope"}])))).decisions == []


# ---- tools as nodes of a workflow -----------------------------------------------------------------------------------


def _tool_circle(tool: Tool, rounds: int) -> Workflow:
    """A Workflow that runs a tool without any agent, round and round."""
    done = 0

    def start(node_input: Any) -> dict[str, int]:
        return {"q": 0}

    def again(node_input: Any) -> Event:
        nonlocal done
        done += 1
        return Event(route="again" if done < rounds else "good", output={"q": done})

    def publish(node_input: Any) -> str:
        return "published"

    fetch = FunctionTool(tool)
    return Workflow(
        name="wf", edges=[("START", start), (start, fetch), (fetch, again), (again, {"again": fetch, "good": publish})]
    )


async def test_a_circle_of_tool_nodes_ends_at_its_limit() -> None:
    class Asked(BasePlugin):
        times = 0

        async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
            Asked.times += 1

    await play(_tool_circle(Tool("fetch", lambda n: {"n": n}), 1), plugins=[Asked(name="asked")])
    if not Asked.times:
        pytest.skip("this ADK tells no plugin about tool nodes")
    fetch = Tool("fetch", lambda n: {"n": n})
    seen = await observe(_tool_circle(fetch, 10_000), max_tool_calls=5)
    assert fetch.runs == 5
    assert assert_stopped(seen.result, "tool_calls").tool == "fetch"
    assert len(seen.result.events) < 40


async def test_tool_nodes_are_the_same_with_and_without_the_guard() -> None:
    seen = await observe(_tool_circle(Tool("fetch", lambda n: {"n": n}), 4))
    without = await play(_tool_circle(Tool("fetch", lambda n: {"n": n}), 4))
    assert seen.decisions == []
    assert told(seen.result.events) == told(without.events)


# ---- special answers ------------------------------------------------------------------------------------------------


async def _adk_answers_unknown_tools() -> bool:
    """Newer versions of ADK tell the model that a tool does not exist, older ones end the run."""
    return (await play(agent([call("no_such_tool"), text("done")]), catch=True)).error is None


async def test_tools_that_do_not_exist() -> None:
    model, answered = ScriptedModel(lambda n, _: call(f"imagined_{n % 2}", q=n)), await _adk_answers_unknown_tools()
    plugin = RunGuardPlugin()
    result = await play(agent(model, Tool("real", ["x"])), plugins=[plugin], catch=True)
    if answered:
        assert_stopped(result)
        assert model.calls <= 18
        assert_calls_answered(result.session)
    else:
        assert isinstance(result.error, ValueError)
        assert model.calls == 1
    assert plugin.snapshot()["runs"] == []


async def test_the_same_imagined_tool_is_stopped_soon() -> None:
    if not await _adk_answers_unknown_tools():
        pytest.skip("this ADK ends the run itself")
    model = ScriptedModel(lambda n, _: call("imagined", q=n))
    seen = await observe(agent(model, Tool("real", ["x"])))
    assert_stopped(seen.result)
    assert model.calls == 6


async def test_a_pending_confirmation_is_neither_failure_nor_repeat() -> None:
    paid: list[int] = []

    def pay(q: int) -> dict[str, int]:
        paid.append(q)
        return {"paid": q}

    def build() -> LoopAgent:
        asks = agent([call("pay", q=1)], FunctionTool(pay, require_confirmation=True))
        return LoopAgent(name="loop", max_iterations=6, sub_agents=[asks])

    seen = await observe(build(), max_identical_tool_results=2)
    without = await play(build())
    assert seen.decisions == []
    assert paid == []
    assert told(seen.result.events) == told(without.events)


async def test_a_confirmed_call_runs_as_it_does_without_the_guard() -> None:
    async def pay_and_confirm(*plugins: BasePlugin) -> list[Any]:
        pay, service = Tool("pay", [{"paid": 1}]), InMemorySessionService()
        await service.create_session(app_name="app", user_id="u1", session_id="s1")
        root = agent([call("pay", q=1), text("paid")], FunctionTool(pay, require_confirmation=True))
        runner = Runner(app=App(name="app", root_agent=root, plugins=list(plugins)), session_service=service)
        events: list[Event] = []
        part = types.Part(text="go")
        for _ in range(2):
            message = types.Content(role="user", parts=[part])
            async with asyncio.timeout(10):
                events += [
                    event async for event in runner.run_async(user_id="u1", session_id="s1", new_message=message)
                ]
            request = next(
                c for event in events for c in event.get_function_calls() if c.name == "adk_request_confirmation"
            )
            part = types.Part(
                function_response=types.FunctionResponse(id=request.id, name=request.name, response={"confirmed": True})
            )
        assert pay.runs == 1
        return told(events)

    assert await pay_and_confirm(RunGuardPlugin(max_identical_tool_results=2)) == await pay_and_confirm()


@pytest.mark.parametrize("answer", [None, {"status": "pending", "ticket": 7}], ids=["silent", "pending"])
async def test_long_running_tools_are_left_alone(answer: Any) -> None:
    def build() -> LlmAgent:
        def submit(q: int) -> Any:
            """Submits a job."""
            return answer

        return agent([call("submit", q=1), text("submitted")], LongRunningFunctionTool(submit))

    seen = await observe(build())
    without = await play(build())
    assert seen.decisions == []
    assert told(seen.result.events) == told(without.events)
    assert_calls_answered(seen.result.session, open_calls=int(answer is None))


# ---- at once --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "answers"),
    [
        ([call("look", q=1)] * 8, ["same"]),
        ([call("look", q=n) for n in range(8)], [{"error": "locked"}]),
        ([call("look", q=n) for n in range(8)], [[]]),
    ],
    ids=["equal calls", "equal failures", "nothing found"],
)
async def test_calls_of_one_response_count_once(batch: Any, answers: Any) -> None:
    look = Tool("look", answers)
    seen = await observe(agent([calls(*batch), calls(*batch), text("done")], look))
    assert seen.decisions == []
    assert look.runs == 16
    assert seen.result.texts == ["done"]


async def test_equal_batches_are_repetition() -> None:
    look, model = Tool("look", ["same"]), ScriptedModel([calls(*(call("look", q=n) for n in range(4)))])
    seen = await observe(agent(model, look))
    assert_stopped(seen.result, "repetition")
    assert (look.runs, model.calls) == (28, 9)
    assert assert_calls_answered(seen.result.session) == 36


def _same_work(name: str) -> LlmAgent:
    return agent(
        [call("look", q=1), call("look", q=1), text(f"{name} is done")], Tool("look", [{"error": "locked"}]), name=name
    )


async def test_parallel_branches_never_mix() -> None:
    root = ParallelAgent(name="par", sub_agents=[_same_work(f"p{i}") for i in range(10)])
    seen = await observe(root, max_identical_tool_results=3, max_tool_failures=3)
    assert seen.decisions == []
    assert len(seen.result.texts) == 10


async def test_parallel_workers_of_a_workflow_never_mix() -> None:
    look = Tool("look", [{"error": "locked"}])
    model = ScriptedModel(
        lambda n, request: (
            text("done")
            if any(p.function_response for c in request.contents for p in c.parts or [])
            else call("look", q=1)
        )
    )
    worker = agent(model, look, parallel_worker=True)

    def split(node_input: Any) -> list[str]:
        return [f"room {n}" for n in range(10)]

    seen = await observe(Workflow(name="wf", edges=[("START", split), (split, worker)]), max_identical_tool_results=3)
    assert seen.decisions == []
    assert look.runs == 10


async def test_single_turn_agents_at_once_never_mix() -> None:
    helpers = [agent([text("same")], name=f"h{i}", mode="single_turn") for i in range(5)]
    batch = calls(*(call(f"h{i}", request="go") for i in range(5)))
    seen = await observe(
        agent([batch, batch, text("done")], name="lead", sub_agents=helpers), max_identical_tool_results=3
    )
    assert seen.decisions == []


async def test_agents_called_as_tools_at_once_never_mix() -> None:
    tools = [AgentTool(_same_work(f"t{i}")) for i in range(5)]
    batch = calls(*(call(f"t{i}", request="go") for i in range(5)))
    seen = await observe(agent([batch, text("done")], *tools, name="lead"), max_identical_tool_results=3)
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


# ---- what is judged -------------------------------------------------------------------------------------------------


async def test_what_the_users_after_tool_callback_makes_of_a_result_is_judged() -> None:
    def hide(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> dict[str, Any]:
        return {"status": "error", "message": "quota"}

    read = Tool("read", lambda n: {"n": n})
    seen = await observe(agent(ask_new("read"), read, after_tool_callback=hide))
    assert_stopped(seen.result, "stall")
    assert read.runs == 4

    def heal(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> dict[str, Any]:
        return {"from_cache": args["q"]}

    seen = await observe(agent(ask_new("read", 12), Tool("read", ["Error: locked"]), after_tool_callback=heal))
    assert seen.decisions == []


async def test_what_a_later_plugin_makes_of_a_result_is_judged() -> None:
    class Healing(BasePlugin):
        async def after_tool_callback(
            self, *, tool: Any, tool_args: Any, tool_context: Any, result: Any
        ) -> dict[str, Any]:
            return {"healed": tool_args["q"]}

    plugin = RunGuardPlugin(max_identical_tool_results=2)
    result = await play(
        agent(ask_new("read", 12), Tool("read", ["Error: locked"])), plugins=[plugin, Healing(name="healing")]
    )
    assert (result.texts, plugin.trips) == (["done"], [])


async def test_a_normalizer_says_what_counts() -> None:
    fetch = Tool("fetch", lambda n: {"body": "same", "etag": n * 7919})
    script = ScriptedModel([call("fetch", q=1)])
    seen = await observe(agent(script, fetch), tool_result_normalizer={"fetch": lambda answer: answer["body"]})
    assert_stopped(seen.result, "repetition")
    assert fetch.runs == 7
    fetch = Tool("fetch", lambda n: {"body": "same", "etag": n * 7919})
    seen = await observe(agent([call("fetch", q=1)] * 9 + [text("done")], fetch))
    assert seen.decisions == []


async def test_a_normalizer_that_raises_harms_nobody() -> None:
    fetch = Tool("fetch", lambda n: {"n": n})
    seen = await observe(
        agent(ask_new("fetch", 5), fetch), tool_result_normalizer={"fetch": lambda answer: answer["missing"]}
    )
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


# ---- nudges ---------------------------------------------------------------------------------------------------------


async def test_a_nudge_rides_on_the_answer_that_the_model_sees() -> None:
    look, model = Tool("look", [{"name": "Ann"}]), ScriptedModel([call("look", q=1)] * 4 + [text("Ann")])
    seen = await observe(agent(model, look))
    assert seen.rules == [("nudge", "repetition")]
    answers = [
        part.function_response.response
        for content in model.requests[-1].contents
        for part in content.parts
        if part.function_response
    ]
    assert [set(answer) for answer in answers] == [{"name"}, {"name"}, {"name"}, {"name", "runguard_notice"}]
    assert answers[-1]["runguard_notice"] == seen.decisions[0].for_model
    assert answers[-1]["name"] == "Ann"
    assert seen.result.texts == ["Ann"]


@pytest.mark.parametrize("answer", ["Ann", None, [1, 2]], ids=str)
async def test_a_nudge_rides_on_answers_of_any_shape(answer: Any) -> None:
    look, model = Tool("look", [answer]), ScriptedModel([call("look", q=1)] * 4 + [text("Ann")])
    seen = await observe(agent(model, look))
    assert seen.answers[-1] == {"result": answer, "runguard_notice": seen.decisions[0].for_model}


async def test_at_most_two_nudges_in_a_run() -> None:
    tools = [Tool(name, ["same"]) for name in "abcd"]
    script = [call(name) for name in "abcd" for _ in range(4)] + [text("done")]
    seen = await observe(agent(script, *tools))
    assert [rule for rule in seen.rules if rule[0] == "nudge"] == [("nudge", "repetition")] * 2
    assert sum("runguard_notice" in answer for answer in seen.answers) == 2
    assert seen.result.texts == ["done"]


async def test_the_tools_own_object_is_left_alone_by_a_nudge() -> None:
    kept = {"name": "Ann"}
    seen = await observe(agent([call("look", q=1)] * 4 + [text("done")], Tool("look", [kept])))
    assert seen.rules == [("nudge", "repetition")]
    assert kept == {"name": "Ann"}


# ---- the breaker across runs ----------------------------------------------------------------------------------------


class Service:
    """A tool that is down, or not."""

    def __init__(self) -> None:
        self.runs, self.down = 0, True

    def tool(self) -> Any:
        def fetch(q: int) -> dict[str, int]:
            self.runs += 1
            if self.down:
                raise ConnectionError(f"{WORDS[self.runs % 12]} refused")
            return {"q": q}

        return fetch


def _caller(service: Service, times: int) -> LlmAgent:
    return agent(ask_new("fetch", times), service.tool(), on_tool_error_callback=recover)


async def test_the_breaker_opens_on_exceptions_from_several_runs_and_then_sends_one_probe() -> None:
    clock, service = FakeClock(), Service()
    plugin = RunGuardPlugin(clock=clock, half_open_reset_seconds=30)

    def state() -> str | None:
        return plugin.snapshot()["breakers"].get("fetch")  # type: ignore[no-any-return]

    await play(_caller(service, 4), plugins=[plugin], session_id="s1")
    assert state() == "closed"
    await play(_caller(service, 1), plugins=[plugin], session_id="s2")
    assert (service.runs, state()) == (5, "open")

    refused = await play(_caller(service, 1), plugins=[plugin], session_id="s3")
    assert service.runs == 5
    assert "out of service" in str(told(refused.session.events))
    assert refused.texts == ["done"]

    clock.advance(30)
    assert state() == "half_open"
    await play(_caller(service, 1), plugins=[plugin], session_id="s4")
    assert (service.runs, state()) == (6, "open"), "the probe failed"

    clock.advance(30)
    service.down = False
    batch = agent([calls(call("fetch", q=1), call("fetch", q=2), call("fetch", q=3)), text("done")], service.tool())
    result = await play(batch, plugins=[plugin], session_id="s5")
    assert (service.runs, state()) == (7, "closed"), "one probe, whatever the concurrency"
    assert assert_calls_answered(result.session) == 3
    await play(_caller(service, 2), plugins=[plugin], session_id="s6")
    assert service.runs == 9
    assert plugin.trips == []


async def test_one_runs_failures_do_not_open_the_breaker_for_everybody() -> None:
    service = Service()
    plugin = RunGuardPlugin()
    await play(_caller(service, 7), plugins=[plugin])
    assert plugin.snapshot()["breakers"] == {"fetch": "closed"}


async def test_things_that_are_not_there_do_not_open_the_breaker() -> None:
    plugin, missing = RunGuardPlugin(), Tool("fetch", lambda n: LookupError(f"order {n} not found"))
    for number in range(8):
        await play(
            agent(ask_new("fetch", 1), missing, on_tool_error_callback=recover),
            plugins=[plugin],
            session_id=f"s{number}",
        )
    assert plugin.snapshot()["breakers"].get("fetch") in (None, "closed")


async def test_soft_failures_never_open_the_breaker() -> None:
    plugin = RunGuardPlugin()
    for number in range(6):
        await play(
            agent(ask_new("read", 2), Tool("read", [{"error": "locked"}])), plugins=[plugin], session_id=f"s{number}"
        )
    assert plugin.snapshot()["breakers"].get("read") in (None, "closed")
    assert plugin.trips == []


async def test_an_exception_that_nobody_recovers_opens_it_too() -> None:
    service, plugin = Service(), RunGuardPlugin()
    for number in range(5):
        result = await play(
            agent(ask_new("fetch", 1), service.tool()), plugins=[plugin], session_id=f"s{number}", catch=True
        )
        assert isinstance(result.error, ConnectionError)
    assert plugin.snapshot()["breakers"] == {"fetch": "open"}
    assert plugin.snapshot()["runs"] == []


# ---- install --------------------------------------------------------------------------------------------------------


async def test_install_guards_runners_without_a_plugin_and_uninstall_lets_go() -> None:
    plugin = runguard.install(max_model_calls=3)
    step = Tool("step", lambda n: {"n": n})
    stopped = await play(agent(ask_new("step", 9), step))
    assert_stopped(stopped, "model_calls")
    assert len(plugin.trips) == 1
    runguard.uninstall()
    free = await play(agent(ask_new("step", 9), step))
    assert free.texts == ["done"]


async def test_an_apps_own_plugin_wins_over_install() -> None:
    installed, own = runguard.install(max_model_calls=2), RunGuardPlugin(max_model_calls=4)
    model = ScriptedModel(ask_new("step", 9))
    result = await play(agent(model, Tool("step", lambda n: {"n": n})), plugins=[own])
    assert model.calls == 4
    assert assert_stopped(result).limit == 4
    assert (len(own.trips), installed.trips) == (1, [])


@pytest.mark.parametrize("include_plugins", [True, False])
async def test_install_reaches_every_agent_tool(include_plugins: bool) -> None:
    plugin = runguard.install(max_model_calls=5)
    outer, inner = ScriptedModel([call("inner", request="go")]), ScriptedModel(ask_new("step"))
    called = AgentTool(agent(inner, Tool("step", lambda n: {"n": n}), name="inner"), include_plugins=include_plugins)
    result = await play(agent(outer, called, name="outer"))
    assert (outer.calls, inner.calls) == (1, 4)
    assert_stopped(result, "model_calls")
    assert len(plugin.trips) == 1


async def test_a_tools_context_still_works_under_the_guard() -> None:
    def note(q: int, tool_context: ToolContext) -> dict[str, int]:
        tool_context.state[f"note_{q}"] = q
        return {"noted": q}

    seen = await observe(agent(ask_new("note", 3), note))
    assert {"note_1": 1, "note_2": 2, "note_3": 3}.items() <= seen.result.session.state.items()


async def test_no_news_ends_a_loop_that_says_nothing_for_ever() -> None:
    model = ScriptedModel(lambda n, _: LlmResponse(content=types.Content(role="model", parts=[])))
    seen = await observe(LoopAgent(name="loop", sub_agents=[agent(model)]))
    assert_stopped(seen.result, "no_news")
    assert model.calls == 15


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


async def test_a_declared_poll_is_left_alone_under_an_explicit_limit() -> None:
    _, agent = _asks_in_other_words(lambda n: {"status": "pending"})
    seen = await observe(agent, max_identical_tool_results=3, tools={"search": ToolRule(polling=True)})
    assert seen.result.trips == []


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
