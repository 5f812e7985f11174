"""``once`` on real ADK: a side effect happens once, however the model spells the call; another one is never taken for
it.
"""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.parallel_agent import ParallelAgent
from google.adk.apps import App
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.adk.tools.tool_context import ToolContext
from google.adk.workflow import Workflow
from google.genai import types
from pydantic import BaseModel, ConfigDict, Field, model_validator

import runguard
from runguard import ToolRule
from runguard.adk import RunGuardPlugin, tool_hooks
from runguard.testing import ScriptedModel, call, calls, run, text
from tests.kit.adk_runs import observe, play

ONCE = {"pay": ToolRule(once=True)}
received: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def nothing_received() -> None:
    received.clear()


async def paid(tool: Any, *args: dict[str, Any], one_response: bool = False, **policy: Any) -> int:
    """How often the tool ran, when the model calls it with these arguments one after the other."""
    received.clear()
    asked = [call("pay", **given) for given in args]
    script: list[Any] = [calls(*asked), text("done")] if one_response else [*asked, text("done")]
    seen = await observe(LlmAgent(name="a", model=ScriptedModel(script), tools=[tool]), **{"tools": ONCE, **policy})
    assert seen.result.texts == ["done"]
    return len(received)


def pay(
    invoice: str,
    amount: int = 5,
    currency: str = "EUR",
    rate: float = 1.0,
    express: bool = False,
    note: str | None = None,
) -> dict[str, bool]:
    received.append(
        {"invoice": invoice, "amount": amount, "currency": currency, "rate": rate, "express": express, "note": note}
    )
    return {"paid": True}


# ---- ways around it -------------------------------------------------------------------------------------------------

SPELLINGS: dict[str, list[dict[str, Any]]] = {
    "undeclared": [{"invoice": "A1", "amount": 5, "x": n} for n in range(5)],
    "attempt": [{"invoice": "A1"}, *({"invoice": "A1", "attempt": n} for n in range(3))],
    "default": [{"invoice": "A1"}, {"invoice": "A1", "amount": 5}, {"invoice": "A1", "currency": "EUR", "note": None}],
    "int": [{"invoice": "A1", "amount": spelled} for spelled in (5, "5", "05", " 5 ", "5.0", 5.0)],
    "float": [{"invoice": "A1", "rate": spelled} for spelled in (1, "1", 1.0, "1.0", "1e0")],
    "bool": [{"invoice": "A1", "express": spelled} for spelled in (False, "false", 0, "no")],
    "invisible": [{"invoice": spelled} for spelled in ("A1", "A\u200b1", "A1\u2060", "\ufeffA1")],
    "composed": [{"invoice": spelled} for spelled in ("\u00c41", "A\u03081")],
    "order": [{"invoice": "A1", "amount": 5}, {"amount": 5, "invoice": "A1"}],
}


@pytest.mark.parametrize("one_response", [False, True], ids=["in a row", "at once"])
@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
async def test_a_call_that_is_spelled_in_another_way_is_not_done_again(
    spelled: list[dict[str, Any]], one_response: bool
) -> None:
    assert await paid(pay, *spelled, one_response=one_response) == 1


async def test_what_another_invoice_is_stays_another_invoice() -> None:
    others: list[dict[str, Any]] = [
        {"invoice": "A1"},
        {"invoice": "a1"},
        {"invoice": "A1 "},
        {"invoice": "A 1"},
        {"invoice": "A  1"},
        {"invoice": "5"},
        {"invoice": "A1", "amount": 50},
        {"invoice": "A1", "amount": "5.5"},
        {"invoice": "A1", "amount": 9007199254740993},
        {"invoice": "A1", "amount": 9007199254740992},
        {"invoice": "A1", "rate": 1.1},
        {"invoice": "A1", "express": True},
        {"invoice": "A1", "currency": "eur"},
        {"invoice": "A1", "note": ""},
        {"invoice": "A1", "note": "None"},
        {"invoice": "A" * 40_000 + "1" + "A" * 40_000},
        {"invoice": "A" * 40_000 + "2" + "A" * 40_000},
    ]
    assert await paid(pay, *others) == len(others)


# ---- what reaches a function ----------------------------------------------------------------------------------------


async def test_a_function_with_keywords_of_any_name_receives_only_declared_ones() -> None:
    """So says ADK, old and new; if a later one hands them on, they have to count."""

    def pay(invoice: str, **extra: Any) -> dict[str, bool]:
        received.append({"invoice": invoice, **extra})
        return {"paid": True}

    calls = [
        {"invoice": "A1", "x": 1},
        {"invoice": "A1", "x": 2},
        {"invoice": "A1", "extra": 1},
        {"invoice": "A1", "extra": 2},
    ]
    root = LlmAgent(
        name="a", model=ScriptedModel([*(call("pay", **given) for given in calls), text("done")]), tools=[pay]
    )
    await play(root)
    different = [each for number, each in enumerate(received) if each not in received[:number]]
    assert different == [{"invoice": "A1"}, {"invoice": "A1", "extra": 1}, {"invoice": "A1", "extra": 2}]
    assert await paid(pay, *calls) == len(different)


