"""What a model reports, and what it does not: no call is free because its usage is missing, zero or contradictory."""

import asyncio
from collections.abc import AsyncGenerator
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import runguard
from runguard import BudgetPlugin, BudgetPolicy, TerminationPlugin, TokenUsageTermination
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.replay.adk import Events
from runguard.replay.player import Judge
from runguard.replay.steps import RecordedRun
from runguard.testing import ScriptedModel, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.agents import scripted
from tests.kit.examples import examples
from tests.kit.money import SSE
from tests.kit.tools import step

PRICES = {
    "scripted-1": {
        "input": 10,
        "output": 40,
        "cached": 1,
        "cache_write": 20,
        "audio": 100,
        "cached_audio": 50,
        "audio_output": 400,
    }
}
PLAIN = {"scripted-1": {"input": 10, "output": 40}}
PROMPT = 1_000  # tokens of every request, by the user's own counter
WORDS = "word " * 80  # 400 bytes, 100 tokens


def usage(
    prompt: int | None = None, output: int | None = None, total: int | None = None, **counts: Any
) -> types.GenerateContentResponseUsageMetadata:
    """As ADK's models fill it in; ``write`` is the field that ADK's class does not have."""
    write = counts.pop("write", None)
    names = {
        "thoughts": "thoughts_token_count",
        "tool": "tool_use_prompt_token_count",
        "cached": "cached_content_token_count",
    }
    told = {names.get(name, name): value for name, value in counts.items()}
    made = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=prompt, candidates_token_count=output, total_token_count=total, **told
    )
    if write is not None:
        object.__setattr__(made, "cache_creation_input_tokens", write)
    return made


ZERO = usage(0, 0, 0)


