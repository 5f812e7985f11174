"""Loops of tool calls on real ADK runs: repeated calls, circles, failures, and calls that are not what they seem."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, SequentialAgent
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins import ReflectAndRetryToolPlugin
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from runguard import ToolRule
from runguard.adk import RunGuardPlugin
from runguard.core.decision import NOTICE_KEY
from runguard.testing import (
    FakeClock,
    ScriptedModel,
    assert_calls_answered,
    assert_stopped,
    call,
    calls,
    run,
    text,
)
from tests.kit.adk_runs import observe, play, told
from tests.kit.rule_agents import Tool, agent, always, ask_new, recover

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


# ---- failures -------------------------------------------------------------------------------------------------------


SAME_FAILURES = [
    pytest.param(lambda n: "Error: the file is locked", id="text"),
    pytest.param(lambda n: {"status": "partial_parse_error", "data": None}, id="status"),
    pytest.param(lambda n: {"error": f"timeout after {n} ms"}, id="error key"),
    pytest.param(lambda n: {"ok": False, "reason": "locked"}, id="flag"),
    pytest.param(lambda n: {"content": [{"type": "text", "text": "boom"}], "isError": True}, id="mcp"),
    pytest.param(lambda n: RuntimeError("the file is locked"), id="raised"),
]


@pytest.mark.parametrize("answers", SAME_FAILURES)
async def test_stall_is_nudged_then_refused_then_stopped_whatever_the_arguments(answers: Any) -> None:
    read, model = Tool("read", answers), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read, on_tool_error_callback=recover))
    assert seen.rules == [("nudge", "stall"), ("block", "stall"), ("stop", "stall")]
    assert (read.runs, model.calls) == (4, 6)
    assert assert_stopped(seen.result, "stall").tool == "read"
    assert assert_calls_answered(seen.result.session) == 6


async def test_stall_is_seen_through_a_plugin_that_asks_to_try_again() -> None:
    read, model, plugin = (
        Tool("read", lambda n: RuntimeError("the file is locked")),
        ScriptedModel(ask_new("read")),
        RunGuardPlugin(),
    )
    result = await play(agent(model, read), plugins=[plugin, ReflectAndRetryToolPlugin(max_retries=20)])
    assert_stopped(result, "stall")
    assert (read.runs, model.calls) == (4, 6)


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


async def test_what_is_raised_about_a_thing_that_is_not_there_is_a_sweep() -> None:
    find = Tool("find", lambda n: LookupError(f"order {n} not found") if n < 20 else {"id": n})
    seen = await observe(agent(ask_new("find", 20), find, on_tool_error_callback=recover))
    assert seen.rules == [("nudge", "empty")]
    assert (find.runs, seen.result.texts) == (20, ["done"])


WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


async def test_max_tool_failures_allows_exactly_its_number() -> None:
    read, model = Tool("read", lambda n: {"error": f"{WORDS[n]} is broken"}), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read), max_tool_failures=3)
    assert (read.runs, model.calls) == (3, 5)
    assert_stopped(seen.result, "tool_failures")


@pytest.mark.parametrize("answers", [[[]], [""], [{"results": []}], ["not found"], [{"status": "not_found"}]], ids=str)
async def test_empty_answers_to_new_questions_are_only_nudged(answers: Any) -> None:
    find = Tool("find", answers)
    seen = await observe(agent(ask_new("find", 20), find))
    assert seen.rules == [("nudge", "empty")]
    assert find.runs == 20
    assert seen.result.texts == ["done"]


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

    await play(_caller(service, 7), plugins=[plugin], session_id="s1")
    assert state() == "closed", "the failures of one run do not open it for everybody"
    await play(_caller(service, 1), plugins=[plugin], session_id="s2")
    assert (service.runs, state()) == (8, "open")

    refused = await play(_caller(service, 1), plugins=[plugin], session_id="s3")
    assert service.runs == 8
    assert "out of service" in str(told(refused.session.events))
    assert refused.texts == ["done"]

    clock.advance(30)
    assert state() == "half_open"
    await play(_caller(service, 1), plugins=[plugin], session_id="s4")
    assert (service.runs, state()) == (9, "open"), "the probe failed"

    clock.advance(30)
    service.down = False
    batch = agent([calls(call("fetch", q=1), call("fetch", q=2), call("fetch", q=3)), text("done")], service.tool())
    result = await play(batch, plugins=[plugin], session_id="s5")
    assert (service.runs, state()) == (10, "closed"), "one probe, whatever the concurrency"
    assert assert_calls_answered(result.session) == 3
    await play(_caller(service, 2), plugins=[plugin], session_id="s6")
    assert service.runs == 12
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


async def test_a_call_that_ends_in_the_same_line_is_seen_between_other_work() -> None:
    check = Tool("check", lambda n: f"read part {chr(97 + n % 26) * n}\nCheckError: no name")
    edit = Tool("edit", lambda n: f"edited line {n}")
    seen = await observe(agent(lambda n, _: call("edit", q=n) if n % 2 else call("check"), check, edit))
    assert seen.rules == [("nudge", "stall"), ("stop", "stall")]
    assert check.runs == 50


async def test_a_tool_that_repeats_what_it_was_asked_is_noticed_between_other_work() -> None:
    def parse(hint: str) -> dict[str, str]:
        """Parse."""
        return {"status": "partial_parse_error", "hint": hint}

    refine = Tool("refine", lambda n: f"hint {n}")
    script = [step for n in range(30) for step in (call("refine", q=n), call("parse", hint=f"hint {n} of many"))]
    seen = await observe(agent([*script, text("done")], parse, refine))
    assert seen.rules == [("nudge", "stall")]


# ---- The call that counts is what the tool receives: a ``FunctionTool`` never sees arguments that its function does
# not declare


SPELLINGS = ["refund policy", "Refund Policy", "REFUND POLICY", "refund\u200b policy", "\uff52efund policy"]


def agent_with(tool: Any, calls: int, args: Callable[[int], dict[str, Any]]) -> LlmAgent:
    model = ScriptedModel(lambda n, _: call("search", **args(n)) if n <= calls else text("done"))
    return LlmAgent(name="worker", model=model, tools=[tool])


def search(q: str) -> dict[str, Any]:
    """Looks it up."""
    return {"found": "a moon"} if q else {}


class Search(BaseTool):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__(name="search", description="looks it up")

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name, description=self.description)

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        return {"page": args["x"], "found": f"moon {args['x']}"}


async def test_a_loop_with_a_counter_that_the_tool_never_sees_is_ended() -> None:
    seen = await observe(agent_with(search, 160, lambda n: {"q": "moon", "x": n}))
    assert_stopped(seen.result)
    assert [rule for action, rule in seen.rules if action == "stop"] == ["repetition"]
    assert len(seen.answers) < 12


async def test_a_tool_that_takes_whatever_it_is_given_is_another_call_each_time() -> None:
    seen = await observe(agent_with(Search(), 40, lambda n: {"q": "moon", "x": n}))
    assert seen.result.trips == []
    assert seen.result.texts == ["done"]


async def test_two_tools_of_one_name_are_each_read_by_their_own_arguments() -> None:
    def other(q: str, x: int) -> dict[str, Any]:
        return {"x": x, "q": q}

    other.__name__ = "search"
    first, second = (
        agent_with(search, 3, lambda n: {"q": "a", "x": n}),
        agent_with(other, 30, lambda n: {"q": "b", "x": n}),
    )
    first.name, second.name = "first", "second"
    seen = await observe(first)
    assert seen.result.trips == []
    seen = await observe(second, plugin=seen.plugin)
    assert seen.result.trips == []


@pytest.mark.parametrize("stops", [False, True])
async def test_a_question_in_letters_that_read_alike_is_nudged_at_four(stops: bool) -> None:
    calls = 24 if stops else 6
    seen = await observe(agent_with(search, calls, lambda n: {"q": SPELLINGS[n % 5] + "\u200b" * (n // 5)}))
    assert ("nudge", "no_news") in seen.rules
    assert sum("runguard_notice" in answer for answer in seen.answers[:4]) == 1
    assert bool(seen.result.trips) is stops


# ---- Calls that arrive without their arguments, live: ADK rejects them, and RunGuard tells the model why ------------


WRITTEN: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_written() -> None:
    WRITTEN.clear()


def write_file(path: str, body: str) -> str:
    """Writes a file."""
    WRITTEN.append(path)
    return f"wrote {path}"


def cut(part: types.Part) -> LlmResponse:
    return LlmResponse(
        content=types.Content(role="model", parts=[part]), finish_reason=types.FinishReason.MAX_TOKENS, partial=False
    )


def worker(script: list[Any]) -> LlmAgent:
    return LlmAgent(name="worker", model=ScriptedModel(script), tools=[write_file])


@pytest.mark.parametrize("broken", [call("write_file"), cut(call("write_file")), cut(call("write_file", path="a.md"))])
async def test_the_second_rejected_call_is_nudged_and_smaller_calls_go_on(broken: Any) -> None:
    parts = [call("write_file", path=f"{n}.md", body="short") for n in range(5)]
    seen = await observe(worker([broken, broken, *parts, text("done")]))
    assert seen.rules == [("nudge", "stall")]
    notices = [answer.get(NOTICE_KEY) for answer in seen.answers]
    assert [bool(notice) for notice in notices] == [False, True, *[False] * 5]
    assert "Send less per call" in str(notices[1])
    assert seen.result.texts == ["done"]
    assert [f"{n}.md" for n in range(5)] == WRITTEN


async def test_equal_rejected_calls_are_still_stopped() -> None:
    seen = await observe(worker([call("write_file")]))
    assert_stopped(seen.result)
    assert_calls_answered(seen.result.session)
    assert WRITTEN == []


async def test_a_rejected_call_was_not_tried_for_once() -> None:
    """The effect is named by the path alone, so the rejected call and the complete one are the same effect."""
    rules = {"write_file": ToolRule(once=True, identity=("path",))}
    rejected, complete = call("write_file", path="a.md"), call("write_file", path="a.md", body="short")
    seen = await observe(worker([rejected, rejected, complete, complete, text("done")]), tools=rules)
    assert WRITTEN == ["a.md"]
    assert ("block", "once") in seen.rules  # the second complete call, and no other
    assert [rule for _, rule in seen.rules].count("once") == 1
    assert seen.answers[2] == {"result": "wrote a.md"}


# ---- An explicit limit of ``stall`` also raises the limit of a tool that asks to try again --------------------------


def fetch(url: str) -> dict[str, str]:
    return {"status": "retry later"}


@pytest.mark.parametrize(
    ("rules", "calls"),
    [({}, 20), ({"stall": {"stop": 30}}, 30), ({"stall": {"stop": 3}}, 20), ({"stall": False}, 41)],
    ids=["default", "raised", "lower", "off"],
)
async def test_the_advice_of_the_stop_works(rules: Any, calls: int) -> None:
    model = ScriptedModel(lambda n, _: call("fetch", url=f"https://example.com/{n}") if n <= 40 else text("done"))
    plugin = RunGuardPlugin(rules=rules)
    await run(LlmAgent(name="a", model=model, tools=[fetch]), plugins=[plugin])
    assert model.calls == calls
    assert [trip.rule for trip in plugin.trips] == (["stall"] if calls < 41 else [])
