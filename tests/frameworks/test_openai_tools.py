"""A guarded tool pauses, fails and copies as it does without a guard, and the rules see how it failed."""

import asyncio
import contextlib
import itertools
from typing import Any

import pytest
from agents import (
    Agent,
    ApplyPatchTool,
    CustomTool,
    RunConfig,
    Runner,
    ShellTool,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrailTripwireTriggered,
    function_tool,
    set_tracing_disabled,
    tool_input_guardrail,
    tool_output_guardrail,
)
from agents.items import ModelResponse
from agents.models.interface import Model
from agents.usage import Usage
from openai.types.responses import (
    Response,
    ResponseApplyPatchToolCall,
    ResponseCompletedEvent,
    ResponseCustomToolCall,
    ResponseFunctionShellToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from runguard.openai_agents import AgentGuard, guarded
from tests.frameworks.openai_harness import played

_ids = itertools.count(1)
set_tracing_disabled(True)


def say(text: str) -> ResponseOutputMessage:
    part = ResponseOutputText(type="output_text", text=text, annotations=[])
    return ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[part])


def call(tool: str, args: str) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        id=f"fc{next(_ids)}", call_id=f"c{next(_ids)}", type="function_call", name=tool, arguments=args
    )


class Steps(Model):
    """Answers with one step after the other, and with the last one from then on."""

    def __init__(self, *steps: list[Any]) -> None:
        self.steps, self.calls, self.model = steps, 0, "gpt-5-mini"

    def _next(self) -> list[Any]:
        self.calls += 1
        items = self.steps[min(self.calls, len(self.steps)) - 1]
        return [call(one.name, one.arguments) if isinstance(one, ResponseFunctionToolCall) else one for one in items]

    async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
        return ModelResponse(self._next(), Usage(1, 10, output_tokens=5, total_tokens=15), None)

    async def stream_response(self, *_: Any, **__: Any) -> Any:
        response = Response(
            id="r",
            created_at=0.0,
            model=self.model,
            object="response",
            output=self._next(),
            parallel_tool_calls=True,
            tool_choice="auto",
            tools=[],
        )
        yield ResponseCompletedEvent(type="response.completed", sequence_number=0, response=response)


async def play(agent: Agent[Any], way: str, **settings: Any) -> Any:
    return await played(agent, "go", way, max_turns=60, **settings)


def outputs(result: Any) -> list[Any]:
    return [item.output for item in result.new_items if item.type == "tool_call_output_item"]


# ---- a human's approval ---------------------------------------------------------------------------------------------


def production(_: Any, args: dict[str, Any], __: str) -> bool:
    return args.get("target") == "production"


async def production_later(context: Any, args: dict[str, Any], call_id: str) -> bool:
    return production(context, args, call_id)


NEEDS: dict[str, Any] = {"always": True, "never": False, "function": production, "async function": production_later}
ARGS = {
    "none": ["{}"],
    "empty": [""],
    "no object": ["[]"],
    "default": ['{"target": "production"}'],
    "other": ['{"target": "test"}'],
    "another type": ['{"target": 7}'],
    "invalid": ['{"target": '],
    "unknown": ['{"what": 1}'],
    "parallel": ["{}", '{"target": "test"}', '{"target": "production"}', "{"],
}


@pytest.mark.parametrize("way", ["run", "run_streamed"])
@pytest.mark.parametrize("args", ARGS)
@pytest.mark.parametrize("needs", NEEDS)
async def test_a_guarded_tool_waits_for_approval_where_the_plain_one_does(needs: str, args: str, way: str) -> None:
    async def of(guard: bool) -> Any:
        deleted = []

        @function_tool(needs_approval=NEEDS[needs], strict_mode=False)
        def delete(target: str = "production") -> str:
            deleted.append(target)
            return f"DELETED {target}"

        model = Steps([call("delete", one) for one in ARGS[args]], [say("done")])
        agent: Agent[Any] = Agent(name="worker", model=model, tools=[delete])
        result = await play(guarded(agent) if guard else agent, way)
        seen = [len(result.interruptions), list(deleted), outputs(result)]
        if result.interruptions:
            state = result.to_state()
            for item in result.interruptions:
                state.approve(item)
            result = await Runner.run(guarded(agent) if guard else agent, state)
        return [*seen, sorted(deleted), outputs(result)]

    assert await of(True) == await of(False)


async def test_a_default_that_needs_approval_is_not_executed() -> None:
    deleted = []

    @function_tool(needs_approval=production)  # type: ignore[arg-type]
    def delete(target: str = "production") -> str:
        deleted.append(target)
        return "DELETED"

    plain: Agent[Any] = Agent(name="worker", model=Steps([call("delete", "{}")], [say("done")]), tools=[delete])
    paused = len((await Runner.run(plain, "go")).interruptions)
    deleted.clear()
    agent = guarded(plain.clone(model=Steps([call("delete", "{}")], [say("done")])))
    assert len((await Runner.run(agent, "go")).interruptions) == paused
    assert len(deleted) == 1 - paused
    assert agent.tools == [delete], "the tools of the agent stay as they are"