class Reporting(ScriptedModel):
    """Every call answers with these responses: usage reports, each with some words; the last one is whole."""

    reports: tuple[Any, ...] = ()

    def __init__(self, *reports: Any, script: Any = None) -> None:
        super().__init__(script or [text(WORDS)], reports=reports)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        (whole,) = [response async for response in super().generate_content_async(llm_request, stream)]
        piece = types.Content(role="model", parts=[types.Part(text=WORDS[: len(WORDS) // len(self.reports)])])
        for report in self.reports[:-1]:
            yield LlmResponse(content=piece, usage_metadata=report, partial=True, model_version="scripted-1")
        yield whole.model_copy(update={"usage_metadata": self.reports[-1], "model_version": "scripted-1"})


def guard(**policy: Any) -> RunGuardPlugin:
    return RunGuardPlugin(**{"prices": PRICES, "tokens": lambda request: PROMPT, **policy})


def looping(*reports: Any) -> LlmAgent:
    """An agent that never ends by itself."""
    config = types.GenerateContentConfig(max_output_tokens=100)
    return LlmAgent(
        name="a",
        model=Reporting(*reports, script=lambda n, _: call("step", q=n)),
        tools=[step],
        generate_content_config=config,
    )


def speaking(*reports: Any) -> LlmAgent:
    return LlmAgent(name="a", model=Reporting(*reports))


class Generated(Reporting):
    """Calls a tool until its last call; each call has reports of its own."""

    def __init__(self, calls: list[list[Any]]) -> None:
        super().__init__(script=lambda n, _: call("step", q=n) if n < len(calls) else text(WORDS))
        self._left = list(calls)

    _left: list[list[Any]]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.reports = tuple(self._left.pop(0))
        async for response in super().generate_content_async(llm_request, stream):
            yield response


# ---- attacks on a budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [None, ZERO, usage(), usage(0, 0)], ids=["missing", "zeros", "empty", "no total"])
async def test_calls_that_report_nothing_use_up_a_budget(report: Any) -> None:
    agent, plugin = looping(report), guard(prices=PLAIN, max_usd="0.05", max_model_calls=50)
    result = await play(agent, plugins=[plugin])
    assert assert_stopped(result, "budget").estimated
    spent = plugin.spend()
    assert Decimal("0.03") < spent["usd"] <= Decimal("0.05")
    assert spent["calls"] == spent["estimated_calls"] == scripted(agent).calls <= 5  # a prompt of a cent each


async def test_a_report_replaces_the_estimate_that_was_booked_before() -> None:
    """Some models report behind their whole answer."""

    class Late(ScriptedModel):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            async for response in super().generate_content_async(llm_request, stream):
                yield response.model_copy(update={"usage_metadata": ZERO})
            yield LlmResponse(usage_metadata=usage(500, 50, 550), partial=True)

    plugin = guard()
    await play(LlmAgent(name="a", model=Late([text(WORDS)])), plugins=[plugin], run_config=SSE)  # type: ignore[call-arg]
    assert (plugin.spend()["input_tokens"], plugin.spend()["output_tokens"], plugin.spend()["estimated_calls"]) == (
        500,
        50,
        0,
    )


# ---- one reader -----------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[list[Any], tuple[int, int, bool]]] = {
    "plain": ([usage(1_000, 250, 1_250)], (1_000, 250, False)),
    "missing": ([None], (PROMPT, 100, True)),
    "zeros": ([ZERO], (PROMPT, 100, True)),
    "no output": ([usage(900, 0, 900)], (900, 0, False)),
    "the prompt alone": ([usage(900)], (900, 100, True)),
    "the prompt and the total": ([usage(900, total=1_150)], (900, 250, False)),
    "no input": ([usage(0, 250, 250)], (PROMPT, 250, True)),
    "candidates alone": ([usage(output=250)], (PROMPT, 250, True)),
    "no total": ([usage(900, 250)], (900, 250, False)),
    "total of zero": ([usage(900, 4_000, 0)], (900, 4_000, False)),
    "total below the prompt": ([usage(100, 10, 50)], (100, 10, False)),
    "total below both, with thoughts": ([usage(100, 10, 50, thoughts=30)], (100, 40, False)),
    "thoughts beside": ([usage(900, 100, 1_150, thoughts=150)], (900, 250, False)),
    "thoughts within": ([usage(900, 250, 1_150, thoughts=150)], (900, 250, False)),
    "thoughts without a total": ([usage(900, 100, thoughts=150)], (900, 250, False)),
    "tool use": ([usage(600, 250, 1_150, tool=300)], (900, 250, False)),
    "tool use not in the total": ([usage(600, 250, 850, tool=300)], (900, 250, False)),
    "cache writes": ([usage(900, 250, 1_150, cached=400, write=40)], (900, 250, False)),
    "a cache beside the prompt": ([usage(10, 250, 260, cached=890)], (900, 250, False)),
    "falling": ([usage(900, 250, 1_150), usage(900, 10, 910)], (900, 250, False)),
    "zeros at the end": ([usage(900, 100, 1_000), usage(900, 250, 1_150), ZERO], (900, 250, False)),
    "nothing at the end": ([usage(900, 250, 1_150), None], (900, 250, False)),
    "the prompt first and no more": ([usage(900, 0, 900), None], (900, 100, True)),
    "the prompt first, then zeros": ([usage(900, 0, 900), ZERO], (900, 100, True)),
    "in two halves": ([usage(900, 0, 900), usage(0, 250, 250)], (900, 250, False)),
    "output, then zeros": ([usage(0, 250, 250), ZERO], (PROMPT, 250, True)),
    "chunks": ([usage(900, n, 900 + n) for n in (50, 100, 250)], (900, 250, False)),
}
shapes = pytest.mark.parametrize(("reports", "expected"), SHAPES.values(), ids=SHAPES)


@shapes
async def test_the_plugin_bills_each_shape(reports: list[Any], expected: tuple[int, int, bool]) -> None:
    plugin = guard()
    await play(speaking(*reports), plugins=[plugin], run_config=SSE)
    spent = plugin.spend()
    assert (spent["calls"], spent["input_tokens"], spent["output_tokens"], bool(spent["estimated_calls"])) == (
        1,
        *expected,
    )


@shapes
async def test_a_guarded_model_bills_each_shape(reports: list[Any], expected: tuple[int, int, bool]) -> None:
    model = GuardedLlm(Reporting(*reports), prices=PRICES, tokens=lambda request: PROMPT)
    await play(LlmAgent(name="a", model=model), run_config=SSE)
    spent = model.guard.accounts.spend()
    assert (spent["calls"], spent["input_tokens"], spent["output_tokens"], bool(spent["estimated_calls"])) == (
        1,
        *expected,
    )


@shapes
async def test_a_guarded_function_bills_each_shape(reports: list[Any], expected: tuple[int, int, bool]) -> None:
    async def ask(contents: str) -> AsyncGenerator[LlmResponse, None]:
        async for response in Reporting(*reports).generate_content_async(LlmRequest(model="scripted-1")):
            yield response

    guarded = runguard.guard_async(ask, prices=PRICES, tokens=lambda contents: PROMPT, budget={"max_tokens": 100_000})
    async for _ in guarded("go"):
        pass
    spent = guarded.spend()
    assert (spent["calls"], spent["input_tokens"], spent["output_tokens"], bool(spent["estimated_calls"])) == (
        1,
        *expected,
    )


@shapes
async def test_a_token_budget_counts_each_shape(
    reports: list[Any], expected: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runguard.adk.budget_plugin._tokens_of", lambda asked: PROMPT)
    plugin = BudgetPlugin(BudgetPolicy())
    await play(speaking(*reports), plugins=[plugin], run_config=SSE)
    monitor = plugin.monitor_for(app_name="app", user_id="u1", session_id="s1")
    assert (monitor.turn_count, monitor.current_tokens, bool(monitor.estimated_turns)) == (
        1,
        expected[0] + expected[1],
        expected[2],
    )


@shapes
async def test_a_condition_counts_each_shape(reports: list[Any], expected: tuple[int, int, bool]) -> None:
    """An estimated prompt is not that of the user's own counter, which a condition does not know."""
    agent = speaking(*reports)
    prompt = None if expected[2] else expected[0]
    condition = TokenUsageTermination(max_completion=max(expected[1], 1))
    result = await play(agent, plugins=[TerminationPlugin(condition)], run_config=SSE)
    reasons = [reason for event in result.events if (reason := runguard.termination_reason(event))]
    if not expected[1]:
        assert reasons == []
        return
    assert f"completion token count: {expected[1]}" in reasons[0]
    if prompt is not None:
        assert f"prompt token count: {prompt}," in reasons[0]
    else:
        assert "prompt token count: 0," not in reasons[0]


# ---- live and replayed ----------------------------------------------------------------------------------------------


def replayed(events: list[Any]) -> Any:
    """The same events, from their JSON, in both spellings."""
    results = []
    for by_alias in (False, True):
        reader = Events("scripted-1")
        recorded = [event.model_dump(mode="json", by_alias=by_alias, exclude_none=True) for event in events]
        steps = (one for event in recorded for one in reader.steps(event))
        results.append(Judge(runguard.Policy.build(prices=PRICES)).play(RecordedRun("r", steps)))
    first, second = results
    assert (first.nano, first.tokens, first.estimated) == (second.nano, second.tokens, second.estimated)
    return first


_counts = st.one_of(st.none(), st.just(0), st.integers(1, 50), st.integers(51, 5_000))


@st.composite
def reports(draw: Any) -> Any:
    """Usage as models fill it in, right or wrong."""
    if draw(st.integers(0, 5)) == 0:
        return None
    prompt, output, thoughts, tool = (draw(_counts) for _ in range(4))
    whole = sum(count or 0 for count in (prompt, output, thoughts, tool))
    total = draw(
        st.one_of(st.none(), st.just(0), st.just(whole), st.just(whole - (thoughts or 0)), st.integers(0, 9_000))
    )
    details = draw(st.one_of(st.none(), st.integers(0, prompt or 0)))
    audio = (
        None if details is None else [types.ModalityTokenCount(modality=types.MediaModality.AUDIO, token_count=details)]
    )
    cached = draw(st.one_of(st.none(), st.integers(0, (prompt or 0) * 2)))
    return usage(prompt, output, total, thoughts=thoughts, tool=tool, cached=cached, prompt_tokens_details=audio)


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.lists(reports(), min_size=1, max_size=3), min_size=1, max_size=3))
def test_live_and_replay_bill_the_same_events_equally(calls: list[list[Any]]) -> None:
    async def both() -> None:
        plugin = guard()
        result = await play(LlmAgent(name="a", model=Generated(calls), tools=[step]), plugins=[plugin], run_config=SSE)
        live, found = plugin.spend(), replayed(result.events)
        assert (found.model_calls, found.estimated) == (live["calls"], live["estimated_calls"])
        assert found.output_tokens == live["output_tokens"]
        if not found.estimated:  # an estimated prompt includes what only the request holds: instructions and tools
            assert found.prompt_tokens == live["input_tokens"]
            assert Decimal(found.nano) == live["usd"] * 1_000_000_000

    asyncio.run(both())


async def test_a_recording_of_calls_that_report_nothing_is_estimated_too() -> None:
    plugin = guard()
    result = await play(speaking(ZERO), message="word " * 300, plugins=[plugin])
    found = replayed(result.session.events)
    assert (found.model_calls, found.estimated, found.output_tokens) == (1, 1, 100)
    assert found.prompt_tokens == 500
    assert found.nano == (500 * 10 + 100 * 40) * 1_000