async def test_what_adk_puts_in_does_not_count() -> None:
    def pay(invoice: str, context: ToolContext, input_stream: Any = None) -> dict[str, bool]:
        received.append({"invoice": invoice})
        return {"paid": True}

    assert (
        await paid(
            pay,
            {"invoice": "A1"},
            {"invoice": "A1", "context": "x"},
            {"invoice": "A1", "tool_context": 1},
            {"invoice": "A1", "input_stream": 2},
        )
        == 1
    )


class Order(BaseModel):
    invoice: str = Field(alias="id")
    amount: int = 5
    tags: list[str] = Field(default_factory=list)
    before: "Order | None" = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    invoice: str


class Reading(BaseModel):
    invoice: str

    @model_validator(mode="before")
    @classmethod
    def read(cls, given: Any) -> Any:
        return {"invoice": given["invoice"] + str(given.get("suffix", ""))}


async def test_a_model_as_a_parameter() -> None:
    def pay(order: Order) -> dict[str, bool]:
        received.append({"order": order})
        return {"paid": True}

    orders = [
        {"id": "A1"},
        {"id": "A1", "x": 1},
        {"id": "A1", "amount": "5"},
        {"id": "A1", "tags": []},
        {"id": "A1", "before": None},
    ]
    assert await paid(pay, *({"order": order} for order in orders)) == 1
    others: list[dict[str, Any]] = [
        {"id": "A1"},
        {"id": "A1", "amount": 6},
        {"id": "A1", "tags": ["x"]},
        {"id": "A1", "before": {"id": "A1"}},
        {"id": "A1", "before": {"id": "A2"}},
    ]
    assert await paid(pay, *({"order": order} for order in others)) == len(others)


async def test_a_list_of_models_as_a_parameter() -> None:
    def pay(orders: list[Order]) -> dict[str, bool]:
        received.append({"orders": orders})
        return {"paid": True}

    one, two = {"id": "A1", "x": 1}, {"id": "A2"}
    assert await paid(pay, {"orders": [one, two]}, {"orders": [{"id": "A1", "x": 2}, {"id": "A2", "amount": 5}]}) == 1
    assert await paid(pay, {"orders": [one, two]}, {"orders": [two, one]}) == 2


@pytest.mark.parametrize("model", [Open, Reading])
async def test_a_model_that_looks_at_everything_is_compared_by_everything(model: Any) -> None:
    def pay(order: Any) -> dict[str, bool]:
        received.append({"order": order})
        return {"paid": True}

    pay.__annotations__["order"] = model
    assert await paid(pay, *({"order": {"invoice": "A1", "suffix": n}} for n in range(3))) == 3


class Payer:
    """A tool may be an object."""

    def __call__(self, invoice: str, amount: int = 5) -> dict[str, bool]:
        """Pays."""
        received.append({"invoice": invoice, "amount": amount})
        return {"paid": True}


def _named(function: Any) -> Any:
    function.__name__ = "pay"
    return function


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


def unresolved(
    invoice: str,
    amount: "Annotated[int, 'whole'] | None" = 5,
    other: "NoSuchType" = None,  # type: ignore[name-defined]  # noqa: F821
) -> dict[str, bool]:
    received.append({"invoice": invoice, "amount": amount})
    return {"paid": True}


@pytest.mark.parametrize(
    "tool",
    [_named(Payer()), _decorated(pay), _named(functools.partial(pay, currency="USD"))],
    ids=["object", "decorated", "partial"],
)
async def test_functions_of_every_make(tool: Any) -> None:
    spelled: list[dict[str, Any]] = [
        {"invoice": "A1"},
        {"invoice": "A1", "amount": 5},
        {"invoice": "A1", "amount": "5", "x": 1},
    ]
    assert await paid(tool, *spelled, {"invoice": "A1", "amount": 6}) == 2


async def test_a_function_is_read_once_though_adk_makes_a_new_tool_of_it_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Mock(side_effect=tool_hooks.declared_by)
    monkeypatch.setattr(tool_hooks, "declared_by", read)

    def step(n: int) -> dict[str, int]:
        return {"n": n}

    model = ScriptedModel([*(call("step", n=n) for n in range(4)), text("done")])
    await play(LlmAgent(name="agent", model=model, tools=[step]), plugins=[RunGuardPlugin()])
    assert read.call_count == 1