async def test_a_guarded_tool_knows_its_function() -> None:
    @function_tool
    def look(page: int) -> str:
        return f"page {page}"

    agent = guarded(Agent(name="worker", model=Steps([say("done")]), tools=[look]))
    wrapped: Any = getattr(look, "__wrapped__", None)
    assert getattr(agent.tools[0], "__wrapped__", None) is wrapped


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["run", "run_streamed"])
@pytest.mark.parametrize("own_text", [False, True], ids=["the SDK's text", "a text of the tool"])
async def test_a_tool_that_raises_again_and_again_is_stopped(own_text: bool, way: str) -> None:
    settings: dict[str, Any] = {"failure_error_function": lambda *_: "Sorry."} if own_text else {}

    @function_tool(**settings)  # type: ignore[untyped-decorator]
    def fetch(page: int) -> str:
        raise ConnectionError("the database is down")

    model = Steps(*([call("fetch", f'{{"page": {page}}}')] for page in range(50)), [say("gave up")])
    agent = guarded(Agent(name="worker", model=model, tools=[fetch]))
    result = await play(agent, way)
    [trip] = agent.runguard.trips
    assert (trip.tool, result.final_output) == ("fetch", agent.runguard.guard.stop_text(trip))
    assert model.calls <= 10
    if own_text:
        assert outputs(result)[0] == "Sorry.", "the model sees the text that it saw before"


async def test_the_formatter_of_a_run_still_writes_the_text() -> None:
    @function_tool
    def fetch(page: int) -> str:
        raise ConnectionError("the database is down")

    def of() -> Agent[Any]:
        return Agent(name="worker", model=Steps([call("fetch", '{"page": 1}')], [say("done")]), tools=[fetch])

    config = RunConfig(tool_error_formatter=lambda args: "formatted")
    plain = outputs(await Runner.run(of(), "go", run_config=config))
    assert outputs(await Runner.run(guarded(of()), "go", run_config=config)) == plain


async def test_wrong_arguments_again_and_again_are_stopped() -> None:
    @function_tool
    def fetch(page: int) -> str:
        return "fine"

    model = Steps(*([call("fetch", '{"page": "first"}')] for _ in range(50)), [say("gave up")])
    agent = guarded(Agent(name="worker", model=model, tools=[fetch]))
    await play(agent, "run")
    assert [trip.tool for trip in agent.runguard.trips] == ["fetch"]
    assert model.calls <= 12


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_a_tool_that_runs_out_of_time_again_and_again_is_stopped(way: str) -> None:
    @function_tool(timeout=0.01)
    async def fetch(page: int) -> str:
        await asyncio.Event().wait()
        return "never"

    model = Steps(*([call("fetch", f'{{"page": {page}}}')] for page in range(50)), [say("gave up")])
    agent = guarded(Agent(name="worker", model=model, tools=[fetch]))
    result = await play(agent, way)
    [trip] = agent.runguard.trips
    assert trip.tool == "fetch"
    assert model.calls <= 10
    assert "timed out" in outputs(result)[0], "the model sees the text that it saw before"


async def test_a_tool_that_ends_the_run_with_its_exception_opens_its_breaker() -> None:
    executed = []

    @function_tool(failure_error_function=None)
    def fetch(page: int) -> str:
        executed.append(page)
        raise ConnectionError("the database is down")

    guard = AgentGuard(max_tool_failures=2)
    for page in range(4):
        model = Steps([call("fetch", f'{{"page": {page}}}')], [say("done")])
        agent = guard.guarded(Agent[Any](name="worker", model=model, tools=[fetch]))
        with contextlib.suppress(Exception):
            await Runner.run(agent, "go")
    assert executed == [0, 1]


async def test_a_tool_that_does_not_exist_is_seen_and_costs_nothing() -> None:
    config: Any = {}
    if "tool_not_found_behavior" in RunConfig.__dataclass_fields__:
        config = {"run_config": RunConfig(tool_not_found_behavior="return_error_to_model")}
    model = Steps(*([call("fetch", f'{{"page": {page}}}')] for page in range(50)), [say("gave up")])
    tools: Any = {"fetch": {"price": "0.4"}}
    agent = guarded(Agent(name="worker", model=model), max_usd=5, tools=tools)
    if not config:  # an older SDK ends the run
        with pytest.raises(Exception, match="not found"):
            await play(agent, "run")
        assert not agent.runguard.guard.runs
        return
    result = await play(agent, "run", **config)
    assert model.calls <= 10
    [trip] = agent.runguard.trips
    assert result.final_output == agent.runguard.guard.stop_text(trip)
    assert agent.runguard.spend()["tools_usd"] == 0


