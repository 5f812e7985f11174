"""A supervisor that orders the same work again and again in new words, live on ADK in every way to give an order."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text, transfer
from tests.kit.adk_runs import Observed, observe

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
