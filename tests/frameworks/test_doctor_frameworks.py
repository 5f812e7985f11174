"""``runguard doctor`` finds agents that a guarded agent can call and that are not guarded, on every framework."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runguard.cli import doctor as examining
from runguard.cli.main import main

# not among the oldest supported frameworks
STRANDS_ONLY = pytest.mark.skipif(find_spec("strands") is None, reason="no Strands here")
AGENT_FRAMEWORK_ONLY = pytest.mark.skipif(find_spec("agent_framework") is None, reason="no Agent Framework here")

LANGCHAIN = """
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from runguard.langchain import GuardedChatModel, RunGuardMiddleware

class Model(GenericFakeChatModel):
    model: str = "gpt-5-mini"
    def bind_tools(self, tools, **_):
        return self

guard, model = RunGuardMiddleware(max_usd=1), Model(messages=iter([]))
helper = create_agent(model, [], name="helper")
safe_helper = create_agent(model, [], name="helper", middleware=[guard])

def ask(question: str) -> str:
    "Ask the helper."
    return helper.invoke({"messages": [HumanMessage(question)]})["messages"][-1].content

def ask_safely(question: str) -> str:
    "Ask the guarded helper."
    return safe_helper.invoke({"messages": [HumanMessage(question)]})["messages"][-1].content

def describe(question: str) -> str:
    "Call a model in a tool."
    return model.invoke(question).content

bare = create_agent(model, [ask_safely], name="outer")
agent = create_agent(model, [ask], name="outer", middleware=[guard])
safe = create_agent(model, [ask_safely], name="outer", middleware=[guard])
aside = create_agent(model, [describe], name="outer", middleware=[guard, SummarizationMiddleware(model)])

def graph_of(chat, node):
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_edge(START, "model")
    if node is not None:
        graph.add_node("helper", node)
    return graph.compile(name="graph")

guarded_graph = graph_of(GuardedChatModel(model, max_usd=1), safe_helper)
bare_graph = graph_of(model, None)
graph_with_helper = graph_of(GuardedChatModel(model, max_usd=1), helper)
"""
OPENAI = """
from agents import Agent, Runner, WebSearchTool, function_tool, handoff
from runguard.openai_agents import guarded

writer = Agent(name="writer", model="gpt-5-mini")
critic = Agent(name="critic", model="gpt-5-mini", handoffs=[writer])

@function_tool
async def ask(question: str) -> str:
    return (await Runner.run(writer, question)).final_output

@function_tool
async def look(question: str) -> str:
    return "found"

clerk = Agent(name="clerk", model="gpt-5-mini", tools=[ask])
bare = Agent(name="outer", model="gpt-5-mini", tools=[look])
agent = guarded(Agent(name="outer", model="gpt-5-mini", tools=[ask, look]), max_usd=1)
safe = guarded(
    Agent(name="outer", model="gpt-5-mini", tools=[look, writer.as_tool("w", "write")], handoffs=[handoff(critic)]),
    max_usd=1,
)
late = guarded(Agent(name="outer", model="gpt-5-mini", handoffs=[handoff(clerk)]), max_usd=1)
added = guarded(Agent(name="outer", model="gpt-5-mini"), max_usd=1)
added.handoffs.append(writer)
aside = guarded(Agent(name="outer", model="gpt-5-mini", tools=[WebSearchTool()]), max_usd=1)
"""
PYDANTIC = """
from functools import partial
from pydantic_ai import Agent, Tool
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.test import TestModel
from runguard.pydantic_ai import RunGuard

guard, model = RunGuard(max_usd=1), TestModel(model_name="gpt-5-mini")
helper = Agent(model, name="helper")
safe_helper = Agent(model, name="helper", capabilities=[guard])

async def answer(question: str) -> str:
    return (await helper.run(question)).output

class Desk:
    def __init__(self, agent):
        self._agent = agent

    async def ask(self, question: str) -> str:
        return (await self._agent.run(question)).output

