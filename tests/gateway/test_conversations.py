"""Which run and which lane a request belongs to."""

import gc
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from runguard import Budget
from runguard.calls.run import asked_of
from runguard.engine.guard import Guard
from runguard.gateway.access import Access
from runguard.gateway.conversations import Conversations, Strand
from runguard.gateway.formats import format_of
from runguard.gateway.proxy import Gateway
from runguard.policy import Policy
from tests.kit.gateways import MODEL, Arrived, RawUpstream, a_gateway, chat_answer, served

CHAT = "/v1/chat/completions"
FAILED = json.dumps({"status": "partial_parse_error"})
TOOLS = [{"type": "function", "function": {"name": "parse"}}]


@pytest.fixture
def asks(upstream: RawUpstream) -> RawUpstream:
    """A provider whose model always asks for its tool, with an id of its own, and without tools just talks."""

    def answer(request: Arrived) -> JSONResponse:
        if not request.json.get("tools"):
            return JSONResponse(chat_answer("a title"))
        number = len(upstream.arrived)
        function = {"name": "parse", "arguments": json.dumps({"n": number})}
        return JSONResponse(
            chat_answer("", tool_calls=[{"id": f"c-{number}", "type": "function", "function": function}])
        )

    upstream.answer = answer
    return upstream


class Agent:
    """One conversation over HTTP."""

    def __init__(self, url: str, prompt: str = "go", *, session: str = "", key: str = "k", tools: Any = TOOLS) -> None:
        self.url, self.tools = url, tools
        self.messages: list[Any] = [{"role": "user", "content": prompt}]
        self.headers = {"authorization": f"Bearer {key}", **({"session-id": session} if session else {})}
        self.said = ""

    def step(self, url: str = "") -> bool:
        """One request, and the answer of its tool. False: the model called no tool."""
        self.message = self.ask(url)
        self.messages.append(self.message)
        self.said = self.message["content"]
        for call in self.message.get("tool_calls", ()):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": FAILED})
        return bool(self.message.get("tool_calls"))

    def ask(self, url: str = "") -> Any:
        body = {"model": MODEL, "max_tokens": 300, "messages": self.messages, "tools": self.tools}
        answer = httpx.post(f"{url or self.url}{CHAT}", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


def runs(gateway: Gateway) -> list[Any]:
    found: list[Any] = gateway.snapshot()["runs"]
    return found


def lanes(gateway: Gateway) -> int:
    return sum(len(run.lanes) for run in gateway.guard.runs.values())


# ---- turns


def test_a_turn_is_one_run_and_the_next_message_begins_another(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    with served(gateway) as url:
        agent = Agent(url)
        for _ in range(3):
            assert agent.step()
        (run,) = runs(gateway)
        assert run["model_calls"] == 3
        agent.messages.pop()
        agent.say("something else")
        assert agent.step()
        (second,) = runs(gateway)
        assert second["run"] != run["run"]
        assert (second["session"], second["model_calls"]) == (run["session"], 1)


@pytest.mark.parametrize(("said", "sent"), [("please proceed", 17), ("and another one", 25)])
def test_a_program_that_says_go_on_and_hears_the_same_is_stopped(asks: RawUpstream, said: str, sent: int) -> None:
    with served(a_gateway(asks.url)) as url:
        agent = Agent(url, tools=None)
        for _ in range(25):
            agent.step()
            agent.messages.append({"role": "user", "content": said})
    assert len(asks.arrived) == sent
    assert agent.said.startswith("I stopped") == (sent < 25)


def test_the_same_words_beside_another_picture_are_another_input() -> None:
    guard, chat = Guard(Policy()), format_of(CHAT)
    assert chat is not None

    def told(picture: str, **mark: Any) -> dict[str, Any]:
        parts = [{"type": "text", "text": "What is due?"}, {"type": "image_url", "image_url": {"url": picture}, **mark}]
        return asked_of(guard, "a", chat.said({"messages": [{"role": "user", "content": parts}]})[0], goes_on=False)

    first = told("data:one")
    assert first["message"] == "What is due?"
    assert first == told("data:one", cache_control={"type": "ephemeral"})
    assert first["input"] != told("data:two")["input"]


def test_the_same_request_after_a_failure_is_the_same_run(asks: RawUpstream) -> None:
    gateway, answer = a_gateway(asks.url), asks.answer
    with served(gateway) as url:
        agent = Agent(url)
        agent.step()
        asks.answer = lambda request: JSONResponse({"error": {}}, 500)
        for _ in range(3):
            assert httpx.post(f"{url}{CHAT}", json={"model": MODEL, "messages": agent.messages}, headers=agent.headers)
        asks.answer = answer
        agent.step()
        (run,) = runs(gateway)
        assert run["tool_calls"] == 1


def test_a_stop_stays_for_a_program_that_asks_again(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url, max_model_calls=2, on_stop="raise")
    with served(gateway) as url:
        agent = Agent(url)
        agent.step()
        agent.step()
        for _ in range(3):
            body = {"model": MODEL, "messages": agent.messages, "tools": TOOLS}
            assert httpx.post(f"{url}{CHAT}", json=body, headers=agent.headers).status_code == 429
        assert len(asks.arrived) == 2
        assert len(runs(gateway)) == 1


# ---- two at once


def test_two_equal_prompts_at_the_same_time_are_two_runs(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    with served(gateway) as url:
        one, two = Agent(url), Agent(url)
        for _ in range(4):
            assert one.step()
            assert two.step()
        assert sorted(run["model_calls"] for run in runs(gateway)) == [4, 4]
        while one.step():
            pass
        assert one.said.startswith("I stopped")
        assert two.step()


class Nameless(Agent):
    """A conversation with Gemini, whose calls have no ids."""

    def step(self, url: str = "") -> bool:
        path = f"{url or self.url}/v1beta/models/{MODEL}:generateContent"
        tools = [{"functionDeclarations": [{"name": "parse"}]}]
        body = {"contents": self.messages, "tools": tools, "generationConfig": {"maxOutputTokens": 250}}
        said = httpx.post(path, json=body, headers={"x-goog-api-key": "k"}).json()["candidates"][0]["content"]
        part = said["parts"][0]
        self.said = part.get("text", "")
        number = len(self.messages)
        result = {"name": "parse", "response": {"result": f"page {number} of many"}}
        self.messages += [said, {"role": "user", "parts": [{"functionResponse": result}]}]
        return "functionCall" in part

    @classmethod
    def start(cls, url: str) -> "Nameless":
        agent = cls(url)
        agent.messages = [{"role": "user", "parts": [{"text": "go"}]}]
        return agent


@pytest.fixture
def nameless(upstream: RawUpstream) -> RawUpstream:
    """A model of Gemini that asks for the next page."""

    def answer(request: Arrived) -> JSONResponse:
        part = {"functionCall": {"name": "parse", "args": {"n": len(request.json["contents"])}}}
        usage = {"promptTokenCount": 1_000, "candidatesTokenCount": 250, "totalTokenCount": 1_250}
        candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
        return JSONResponse({"candidates": [candidate], "usageMetadata": usage, "modelVersion": MODEL})

    upstream.answer = answer
    return upstream


def test_equal_prompts_without_ids_of_calls_are_runs_of_their_own(nameless: RawUpstream) -> None:
    gateway = a_gateway(nameless.url, max_model_calls=8)
    with served(gateway) as url:
        agents = [Nameless.start(url) for _ in range(3)]
        for _ in range(6):
            assert all(agent.step() for agent in agents)
        assert [run["model_calls"] for run in runs(gateway)] == [6, 6, 6]


@pytest.mark.parametrize("name", ["functions.parse:{}", "call_0", ""])
@pytest.mark.parametrize("prompts", [("a", "b"), ("a", "a")])
def test_ids_that_repeat_keep_conversations_apart(asks: RawUpstream, name: str, prompts: tuple[str, str]) -> None:
    """Kimi counts its calls anew in each conversation. Some servers give every call one id, or none."""

    def answer(request: Arrived) -> JSONResponse:
        number = len(request.json["messages"])
        function = {"name": "parse", "arguments": json.dumps({"n": number})}
        call = {"id": name.format(number), "type": "function", "function": function}
        return JSONResponse(chat_answer("", tool_calls=[call]))

    asks.answer = answer
    gateway = a_gateway(asks.url, max_model_calls=8)
    with served(gateway) as url:
        agents = [Agent(url, prompt) for prompt in prompts]
        for number in range(6):
            for agent in agents:
                assert agent.step()
                agent.messages[-1]["content"] = f"page {number} of many"
        assert [run["model_calls"] for run in runs(gateway)] == [6, 6]
    with served(gateway := a_gateway(asks.url)) as url:
        agent = Agent(url)
        for _ in range(6):
            assert agent.step()
        assert not agent.step()
        assert [trip.rule for trip in gateway.trips] == ["stall"]


def test_the_next_turn_of_one_of_two_equal_prompts_ends_its_own_run(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    with served(gateway) as url:
        one = Agent(url)
        asks.answer, tools = lambda request: JSONResponse(chat_answer("ready")), asks.answer
        one.step()
        asks.answer, before = tools, {run["run"] for run in runs(gateway)}
        two = Agent(url)
        two.step()
        (name,) = {run["run"] for run in runs(gateway)} - before
        one.say("and now?")
        one.step()
        two.step()
        assert [run["model_calls"] for run in runs(gateway) if run["run"] == name] == [2]


def test_the_ids_of_another_key_find_nothing(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    with served(gateway) as url:
        one = Agent(url, key="one")
        one.step()
        thief = Agent(url, key="two")
        thief.messages = list(one.messages)
        thief.step()
        assert sorted(run["model_calls"] for run in runs(gateway)) == [1, 2]  # its transcript counts for itself
        assert len({run["user"] for run in runs(gateway)}) == 2


# ---- sessions and lanes


def test_side_calls_and_sub_agents_are_lanes_of_the_run(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url, max_model_calls=20)
    with served(gateway) as url:
        main = Agent(url, session="s-1")
        main.step()
        title, helper = Agent(url, "title?", session="s-1", tools=[]), Agent(url, "search", session="s-1")
        title.step()
        for _ in range(2):
            helper.step()
        main.step()
        (run,) = runs(gateway)
        assert run["model_calls"] == 5
        assert run["session"] == "s-1"
        assert lanes(gateway) == 3


def test_tools_that_stand_among_the_messages_are_tools(upstream: RawUpstream) -> None:
    """Codex declares them so. Without tools, its next turn would be a side call of the last run."""
    upstream.answer = lambda request: JSONResponse({"model": MODEL, "output": [], "usage": {"input_tokens": 9}})
    declared = {"type": "additional_tools", "tools": [{"type": "custom", "name": "exec"}]}
    items: list[Any] = [declared]
    with served(gateway := a_gateway(upstream.url)) as url:
        names = set[str]()
        for text in ("one", "two"):
            items.append({"role": "user", "content": text})
            asked = {"model": MODEL, "max_output_tokens": 9, "input": items}
            httpx.post(f"{url}/v1/responses", json=asked, headers={"session-id": "s-1"})
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]})
            names |= {run["run"] for run in runs(gateway)}
    assert len(names) == 2


def test_a_looping_sub_agent_is_stopped_alone(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    with served(gateway) as url:
        main = Agent(url, session="s-1")
        main.step()
        helper = Agent(url, "search", session="s-1")
        while helper.step():
            pass
        assert helper.said.startswith("I stopped")
        assert main.step()
        assert len(runs(gateway)) == 1


def test_two_equal_sub_agents_at_once_have_lanes_of_their_own(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    with served(gateway) as url:
        main = Agent(url, session="s-1")
        main.step()
        one, two = Agent(url, "search", session="s-1"), Agent(url, "search", session="s-1")
        for _ in range(4):
            assert one.step()
            assert two.step()
        assert lanes(gateway) == 3


def test_without_a_session_each_conversation_is_a_run(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    with served(gateway) as url:
        for prompt in ("a", "b", "c"):
            Agent(url, prompt).step()
        assert len(runs(gateway)) == 3


# ---- who pays


def test_a_client_cannot_choose_who_pays(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url, budgets=[Budget(calls=2, per="user")])
    with served(gateway) as url:
        for number in range(4):
            agent = Agent(url, f"prompt {number}", session=f"s-{number}", key="mine")
            agent.headers |= {"x-user": f"somebody-{number}", "x-runguard-user": "nobody"}
            agent.step()
        assert len(asks.arrived) == 2
        other = Agent(url, key="another")
        assert other.step()


def test_a_trusted_header_names_the_user_and_goes_no_further(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url, access=Access(user_header="X-User"))
    with served(gateway) as url:
        agent = Agent(url)
        agent.headers["x-user"] = "ann"
        agent.step()
        assert runs(gateway)[0]["user"] == "ann"
        assert "x-user" not in asks.arrived[0].headers


# ---- memory


def test_idle_runs_end_and_memory_is_bounded(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    now = 0.0
    gateway.conversations = Conversations(gateway.guard, idle_seconds=60, most=5, now=lambda: now)
    with served(gateway) as url:
        for number in range(12):
            Agent(url, f"prompt {number}").step()
        assert len(gateway.guard.runs) == len(gateway.conversations) <= 6
        now = 100.0
        Agent(url, "later").step()
        assert len(gateway.guard.runs) == 1


@pytest.mark.parametrize("where", ["request", "arguments"])
def test_a_run_keeps_nothing_that_is_large(asks: RawUpstream, where: str) -> None:
    gateway, text = a_gateway(asks.url, max_usd=100), "word " * 400_000
    if where == "arguments":
        function = {"name": "parse", "arguments": json.dumps({"text": text})}
        calls = [{"id": "c-1", "type": "function", "function": function}]
        asks.answer = lambda request: JSONResponse(chat_answer("", tool_calls=calls))
    with served(gateway) as url:
        Agent(url).step()
        tracemalloc.start()
        Agent(url, text if where == "request" else "another").step()
        asks.arrived.clear()
        patience = time.monotonic() + 10  # the server lets go of a request a moment after its answer
        while (kept := _kept()) > len(text) / 2 and time.monotonic() < patience:
            time.sleep(0.05)
        tracemalloc.stop()
        assert len(runs(gateway)) == 2
    assert kept < len(text) / 2


def _kept() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_long_arguments_tell_calls_apart(asks: RawUpstream) -> None:
    """Equal calls are a loop, and others are not, also where only a digest of them is kept."""
    for is_equal in (True, False):
        gateway = a_gateway(asks.url)

        def answer(request: Arrived, is_equal: bool = is_equal) -> JSONResponse:
            number = len(asks.arrived)
            function = {"name": "parse", "arguments": json.dumps({"text": "x" * 100_000, "n": is_equal or number})}
            call = {"id": f"c-{is_equal}-{number}", "type": "function", "function": function}
            return JSONResponse(chat_answer("", tool_calls=[call]))

        asks.answer = answer
        with served(gateway) as url:
            agent = Agent(url)
            for number in range(12):
                if not agent.step():
                    break
                agent.messages[-1]["content"] = f"page {number}" if not is_equal else "the same page"
        assert bool(gateway.trips) == is_equal


def test_an_idle_run_ends_while_no_request_comes(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    gateway.conversations = Conversations(gateway.guard, idle_seconds=0.1)
    with served(gateway) as url:
        Agent(url).step()
        end = time.monotonic() + 10
        while gateway.guard.runs:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_fault_while_a_transcript_is_read_lets_the_call_pass_under_its_budget(
    asks: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = a_gateway(asks.url, max_usd="0.008")
    with served(gateway) as url:
        agent = Agent(url)
        agent.step()

        def broken(*_: Any) -> Any:
            raise ValueError

        monkeypatch.setattr(Strand, "catch_up", broken)
        assert agent.step()
        assert not agent.step()
        assert gateway.guard.guard_errors == 2
        assert len(asks.arrived) == 2


def test_a_run_that_was_idle_goes_on_from_its_transcript(asks: RawUpstream) -> None:
    gateway = a_gateway(asks.url)
    now = 0.0
    gateway.conversations = Conversations(gateway.guard, idle_seconds=60, now=lambda: now)
    with served(gateway) as url:
        agent = Agent(url)
        for _ in range(4):
            agent.step()
        now = 100.0
        Agent(url, "another").step()
        while agent.step():
            pass
        assert agent.said.startswith("I stopped")
        assert len([one for one in asks.arrived if one.json["messages"][0]["content"] == "go"]) == 6


# ---- several workers


@pytest.fixture
def workers(asks: RawUpstream, tmp_path: Any) -> Iterator[list[tuple[Gateway, str]]]:
    """Three gateways on one store, with a budget for each run and one for all."""
    store = f"sqlite:///{tmp_path / 'guard.db'}"
    made = [a_gateway(asks.url, store=store, max_usd="0.0425") for _ in range(3)]
    with served(made[0]) as one, served(made[1]) as two, served(made[2]) as three:
        yield list(zip(made, (one, two, three), strict=True))


def test_a_run_that_moves_between_workers_is_stopped_all_the_same(
    workers: list[tuple[Gateway, str]], asks: RawUpstream
) -> None:
    agent = Agent("")
    for number in range(12):
        gateway, url = workers[number % 3]
        more = agent.step(url)
        gateway.flush(5)
        if not more:
            break
    assert agent.said.startswith("I stopped because a step kept failing")
    assert len(asks.arrived) == 6
    names = {trip.run_id for gateway, _ in workers for trip in gateway.trips}
    assert len(names) == 1


def test_calls_without_ids_find_their_run_on_another_worker(nameless: RawUpstream, tmp_path: Path) -> None:
    made = [a_gateway(nameless.url, store=f"sqlite:///{tmp_path / 'guard.db'}", max_usd="0.0425") for _ in range(2)]
    with served(made[0]) as one, served(made[1]) as two:
        agent = Nameless.start("")
        while agent.step((one, two)[len(agent.messages) // 2 % 2]):
            assert len(nameless.arrived) < 30
        assert len(nameless.arrived) == 12
        assert len({run["run"] for gateway in made for run in runs(gateway)}) == 1


def test_a_run_is_found_while_its_name_is_being_written(
    workers: list[tuple[Gateway, str]], asks: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gateway, _ in workers:
        asked: list[Any] = []

        async def named(*given: Any, known: Any = gateway.guard.pauses.named, asked: Any = asked) -> Any:
            asked.append(given)
            return await known(*given) if len(asked) % 2 == 0 else ""

        monkeypatch.setattr(gateway.guard.pauses, "named", named)
    agent = Agent("")
    for number in range(6):
        agent.step(workers[number % 3][1])
    assert len({run["run"] for gateway, _ in workers for run in runs(gateway)}) == 1


def test_the_budget_of_a_run_holds_on_all_workers(workers: list[tuple[Gateway, str]], asks: RawUpstream) -> None:
    agent = Agent("")
    for number in range(30):
        gateway, url = workers[number % 3]
        agent.messages = [
            one if one["role"] != "tool" else {**one, "content": f"page {n}"} for n, one in enumerate(agent.messages)
        ]
        more = agent.step(url)
        gateway.flush(5)
        if not more:
            break
    assert "safety limit" in agent.said
    assert len(asks.arrived) == 11  # the twelfth would need 0.0035 for what it may say, beside 0.0385
