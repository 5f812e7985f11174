"""A guarded request goes where the plain one goes, and all of it is reserved."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    HostedMCPTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    handoff,
    output_guardrail,
    set_default_openai_api,
    set_default_openai_client,
)
from agents.models import _openai_shared
from agents.models.interface import Model, ModelProvider
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from runguard.openai_agents import AgentGuard, GuardedAgent, guarded
from runguard.openai_agents.turns import Asked
from runguard.providers.usage import GrowingPrompts
from tests.frameworks.openai_harness import played
from tests.frameworks.test_openai_streams import Provider as Server
from tests.frameworks.test_openai_tools import Steps, call, say

NAME = "gpt-5-mini"
BIG = "word " * 8_000
PRICES: Any = {NAME: {"input": 1, "output": 1}}


class Served(ModelProvider):
    """Knows one model, by any name, and notes the names."""

    def __init__(self, model: Model) -> None:
        self.model, self.names, self.is_closed = model, list[str | None](), False

    def get_model(self, model_name: str | None) -> Model:
        self.names.append(model_name)
        return self.model

    async def aclose(self) -> None:
        self.is_closed = True


# ---- where a request goes -------------------------------------------------------------------------------------------


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    api, client = _openai_shared.get_use_responses_by_default(), _openai_shared.get_default_openai_client()
    yield
    set_default_openai_api("responses" if api else "chat_completions")
    monkeypatch.setattr(_openai_shared, "_default_openai_client", client)


@pytest.mark.usefixtures("no_key")
async def test_a_guarded_agent_needs_no_key_until_it_runs() -> None:
    agent = guarded(Agent(name="worker", model=NAME), max_usd=5)
    assert agent.model == NAME
    server = Server("completed")
    set_default_openai_client(server.model()._client)
    await Runner.run(agent, "go")
    assert [asked["input"] for asked in server.asked] == [[{"content": "go", "role": "user"}]]
    assert agent.runguard.spend()["calls"] == 1


@pytest.mark.usefixtures("no_key")
async def test_the_api_that_is_chosen_later_is_used() -> None:
    agent = guarded(Agent(name="worker", model=NAME))
    set_default_openai_client(AsyncOpenAI(api_key="x", base_url="http://127.0.0.1:9", max_retries=0))
    set_default_openai_api("chat_completions")
    seen = []

    class Watched(OpenAIChatCompletionsModel):
        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(self))
            return await Steps([say("hello")]).get_response()

    openai_provider: Any = importlib.import_module("agents.models.openai_provider")
    before = openai_provider.OpenAIChatCompletionsModel
    openai_provider.OpenAIChatCompletionsModel = Watched
    try:
        assert (await Runner.run(agent, "go")).final_output == "hello"
    finally:
        openai_provider.OpenAIChatCompletionsModel = before
    assert seen == [Watched]
    assert agent.runguard.spend()["calls"] == 1


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_the_provider_of_the_run_finds_the_models_of_its_agents(way: str) -> None:
    model = Steps([say("hello")])
    provider = Served(model)
    below: Agent[Any] = Agent(name="below", model="house-small")
    agent = guarded(Agent(name="worker", model="house-large", tools=[below.as_tool("ask", "Ask.")]), max_model_calls=9)
    config = RunConfig(model_provider=provider)
    await played(agent, "go", way, run_config=config)
    assert provider.names[-1] == "house-large"
    assert config.model_provider is provider
    assert not provider.is_closed, "the provider belongs to the user"
    assert agent.runguard.spend()["calls"] == model.calls == 1
    assert "house-large" in agent.runguard.spend()["by_model"]


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_the_body_of_a_guarded_request_is_that_of_the_plain_one(way: str) -> None:
    @function_tool
    def look(page: int) -> str:
        return f"page {page}"

    async def body(guard: bool) -> dict[str, Any]:
        server = Server("completed")
        second: Agent[Any] = Agent(name="second", model=NAME)
        parts: dict[str, Any] = {"instructions": "Be brief.", "tools": [look], "handoffs": [second]}
        plain: Agent[Any] = Agent(name="worker", model=server.model(), **parts)
        agent = guarded(plain, max_usd=5) if guard else plain
        settings: Any = {"run_config": RunConfig(group_id="shop"), "previous_response_id": "resp_1"}
        await played(agent, "go", way, **settings)
        [asked] = server.asked
        return asked

    assert await body(guard=True) == await body(guard=False)


async def test_a_guarded_model_keeps_its_class_and_its_state() -> None:
    model = Server("completed").model()
    agent = guarded(Agent(name="worker", model=model))
    seen: Any = agent.model
    assert isinstance(seen, OpenAIResponsesModel)
    assert type(seen).__name__ == "OpenAIResponsesModel"
    assert seen._client is model._client
    model.model = "another"
    assert seen.model == "another"
    supports: Any = getattr(model, "_supports_default_prompt_cache_key", None)
    assert supports is None or seen._supports_default_prompt_cache_key() == supports()


async def test_output_guardrails_with_server_side_history_behave_as_without_a_guard() -> None:
    @output_guardrail
    def fine(*_: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(None, False)

    class Chat(OpenAIChatCompletionsModel):
        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            return await Steps([say("hello")]).get_response()

    client = AsyncOpenAI(api_key="x", base_url="http://127.0.0.1:9")
    for model, is_fine in ((Chat(NAME, client), True), (Server("completed").model(), None)):
        plain: Agent[Any] = Agent(name="worker", model=model, output_guardrails=[fine])
        ends = []
        for agent in (plain, guarded(plain)):
            try:
                ends.append((await Runner.run(agent, "go", previous_response_id="resp_1")).final_output)
            except Exception as error:
                ends.append(repr(error))
        assert ends[0] == ends[1]
        assert not is_fine or ends[1] == "hello"


async def test_a_model_that_calls_itself_is_asked_once() -> None:
    class Doubled(Steps):
        async def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            response = await self.get_response(*args, **kwargs)
            async for event in Steps(response.output).stream_response():
                yield event

    agent = guarded(Agent(name="worker", model=Doubled([say("hello")])))
    await played(agent, "go", "run_streamed")
    assert agent.runguard.spend()["calls"] == 1


async def test_a_model_with_slots_keeps_what_it_holds() -> None:
    class Small(Steps):
        __slots__ = ("_own",)
        _own: int

    model = Small([say("hello")])
    model._own = 7
    seen: Any = guarded(Agent(name="worker", model=model)).model
    assert (seen._own, seen.model) == (7, NAME)


# ---- how large it is ------------------------------------------------------------------------------------------------


class Big(BaseModel):
    a: int = Field(default=1, description=BIG)


class Reserving(Steps):
    """Notes what is reserved while it is asked, and reports what it is told to."""

    def __init__(self, guard: AgentGuard, *reports: int) -> None:
        super().__init__([say('{"a": 1}')])
        self.guard, self.reports, self.reserved = guard, list(reports), list[int]()

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        self.reserved.append(int(self.guard.spend()["reserved_usd"] * 1_000_000) - 10)
        response = await super().get_response(*args, **kwargs)
        response.response_id = f"{id(self)}-{self.calls}"
        if self.reports:
            response.usage.input_tokens = self.reports.pop(0)
        return response


def big_tool() -> Any:
    @function_tool(description_override=BIG)
    def look(page: int) -> str:
        return ""

    return look


def described() -> Agent[Any]:
    return Agent(name="second", model=Steps([say("x")]), handoff_description=BIG)


def hosted() -> Any:
    config: Any = {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:9", "server_description": BIG}
    return HostedMCPTool(tool_config=config)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "instructions": lambda: {"instructions": BIG},
    "a tool": lambda: {"tools": [big_tool()]},
    "a hosted tool": lambda: {"tools": [hosted()]},
    "a hand-off": lambda: {"handoffs": [described()]},
    "a hand-off object": lambda: {"handoffs": [handoff(described(), tool_description_override=BIG)]},
    "an output type": lambda: {"output_type": Big},
    "a stored prompt": lambda: {"prompt": {"id": "p", "variables": {"page": BIG}}},
}


def asking(tokens: Any = None, *reports: int, **parts: Any) -> tuple[GuardedAgent[Any], Reserving]:
    guard = AgentGuard(max_usd=1, prices=PRICES, tokens=tokens)
    model = Reserving(guard, *reports)
    settings = ModelSettings(max_tokens=10)
    return guard.guarded(Agent(name="worker", model=model, model_settings=settings, **parts)), model


@pytest.mark.parametrize("part", PARTS)
async def test_each_part_of_a_request_is_reserved(part: str) -> None:
    agent, model = asking()
    await Runner.run(agent, "go")
    large, larger_model = asking(**PARTS[part]())
    await Runner.run(large, "go")
    assert 10_000 <= larger_model.reserved[0] - model.reserved[0] < 40_000


@pytest.mark.parametrize("by", ["previous_response_id", "conversation_id", "auto_previous_response_id"])
async def test_a_history_that_the_provider_keeps_is_reserved_after_its_first_answer(by: str) -> None:
    agent, model = asking(None, 30_000, 30_020, instructions="Be brief.")
    for number in range(2):
        if by == "auto_previous_response_id":
            model.steps = ([*model.steps[0]],)
            more: dict[str, Any] = {"previous_response_id": f"{id(model)}-1"} if number else {by: True}
        else:
            more = {by: f"{id(model)}-{number if by == 'previous_response_id' else 'all'}"}
        await Runner.run(agent, "go", **more)
    assert model.reserved[0] < 100, "nothing is known before the first answer"
    assert 30_000 <= model.reserved[1] < 30_200, "the history is counted once"


async def test_runs_that_go_on_from_one_stored_answer_are_reserved_after_the_first() -> None:
    agent, model = asking(None, 30_000, 30_000, instructions="Be brief.")
    for _ in range(2):
        await Runner.run(agent, "go", previous_response_id=f"{id(model)}-base")
    assert model.reserved[0] < 200
    assert 29_900 <= model.reserved[1] < 30_100


async def test_a_history_that_the_provider_keeps_is_counted_once_within_a_run() -> None:
    @function_tool
    def look() -> str:
        return "page"

    agent, model = asking(None, 30_000, 30_050, 30_100, tools=[look])
    model.steps = ([call("look", "{}")], [call("look", "{}")], [say("done")])
    await Runner.run(agent, "go", previous_response_id=f"{id(model)}-0")
    assert model.reserved[0] < 200
    assert all(30_000 <= reserved < 30_400 for reserved in model.reserved[1:])


async def test_the_counter_of_the_user_counts_the_whole_request() -> None:
    seen: list[Any] = []

    def count(request: Any) -> int:
        seen.append(request)
        return 4_321

    agent, model = asking(count, instructions="Be brief.")
    await Runner.run(agent, "go", previous_response_id="resp_1")
    assert model.reserved == [4_321]
    [request] = seen
    assert request["model"] == model.model
    assert request["system_instructions"] == "Be brief."
    assert request["input"][0]["content"] == "go"
    assert request["previous_response_id"] == "resp_1"


def test_a_request_says_what_it_consists_of() -> None:
    asked = Asked(NAME, ("Be brief.", "go", ModelSettings(max_tokens=7), [], None, [], None), {})
    assert asked.request(GrowingPrompts()).max_output_tokens == 7