async def ask(question: str) -> str:
    return await answer(question)

bare = Agent(model, name="outer")
agent = Agent(model, name="outer", tools=[ask], capabilities=[guard])
desk = Agent(model, name="outer", tools=[Desk(helper).ask], capabilities=[guard])
safe = Agent(model, name="outer", tools=[Desk(safe_helper).ask], capabilities=[guard])
aside = Agent(FallbackModel(model, model), name="outer", capabilities=[guard])
"""
STRANDS = """
from runguard.strands import RunGuard
from strands import Agent, tool
from strands.models.openai import OpenAIModel

guard, model = RunGuard(max_usd=1), OpenAIModel(model_id="gpt-5-mini")
helper = Agent(name="helper", model=model, callback_handler=None)
safe_helper = Agent(name="helper", model=model, plugins=[guard], callback_handler=None)

@tool
def ask(question: str) -> str:
    "Ask the helper."
    return str(helper(question))

@tool
def ask_safely(question: str) -> str:
    "Ask the guarded helper."
    return str(safe_helper(question))

bare = Agent(name="outer", model=model, tools=[ask_safely], callback_handler=None)
agent = Agent(name="outer", model=model, tools=[ask], plugins=[guard], callback_handler=None)
safe = Agent(name="outer", model=model, tools=[ask_safely], plugins=[guard], callback_handler=None)
"""
AGENT_FRAMEWORK = """
from agent_framework import Agent, BaseChatClient
from runguard.agent_framework import RunGuard

class Client(BaseChatClient):
    model = "gpt-5-mini"
    async def _inner_get_response(self, **request):
        raise NotImplementedError

guard = RunGuard(max_usd=1)
helper = Agent(Client(), name="helper")
safe_helper = Agent(Client(), name="helper", middleware=[guard])

async def ask(question: str) -> str:
    "Ask the helper."
    return (await helper.run(question)).text

async def ask_safely(question: str) -> str:
    "Ask the guarded helper."
    return (await safe_helper.run(question)).text

bare = Agent(Client(), name="outer", tools=[ask_safely])
agent = Agent(Client(), name="outer", tools=[ask], middleware=[guard])
safe = Agent(Client(), name="outer", tools=[ask_safely], middleware=[guard])
"""
ADK = """
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import InMemoryRunner
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel
from runguard.adk import RunGuardPlugin
from runguard.pydantic_ai import RunGuard

helper = Agent(TestModel(model_name="gpt-5-mini"), name="helper")
safe_helper = Agent(TestModel(model_name="gpt-5-mini"), name="helper", capabilities=[RunGuard()])
runner = InMemoryRunner(agent=LlmAgent(name="inner", model="gemini-2.5-flash"), app_name="inner_app")

async def ask(question: str) -> str:
    return (await helper.run(question)).output

async def ask_safely(question: str) -> str:
    return (await safe_helper.run(question)).output

async def start(question: str) -> str:
    return str([event async for event in runner.run_async(user_id="u", session_id="s", new_message=question)])

def app_of(tool):
    root = LlmAgent(name="docs", model="gemini-2.5-flash", tools=[tool])
    return App(name="docs", root_agent=root, plugins=[RunGuardPlugin()])