def test_an_annotation_that_cannot_be_resolved_hides_no_other() -> None:
    declared = tool_hooks.declared_by(FunctionTool(unresolved))
    assert declared is not None
    assert (declared.kinds["amount"], declared.kinds["other"], declared.defaults) == (
        int,
        None,
        {"amount": 5, "other": None},
    )


async def test_a_rule_beside_the_code_compares_in_the_same_way() -> None:
    assert (
        await paid(
            runguard.tool(once=True)(_decorated(pay)), {"invoice": "A1"}, {"invoice": "A1", "amount": "5"}, tools={}
        )
        == 1
    )


# ---- tools that are no plain functions ------------------------------------------------------------------------------


class OwnWay(FunctionTool):
    """Does with the arguments what it likes."""

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
        received.append(dict(args))
        return {"paid": True}


class Remote(BaseTool):
    """Like a tool of an MCP server or an OpenAPI document: known by its schema."""

    def __init__(self, **declared: Any) -> None:
        super().__init__(name="pay", description="Pays.")
        self._declaration = types.FunctionDeclaration(name="pay", description="Pays.", **declared)

    def _get_declaration(self) -> types.FunctionDeclaration:
        return self._declaration

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
        received.append(dict(args))
        return {"paid": True}


SCHEMA = {
    "type": "object",
    "properties": {
        "invoice": {"type": "string"},
        "amount": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 5},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"price": {"type": ["number", "null"]}}}},
    },
}


NUMBER, INTEGER = (
    types.Schema(type=types.Type.NUMBER, nullable=True),
    types.Schema(any_of=[types.Schema(type="INTEGER"), types.Schema(type="NULL")]),
)
LINE = types.Schema(type=types.Type.OBJECT, properties={"price": NUMBER})
ADK_SCHEMA = types.Schema(
    type=types.Type.OBJECT,
    properties={
        "invoice": types.Schema(type=types.Type.STRING),
        "amount": INTEGER,
        "lines": types.Schema(type=types.Type.ARRAY, items=LINE),
    },
)
WITH_SCHEMA = [Remote(parameters_json_schema=SCHEMA), Remote(parameters=ADK_SCHEMA)]


@pytest.mark.parametrize(
    "tool", [OwnWay(pay), *WITH_SCHEMA, Remote()], ids=["own way", "schema", "schema of ADK", "unknown"]
)
async def test_elsewhere_every_argument_counts(tool: Any) -> None:
    others: list[dict[str, Any]] = [
        {"invoice": "A1"},
        {"invoice": "A1", "x": 1},
        {"invoice": "A1", "x": 2},
        {"invoice": "A1", "amount": 5},
        {"invoice": "A1", "attempt": 1},
    ]
    assert await paid(tool, *others, *others) == len(others)


# ---- calls that take their time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, {"status": "pending"}], ids=["silent", "pending"])
async def test_what_a_long_running_tool_began_is_not_begun_again(answer: Any) -> None:
    def pay(invoice: str, amount: int = 5) -> Any:
        """Pays."""
        received.append({"invoice": invoice})
        return answer

    service, plugin = InMemorySessionService(), RunGuardPlugin(tools=ONCE)
    model = ScriptedModel(lambda n, _: call("pay", invoice="A1", x=n) if n % 2 else text("done"))
    root = LlmAgent(name="a", model=model, tools=[LongRunningFunctionTool(pay)])
    for _ in range(4):
        await play(root, plugins=[plugin], session_service=service)
    assert len(received) == 1


async def test_a_long_running_tool_that_failed_may_be_tried_again() -> None:
    def pay(invoice: str) -> Any:
        """Pays."""
        received.append({"invoice": invoice})
        raise RuntimeError("no connection")

    service, plugin = InMemorySessionService(), RunGuardPlugin(tools=ONCE)
    root = LlmAgent(
        name="a",
        model=ScriptedModel([call("pay", invoice="A1")]),
        tools=[LongRunningFunctionTool(pay)],
        on_tool_error_callback=lambda tool, args, tool_context, error: {},
    )
    for _ in range(2):
        await play(root, plugins=[plugin], session_service=service)
    assert len(received) == 2