@pytest.mark.parametrize("behaviour", ["reject", "raise"])
async def test_the_guardrails_of_a_tool_come_before_the_guard(behaviour: str) -> None:
    seen: list[str] = []

    @tool_input_guardrail
    def never(data: Any) -> ToolGuardrailFunctionOutput:
        seen.append(data.context.tool_call_id)
        if behaviour == "raise":
            return ToolGuardrailFunctionOutput.raise_exception()
        return ToolGuardrailFunctionOutput.reject_content("Not today.")

    @function_tool(tool_input_guardrails=[never])
    def fetch(page: int) -> str:
        raise AssertionError("the guardrail refuses this")

    model = Steps([call("fetch", '{"page": 1}')], [say("done")])
    tools: Any = {"fetch": {"price": "0.4"}}
    agent = guarded(Agent(name="worker", model=model, tools=[fetch]), max_usd=5, tools=tools)
    if behaviour == "raise":
        with pytest.raises(ToolInputGuardrailTripwireTriggered):
            await play(agent, "run")
    else:
        assert outputs(await play(agent, "run")) == ["Not today."]
    assert len(seen) == 1
    spend = agent.runguard.spend()
    assert (spend["tools_usd"], spend["reserved_usd"]) == (0, 0)


async def test_an_answer_that_is_too_large_is_left_out_and_guardrails_still_see_it() -> None:
    seen: list[int] = []

    @tool_output_guardrail
    def look_at(data: Any) -> ToolGuardrailFunctionOutput:
        seen.append(len(data.output))
        return ToolGuardrailFunctionOutput.allow()

    @function_tool(tool_output_guardrails=[look_at])
    def fetch(page: int) -> str:
        return "x" * 5_000

    model = Steps([call("fetch", '{"page": 1}')], [say("done")])
    agent = guarded(Agent(name="worker", model=model, tools=[fetch]), max_tool_result_chars=100)
    [output] = outputs(await play(agent, "run"))
    assert "left out" in output
    assert seen == [5_000]


# ---- tools without guardrails ---------------------------------------------------------------------------------------


def shell_call(number: int) -> ResponseFunctionShellToolCall:
    return ResponseFunctionShellToolCall.model_validate(
        {
            "id": f"sh{number}",
            "call_id": f"c{next(_ids)}",
            "type": "shell_call",
            "status": "completed",
            "action": {"commands": ["cat plan.md"]},
        }
    )


def patch_call(number: int) -> ResponseApplyPatchToolCall:
    return ResponseApplyPatchToolCall.model_validate(
        {
            "id": f"ap{number}",
            "call_id": f"c{next(_ids)}",
            "type": "apply_patch_call",
            "status": "completed",
            "operation": {"type": "delete_file", "path": f"plan{number}.md"},
        }
    )


def custom_call(number: int) -> ResponseCustomToolCall:
    return ResponseCustomToolCall(
        id=f"cu{number}", call_id=f"c{next(_ids)}", type="custom_tool_call", name="grep", input=f"plan {number}"
    )


class Refusing:
    """An editor whose files cannot be written."""

    def delete_file(self, operation: Any) -> Any:
        raise PermissionError("the disk is read-only")


async def grep(_: Any, __: str) -> str:
    return "Error: the index is not there"


LOCAL: dict[str, Any] = {
    "shell": (ShellTool(executor=lambda _: "cat: plan.md: No such file"), shell_call),
    "apply_patch": (ApplyPatchTool(editor=Refusing()), patch_call),  # type: ignore[arg-type]
    "grep": (CustomTool(name="grep", description="Look.", on_invoke_tool=grep), custom_call),
}


@pytest.mark.parametrize("way", ["run", "run_streamed"])
@pytest.mark.parametrize("name", LOCAL)
async def test_a_loop_over_a_tool_without_guardrails_is_stopped_and_paid_for(name: str, way: str) -> None:
    tool, asked = LOCAL[name]

    class Asking(Steps):
        def _next(self) -> list[Any]:
            self.calls += 1
            return [asked(self.calls)] if self.calls < 30 else [say("gave up")]

    for settings in ({"tools": {name: {"price": "0.01"}}, "max_usd": 5}, {"max_tool_calls": 3}):
        model = Asking()
        agent = guarded(Agent[Any](name="coder", model=model, tools=[tool]), **settings)
        await play(agent, way)
        [trip] = agent.runguard.trips
        assert trip.tool == name
        if "max_tool_calls" in settings:
            assert (trip.rule, model.calls) == ("tool_calls", 4)
        else:
            assert trip.rule in ("repetition", "stall", "tool_failures")
            assert model.calls < 12
            assert agent.runguard.spend()["by_tool"][name]["paid_tool_calls"] == model.calls


async def test_a_shell_command_that_a_human_rejects_costs_nothing() -> None:
    tool: Any = ShellTool(executor=lambda _: "deleted", needs_approval=True)
    model = Steps([shell_call(1)], [say("done")])
    plain: Agent[Any] = Agent(name="coder", model=model, tools=[tool])
    agent = guarded(plain, tools={"shell": {"price": "0.01"}}, max_usd=5)
    result = await Runner.run(agent, "go")
    state = result.to_state()
    [waiting] = state.get_interruptions()
    state.reject(waiting)
    result = await Runner.run(agent, state)
    assert result.final_output == "done"
    assert agent.runguard.spend()["tools_usd"] == 0
    assert agent.runguard.spent(result).calls == 2
