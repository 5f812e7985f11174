"""Agents that talk without a step, live on ADK: to each other, to a lead who orders the same again, to a program."""

import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, RunConfig, SequentialAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event, EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

from runguard import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text, transfer
from tests.kit.adk_runs import Observed, observe
from tests.kit.agents import scripted

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from made_up import HEALTHY, LOOPS
from reworded import described
from shapes import Shape

_SAID = ["I think the plan is good", "the plan seems fine to me", "we agree that the plan is good", "yes, a fine plan"]
ROUNDS = 60


class Limit(BaseAgent):
    """Ends a loop in code, so that a test ends without ``max_iterations``."""

    rounds: int = ROUNDS

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        self.rounds -= 1
        if self.rounds <= 0:
            yield Event(author=self.name, actions=EventActions(escalate=True))


def speaker(name: str, say: Callable[[int], str] = lambda n: _SAID[n % 4] + f", say {n}", **options: Any) -> LlmAgent:
    return LlmAgent(name=name, model=ScriptedModel(lambda n, _: text(say(n))), **options)


def calls_of(*agents: Any) -> int:
    return sum(agent.model.calls for agent in agents)


async def test_two_agents_that_paraphrase_each_other_are_nudged_and_stopped() -> None:
    a, b = speaker("a"), speaker("b")
    seen = await observe(LoopAgent(name="loop", sub_agents=[a, b, Limit(name="limit")]))
    assert assert_stopped(seen.result).rule == "talk"
    assert seen.rules[0] == ("nudge", "talk")
    assert calls_of(a, b) <= 50
    assert "nothing was done" in str([request.contents for request in [*scripted(a).requests, *scripted(b).requests]])


async def test_a_graph_that_goes_round_in_words_is_stopped() -> None:
    writer, rounds = speaker("writer"), iter(range(1, 100))

    def review(node_input: Any) -> Event:
        return Event(route="again" if next(rounds) < 90 else "end", output="reviewed")

    def end(node_input: Any) -> str:
        return "done"

    edges = [("START", writer), (writer, review), (review, {"again": writer, "end": end})]
    assert assert_stopped((await observe(Workflow(name="wf", edges=edges))).result).rule == "talk"


async def test_a_debate_of_fifteen_rounds_is_not_stopped() -> None:
    a, b = speaker("a"), speaker("b")
    seen = await observe(LoopAgent(name="loop", sub_agents=[a, b, Limit(name="limit", rounds=15)]))
    assert seen.result.trips == []


async def test_a_chain_of_many_agents_is_not_a_talk() -> None:
    seen = await observe(SequentialAgent(name="chain", sub_agents=[speaker(f"a{n}") for n in range(50)]))
    assert seen.rules == []


async def test_state_that_changes_is_a_step() -> None:
    def count(callback_context: CallbackContext) -> None:
        callback_context.state["round"] = callback_context.state.get("round", 0) + 1

    a, b = speaker("a", after_agent_callback=count), speaker("b")
    seen = await observe(LoopAgent(name="loop", sub_agents=[a, b, Limit(name="limit")]))
    assert seen.rules == []


# ---- A supervisor that orders the same work again and again in new words, live on ADK in every way to give an order


_PHRASES = ["Please look at", "Would you check", "Have a look at", "Kindly verify", "Find out about", "I need to know"]
ORDERS = 40


_ASIDES = ["", " once more", " again", " please", " for me", " right now", " today"]


def order(n: int) -> str:
    return f"{_PHRASES[n % 6]} order 7{_ASIDES[n % 7]} and tell me"


class Desk:
    """One supervisor, one worker with a tool, and what the tool answers at its nth call."""

    def __init__(self, answer: Callable[[int], Any], orders: int = ORDERS) -> None:
        self._answer, self.orders = answer, orders
        self.models: list[ScriptedModel] = []
        self._asked = 0

    @property
    def calls(self) -> int:
        return sum(model.calls for model in self.models)

    def look_up(self, number: int) -> Any:
        self._asked += 1
        return self._answer(self._asked)

    def model(self, script: Callable[[int, LlmRequest], Any]) -> ScriptedModel:
        self.models.append(made := ScriptedModel(script))
        return made

    def worker(self, last: types.Part | None = None, **options: Any) -> LlmAgent:
        """Makes the one call, then reports in new words."""

        def script(n: int, _: LlmRequest) -> Any:
            if n % 2:
                return call("look_up", number=7)
            return last or text(f"Report {n}: I see no change in it, {_PHRASES[n % 6].lower()} that")

        return LlmAgent(
            name="worker", description="looks things up", model=self.model(script), tools=[self.look_up], **options
        )

    def supervisor(self, give: Callable[[int], types.Part], **options: Any) -> LlmAgent:
        def script(n: int, _: LlmRequest) -> Any:
            return give(n) if n <= self.orders else text("done")

        return LlmAgent(name="lead", model=self.model(script), **options)