async def test_two_confirmed_calls_of_one_side_effect_are_one() -> None:
    service = InMemorySessionService()
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    script: list[Any] = [
        calls(call("pay", invoice="A1"), call("pay", invoice="A2")),
        text("asked"),
        call("pay", invoice="A1", amount="5"),
        text("done"),
    ]
    root = LlmAgent(name="a", model=ScriptedModel(script), tools=[FunctionTool(pay, require_confirmation=True)])
    runner = Runner(app=App(name="app", root_agent=root, plugins=[RunGuardPlugin(tools=ONCE)]), session_service=service)
    parts, asked = [types.Part(text="go")], set[str]()
    for _ in range(3):
        async with asyncio.timeout(20):
            message = types.Content(role="user", parts=parts)
            events = [event async for event in runner.run_async(user_id="u1", session_id="s1", new_message=message)]
        requests = [
            c
            for event in events
            for c in event.get_function_calls()
            if c.name == "adk_request_confirmation" and c.id not in asked
        ]
        asked |= {request.id or "" for request in requests}
        parts = [
            types.Part(function_response=types.FunctionResponse(id=r.id, name=r.name, response={"confirmed": True}))
            for r in requests
        ]
        parts = parts or [types.Part(text="go on")]
    assert sorted(each["invoice"] for each in received) == ["A1", "A2"]


async def test_parallel_agents_do_it_once() -> None:
    async def slow(invoice: str, amount: int = 5) -> dict[str, bool]:
        received.append({"invoice": invoice})
        await asyncio.sleep(0.05)
        return {"paid": True}

    slow.__name__ = "pay"
    team = [
        LlmAgent(name=f"a{n}", model=ScriptedModel([call("pay", invoice="A1", x=n), text("done")]), tools=[slow])
        for n in range(5)
    ]
    await observe(ParallelAgent(name="all", sub_agents=team), tools=ONCE)
    assert len(received) == 1


async def _adk_asks_plugins_about_tool_nodes(build: Callable[[], Workflow]) -> bool:
    class Asked(BasePlugin):
        times = 0

        async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
            Asked.times += 1

    await play(build(), plugins=[Asked(name="asked")])
    return Asked.times > 0


async def test_a_tool_as_a_node_of_a_workflow_does_it_once_in_a_session() -> None:
    def build() -> Workflow:
        def start(node_input: Any) -> dict[str, Any]:
            return {"invoice": "A1", "x": len(received)}

        return Workflow(name="wf", edges=[("START", start), (start, FunctionTool(pay))])

    if not await _adk_asks_plugins_about_tool_nodes(build):
        pytest.skip("this ADK tells no plugin about tool nodes")
    received.clear()
    service, plugin = InMemorySessionService(), RunGuardPlugin(tools=ONCE)
    for _ in range(3):
        await play(build(), plugins=[plugin], session_service=service)
    assert len(received) == 1


async def test_a_node_that_failed_may_try_again() -> None:
    def pay(invoice: str) -> dict[str, bool]:
        received.append({"invoice": invoice})
        if len(received) == 1:
            raise RuntimeError("no connection")
        return {"paid": True}

    service, plugin = InMemorySessionService(), RunGuardPlugin(tools=ONCE)

    def build() -> Workflow:
        def start(node_input: Any) -> dict[str, Any]:
            return {"invoice": "A1"}

        return Workflow(name="wf", edges=[("START", start), (start, FunctionTool(pay))])

    for _ in range(2):
        await play(build(), plugins=[plugin], session_service=service, catch=True)
    assert len(received) == 2


# ---- other workers and recordings -----------------------------------------------------------------------------------


async def test_every_worker_of_a_store_knows_the_same_side_effect(tmp_path: Path) -> None:
    for given in ({"invoice": "A1", "x": 1}, {"amount": "5", "invoice": "A1\u200b"}, {"invoice": "A1", "amount": 6}):
        worker = RunGuardPlugin(tools=ONCE, store=f"sqlite:///{tmp_path}/guard.db", store_timeout=30)
        await play(
            LlmAgent(name="a", model=ScriptedModel([call("pay", **given), text("done")]), tools=[pay]), plugins=[worker]
        )
        assert worker.flush()
    assert [(each["invoice"], each["amount"]) for each in received] == [("A1", 5), ("A1", 6)]


@pytest.mark.parametrize("exempt", [False, True])
async def test_a_refused_call_leaves_the_claim_of_another_worker_alone(tmp_path: Path, exempt: bool) -> None:
    """The second worker asks while the first is at it, and again later: neither may let a third one in."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def pay(invoice: str) -> dict[str, bool]:
        received.append({"invoice": invoice})
        begun.set()
        await go_on.wait()
        return {"paid": True}

    def worker() -> RunGuardPlugin:
        return RunGuardPlugin(
            tools={"pay": ToolRule(once=True, exempt=exempt)}, store=f"sqlite:///{tmp_path}/guard.db", store_timeout=30
        )

    def root() -> LlmAgent:
        return LlmAgent(name="a", model=ScriptedModel([call("pay", invoice="A1"), text("done")]), tools=[pay])

    first = asyncio.create_task(run(root(), plugins=[worker()]))
    async with asyncio.timeout(20):
        await begun.wait()
        for _ in range(2):
            other = worker()
            await run(root(), plugins=[other])
            assert other.flush()
        go_on.set()
        await first
    assert len(received) == 1
