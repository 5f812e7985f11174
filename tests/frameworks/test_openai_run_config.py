"""``RunConfig(model=…)`` replaces the model of every agent in a run. The replacement is guarded like the original."""

from typing import Any

import pytest
from agents import Agent, AgentHooks, FunctionTool, RunConfig, Runner
from agents.items import ModelResponse
from agents.models.interface import Model, ModelProvider
from agents.usage import Usage

from runguard.cli.doctor import find_agents
from runguard.openai_agents import AgentGuard, guarded
from runguard.testing.conformance import AgentSpec, Reply, Script
from tests.frameworks.openai_harness import ScriptedModel, played
from tests.frameworks.test_openai_tools import say

NAME = "gpt-5-mini"  # a model with a known price


class Priced(ScriptedModel):
    """Follows a script and counts its calls."""

    def __init__(self, script: Script) -> None:
        self.calls = [0]
        super().__init__(AgentSpec(script), self.calls)
        self.model = NAME


class Only(ModelProvider):
    """Knows one model, by any name."""

    def __init__(self, model: Model) -> None:
        self.model, self.asked_for = model, set[str | None]()

    def get_model(self, model_name: str | None) -> Model:
        self.asked_for.add(model_name)
        return self.model


class Seen(AgentHooks[Any]):
    """The user's own hooks."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def on_llm_start(self, *_: Any) -> None:
        self.names.append("start")

    async def on_llm_end(self, *_: Any) -> None:
        self.names.append("end")


def endless(number: int, _: str) -> Reply:
    return Reply(calls=[("look", {"page": number})]) if number < 30 else Reply("gave up")


def never(number: int, _: str) -> Reply:
    raise AssertionError("RunConfig replaces this model")


def look() -> FunctionTool:
    async def invoke(context: Any, args: str) -> str:
        return f"page {args}"

    return FunctionTool("look", "Look.", {"type": "object", "properties": {"page": {}}}, invoke)


def worker(**parts: Any) -> Agent[Any]:
    return Agent(name="worker", model=Priced(never), tools=[look()], **parts)


async def play(way: str, agent: Agent[Any], config: RunConfig) -> Any:
    return (await played(agent, "go", way, max_turns=100, run_config=config)).final_output


@pytest.mark.parametrize("by_name", [False, True], ids=["model", "name"])
@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_the_replacement_is_checked_and_booked(way: str, by_name: bool) -> None:
    other = Priced(endless)
    provider = Only(other)
    config = RunConfig(model=NAME, model_provider=provider) if by_name else RunConfig(model=other)
    agent = guarded(worker(), max_model_calls=3, max_usd=5)
    said = await play(way, agent, config)
    assert other.calls == [3]
    [trip] = agent.runguard.trips
    assert (trip.rule, said) == ("model_calls", agent.runguard.guard.stop_text(trip))
    assert float(agent.runguard.spend()["usd"]) == pytest.approx(3 * (1_000 * 0.25 + 100 * 2.00) / 1e6)
    assert config.model is (NAME if by_name else other), "the user's RunConfig stays as it is"
    assert provider.asked_for == ({NAME} if by_name else set())


def test_run_sync_is_guarded_too() -> None:
    other = Priced(endless)
    agent = guarded(worker(), max_model_calls=3)
    Runner.run_sync(agent, "go", max_turns=100, run_config=RunConfig(model=other))
    assert (other.calls, [trip.rule for trip in agent.runguard.trips]) == ([3], ["model_calls"])


@pytest.mark.parametrize("way", ["run", "run_streamed"])
@pytest.mark.parametrize("reached_by", ["hand-off", "tool"])
async def test_agents_below_are_guarded_too(reached_by: str, way: str) -> None:
    first = Reply(hand_off="worker") if reached_by == "hand-off" else Reply(calls=[("ask", {"input": "x"})])
    other = Priced(lambda number, newest: first if number == 1 else endless(number, newest))
    below: dict[str, Any] = {"handoffs": [worker()]}
    if reached_by == "tool":
        below = {"tools": [worker().as_tool("ask", "Ask.", max_turns=50)]}
    agent = guarded(Agent(name="lead", model=Priced(never), **below), max_model_calls=4)
    await play(way, agent, RunConfig(model=other))
    assert other.calls == [4]
    assert [trip.rule for trip in agent.runguard.trips] == ["model_calls"]


async def test_a_guarded_agent_below_one_without_a_guard_is_guarded() -> None:
    other = Priced(lambda number, newest: Reply(hand_off="worker") if number == 1 else endless(number, newest))
    inner = guarded(worker(), max_model_calls=2)
    await play("run", Agent(name="lead", handoffs=[inner]), RunConfig(model=other))
    assert other.calls == [3], "one call of the lead, which has no guard, and two of the worker"


class Answers(Model):
    """Says hello, and keeps what it was asked with."""

    def __init__(self) -> None:
        self.model, self.asked = NAME, list[Any]()

    async def get_response(self, *given: Any, **named: Any) -> ModelResponse:
        self.asked.append(named["model_settings"] if "model_settings" in named else given[2])
        return ModelResponse([say("hello")], Usage(1, 10, output_tokens=5, total_tokens=15), None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


async def test_the_settings_follow_the_replacement() -> None:
    """The SDK gives an agent the settings that fit the name of its model, and those of the replacement in its place."""
    for model in (None, "gpt-4.1", "gpt-5-mini", Answers()):
        settings = []
        for guard in (False, True):
            answers = Answers()
            plain: Agent[Any] = Agent(name="plain", model="gpt-5")
            config = RunConfig(model=model, model_provider=Only(answers))
            await Runner.run(guarded(plain) if guard else plain, "go", run_config=config)
            asked = [*answers.asked, *(model.asked if isinstance(model, Answers) else [])]
            settings.append(asked[-1])
        assert settings[0] == settings[1]


async def test_parts_assigned_to_a_guarded_agent_are_guarded() -> None:
    agent, other, hooks = guarded(worker(), max_model_calls=3), Priced(endless), Seen()
    agent.model, agent.hooks = other, hooks
    agent.tools.append(look())
    await play("run", agent, RunConfig())
    assert other.calls == [3]
    assert [trip.rule for trip in agent.runguard.trips] == ["model_calls"]
    assert hooks.names[:2] == ["start", "end"]


async def test_a_hand_off_added_to_a_guarded_agent_is_guarded() -> None:
    agent = guarded(Agent(name="lead", model=Priced(lambda *_: Reply(hand_off="second"))), max_model_calls=3)
    second = Priced(endless)
    agent.handoffs.append(Agent(name="second", model=second, tools=[look()]))
    await play("run", agent, RunConfig())
    assert second.calls == [2], "the first call of the run was made by the lead"


async def test_a_model_with_another_guard_is_checked_by_both() -> None:
    theirs, other = AgentGuard(), Priced(endless)
    agent = guarded(worker(), max_model_calls=3)
    await play("run", agent, RunConfig(model=theirs.guarded(Agent(name="theirs", model=other)).model))
    assert other.calls == [3]
    assert float(theirs.spend()["usd"]) == float(agent.runguard.spend()["usd"]) > 0


def test_doctor_knows_the_model_of_a_guarded_agent() -> None:
    root, _ = find_agents(guarded(worker()), "app:agent")
    assert root is not None
    assert root.models == [NAME]