def as_tool(desk: Desk) -> Any:
    return desk.supervisor(lambda n: call("worker", request=order(n)), tools=[AgentTool(desk.worker())])


def single_turn(desk: Desk) -> Any:
    worker = desk.worker(mode="single_turn")
    return desk.supervisor(lambda n: call("worker", request=order(n)), sub_agents=[worker])


def task(desk: Desk) -> Any:
    worker = desk.worker(call("finish_task", result="no change"), mode="task")
    return desk.supervisor(lambda n: call("worker", request=order(n)), sub_agents=[worker])


def sub_agent(desk: Desk) -> Any:
    return desk.supervisor(lambda n: transfer("worker"), sub_agents=[desk.worker(transfer("lead"))])


def loop(desk: Desk) -> Any:
    lead = desk.supervisor(lambda n: text(order(n)))
    return LoopAgent(name="loop", sub_agents=[lead, desk.worker()], max_iterations=desk.orders)


def workflow(desk: Desk) -> Any:
    lead, worker, rounds = desk.supervisor(lambda n: text(order(n))), desk.worker(), iter(range(1, desk.orders + 1))

    def again(node_input: Any) -> Event:
        return Event(route="again" if next(rounds) < desk.orders else "end", output="reviewed")

    def end(node_input: Any) -> str:
        return "done"

    edges = [("START", lead), (lead, worker), (worker, again), (again, {"again": lead, "end": end})]
    return Workflow(name="wf", edges=edges)


WAYS = [as_tool, single_turn, task, sub_agent, loop, workflow]
everywhere = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


async def seen_with(way: Callable[[Desk], Any], desk: Desk) -> Observed:
    return await observe(way(desk), message="keep an eye on order 7")


LOST: dict[str, Callable[[int], Any]] = {
    "equal answers": lambda n: {"order": 7, "state": "lost"},
    "answers with a clock": lambda n: {"order": 7, "state": "lost", "checked_at": f"2031-05-04T10:{n:02}:00Z"},
}


@everywhere
@pytest.mark.parametrize("answer", LOST.values(), ids=LOST)
async def test_a_supervisor_who_repeats_himself_in_new_words_is_stopped(
    way: Callable[[Desk], Any], answer: Callable[[int], Any]
) -> None:
    desk = Desk(answer)
    seen = await seen_with(way, desk)
    assert_stopped(seen.result)
    assert_calls_answered(seen.result.session, open_calls=1 if way is task else 0)
    assert desk.calls <= 45


@everywhere
async def test_the_supervisor_reads_first_that_other_words_do_not_help(way: Callable[[Desk], Any]) -> None:
    desk = Desk(lambda n: {"order": 7, "state": "lost"}, orders=10)
    seen = await seen_with(way, desk)
    assert seen.result.trips == []
    assert set(seen.rules) == {("nudge", "no_news")}
    assert "other words" in str([request.contents for request in _of_lead(desk).requests])


def _of_lead(desk: Desk) -> ScriptedModel:
    return next(model for model in desk.models if model.calls and "look_up" not in str(model.requests[0].config.tools))


@everywhere
async def test_a_state_that_is_checked_nine_times_in_nine_activations_is_not_stopped(
    way: Callable[[Desk], Any],
) -> None:
    desk = Desk(lambda n: {"order": 7, "state": "waiting" if n < 10 else "delivered"}, orders=10)
    seen = await seen_with(way, desk)
    assert seen.result.trips == []
    assert {action for action, _ in seen.rules} <= {"nudge"}


@everywhere
async def test_a_worker_that_learns_something_new_each_time_is_left_alone(way: Callable[[Desk], Any]) -> None:
    desk = Desk(lambda n: {"order": 7, "place": f"harbour {n * n}"}, orders=15)
    seen = await seen_with(way, desk)
    assert seen.rules == []


# ---- An agent without tools that is ordered again and again in new words, live on ADK -------------------------------