agent, safe, nested = app_of(ask), app_of(ask_safely), app_of(start)
"""


@pytest.fixture(autouse=True)
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    apps = {"lc": LANGCHAIN, "oai": OPENAI, "pyd": PYDANTIC, "strands": STRANDS, "af": AGENT_FRAMEWORK, "adk": ADK}
    for name, code in apps.items():
        (tmp_path / f"app_{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    ok = examining.CheckResult("self-test", "ok", "")
    monkeypatch.setattr(examining, "self_test", lambda: ok)  # the live test on ADK has its own tests
    yield
    for name in [name for name in sys.modules if name.startswith("app_")]:
        del sys.modules[name]


def doctor(target: str, code: int) -> list[tuple[str, str, str]]:
    ran = CliRunner().invoke(main, ["doctor", "--app", target, "--json"])
    assert ran.exit_code == code, ran.output
    checks = json.loads(ran.stdout)["checks"]
    about = ("guard", "plugins", "sub-agents", "hidden", "app")
    return [(one["check"], one["state"], one["found"]) for one in checks if one["check"] in about]


@pytest.mark.parametrize(
    "target",
    [
        "app_lc:bare",
        "app_lc:bare_graph",
        "app_oai:bare",
        "app_pyd:bare",
        pytest.param("app_strands:bare", marks=STRANDS_ONLY),
        pytest.param("app_af:bare", marks=AGENT_FRAMEWORK_ONLY),
    ],
)
def test_an_agent_without_a_guard_is_a_problem(target: str) -> None:
    [guard, *_] = doctor(target, 1)
    assert guard[:2] == ("guard", "problem")
    assert guard[2].endswith("and is not guarded")


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("app_lc:agent", "agent helper of LangChain, which outer can call, is not guarded"),
        ("app_lc:graph_with_helper", "agent helper of LangChain, which graph can call, is not guarded"),
        ("app_pyd:agent", "agent helper of Pydantic AI, which outer can call, is not guarded"),
        ("app_pyd:desk", "agent helper of Pydantic AI, which outer can call, is not guarded"),
        pytest.param(
            "app_strands:agent", "agent helper of Strands, which outer can call, is not guarded", marks=STRANDS_ONLY
        ),
        pytest.param(
            "app_af:agent",
            "agent helper of Agent Framework, which outer can call, is not guarded",
            marks=AGENT_FRAMEWORK_ONLY,
        ),
        ("app_adk:agent", "agent helper of Pydantic AI, which app_adk:agent can call, is not guarded"),
        ("app_adk:nested", "agent inner_app of ADK, which app_adk:nested can call, is not guarded"),
    ],
)
def test_an_agent_that_can_be_called_without_a_guard_is_a_problem(target: str, found: str) -> None:
    lines = doctor(target, 1)
    assert lines[0][1] == "ok", lines
    assert [line[2] for line in lines if line[1] == "problem"] == [found]


@pytest.mark.parametrize(
    "target",
    [
        "app_lc:safe",
        "app_lc:guarded_graph",
        "app_oai:safe",
        "app_oai:agent",
        "app_oai:late",
        "app_oai:added",
        "app_pyd:safe",
        pytest.param("app_strands:safe", marks=STRANDS_ONLY),
        pytest.param("app_af:safe", marks=AGENT_FRAMEWORK_ONLY),
        "app_adk:safe",
    ],
)
def test_a_tree_that_is_guarded_as_a_whole_has_no_problem(target: str) -> None:
    lines = doctor(target, 0)
    assert [line[1] for line in lines] == ["ok", "ok"], lines
    assert lines[1][2].endswith("guarded")


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (
            "app_lc:aside",
            ["SummarizationMiddleware calls the model gpt-5-mini", "tool describe calls the model"],
        ),
        ("app_oai:aside", ["OpenAI executes WebSearchTool"]),
        ("app_pyd:aside", ["attempts inside FallbackModel are one call"]),
    ],
)
def test_calls_that_the_framework_hides_are_a_warning(target: str, found: list[str]) -> None:
    hidden = [line[2] for line in doctor(target, 0) if line[:2] == ("hidden", "warning")]
    assert len(hidden) == len(found)
    assert all(words in line for words, line in zip(found, hidden, strict=True)), hidden


def test_any_other_object_is_not_an_app() -> None:
    [line] = doctor("app_lc:ask", 1)
    assert line[:2] == ("app", "problem")
    assert "LangChain, the OpenAI Agents SDK, Pydantic AI, Strands or Microsoft Agent Framework" in line[2]