def team_of(shape: Shape, *, as_tools: bool) -> LlmAgent:
    """A lead who gives the orders of a made-up run, and workers who report as they do there."""
    orders: list[types.Part] = []
    reports: dict[str, list[str]] = {}
    for step in shape.run()["steps"]:
        if step["kind"] == "tool_call":
            orders.append(call(step["tool"], **step["args"]))
        elif step["kind"] == "tool_result":
            reports.setdefault(step["tool"], []).append(step["result"]["result"])

    def lead(n: int, _: LlmRequest) -> Any:
        return orders[n - 1] if n <= len(orders) else text("done")

    def worker(name: str) -> LlmAgent:
        said = reports[name]
        options: dict[str, Any] = {} if as_tools else {"mode": "single_turn"}
        model = ScriptedModel(lambda n, _: text(said[n - 1]))
        return LlmAgent(name=name, description="answers", model=model, **options)

    workers: list[Any] = [worker(name) for name in reports]
    options: dict[str, Any] = {"tools": [AgentTool(one) for one in workers]} if as_tools else {"sub_agents": workers}
    return LlmAgent(name="lead", model=ScriptedModel(lead), **options)


def shown(shape: Shape, *, as_tools: bool) -> Any:
    return observe(team_of(shape, as_tools=as_tools), message="who collects the taxes?")


both_ways = pytest.mark.parametrize("as_tools", [True, False], ids=["as tool", "single turn"])


@both_ways
@pytest.mark.parametrize(
    "name", ["expert without tools asked in new words", "writer and critic who say the same to their lead"]
)
async def test_orders_in_new_words_are_nudged_and_then_stopped(name: str, as_tools: bool) -> None:
    seen: Observed = await shown(LOOPS[name], as_tools=as_tools)
    assert_stopped(seen.result)
    assert_calls_answered(seen.result.session)
    assert ("nudge", "no_news") in seen.rules
    assert any("other words" in str(answer) for answer in seen.answers)


@both_ways
@pytest.mark.parametrize(
    "name",
    [
        "forty drafts by a writer and their reviews by a critic",
        "debate of twelve rounds between two workers",
        "letters of one form to fifteen people",
    ],
)
async def test_healthy_work_through_words_is_left_alone(name: str, as_tools: bool) -> None:
    seen: Observed = await shown(HEALTHY[name], as_tools=as_tools)
    assert seen.result.trips == []
    assert {action for action, _ in seen.rules} <= {"nudge"}
    assert seen.result.texts[-1] == "done"


# ---- An agent that asks another agent the same question again and gets the same answer in other words, live on ADK


QUESTION = "Which office collects the taxes?"


def lead_of(rounds: int) -> LlmAgent:
    expert = LlmAgent(name="expert", model=ScriptedModel(lambda n, _: text(described(n))))
    script = ScriptedModel(lambda n, _: call("expert", request=QUESTION) if n <= rounds else text("the treasury"))
    return LlmAgent(name="lead", model=script, tools=[AgentTool(expert)])


async def test_one_question_to_an_agent_is_nudged_and_then_stopped() -> None:
    lead = lead_of(60)
    seen = await observe(lead)
    assert assert_stopped(seen.result).rule == "no_news"
    assert seen.rules[0] == ("nudge", "no_news")
    assert isinstance(lead.model, ScriptedModel)
    assert lead.model.calls <= 14
    assert "in other words" in str([request.contents for request in lead.model.requests])


async def test_four_opinions_are_left_alone() -> None:
    assert (await observe(lead_of(4))).rules == []


# ---- A loop whose turns are started by a program, on ADK ------------------------------------------------------------


async def turns(message: Any, count: int, config: RunConfig | None = None) -> int:
    """How many calls of a failing tool are made in so many turns."""
    made: list[str] = []

    def parse(fragment: str) -> dict[str, Any]:
        made.append(fragment)
        return {"status": "partial_parse_error"}

    def speak(number: int, _: Any) -> types.Part:
        return call("parse", fragment=f"part-{number}") if number % 2 else text("Shall I go on?")

    agent = LlmAgent(name="worker", model=ScriptedModel(speak), tools=[parse])
    runner = InMemoryRunner(agent=agent, app_name="app", plugins=[RunGuardPlugin()])
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    for n in range(count):
        said = types.Content(role="user", parts=[types.Part(text=message(n))])
        async for _ in runner.run_async(
            user_id="u", session_id=session.id, new_message=said, run_config=config or RunConfig()
        ):
            pass
    return len(made)


async def test_please_proceed_starts_no_count_anew() -> None:
    assert await turns(lambda n: "Please proceed to the next step.", 14) < 9


async def test_the_messages_of_a_person_do() -> None:
    assert await turns(lambda n: "any news?", 14) == 14


@pytest.mark.parametrize("automatic", [True, False])
async def test_an_app_marks_its_own_messages(automatic: bool) -> None:
    config = RunConfig(custom_metadata={"runguard": {"automatic": automatic}})
    made = await turns(lambda n: f"text about {'abcdefghijklmn'[n] * 4}", 14, config)
    assert (made < 9) is automatic
