"""A prompt cache that is no longer used, on real ADK: a warning names what changed. Look-alikes give none."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.testing import FakeClock, ScriptedModel, call, text
from tests.kit.adk_runs import Observed, observe, play
from tests.kit.rule_agents import Tool, agent

# A token costs $0.00001, and a tenth of that where it is read from the cache.
PRICES = {"scripted-1": {"input": 10, "output": 40, "cached": 1}}


def reports(
    *cached: int, prompt: int = 10_000, grows: int = 10, clock: FakeClock | None = None, pause: float = 0
) -> Any:
    """A model that reads so many tokens of each prompt from its cache; the last number repeats."""

    def step(n: int, request: Any) -> LlmResponse:
        if clock is not None:
            clock.advance(pause)
        part = call("work", q=n) if n < 8 else text("done")
        size = prompt + grows * n
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=size,
            candidates_token_count=10,
            cached_content_token_count=cached[min(n, len(cached)) - 1],
            total_token_count=size + 10,
        )
        return LlmResponse(content=types.Content(role="model", parts=[part]), usage_metadata=usage)

    return step


def worker(script: Any, change: Any = None, **options: Any) -> LlmAgent:
    """``change``: what happens to each request, with its number, before it is sent."""
    sent = [0]

    def before_model(callback_context: Any, llm_request: Any) -> None:
        sent[0] += 1
        if change is not None:
            change(sent[0], llm_request)

    tool = Tool("work", lambda n: {"done": n})
    return agent(ScriptedModel(script), tool, before_model_callback=before_model, **options)


def warnings(seen: Observed) -> list[Any]:
    return [d.finding for d in seen.decisions if d.finding is not None and d.finding.rule == "prompt_cache"]


def new_instruction(n: int, request: Any) -> None:
    if n > 3:
        request.config.system_instruction = f"It is second {n}."


def new_tools(n: int, request: Any) -> None:
    if n > 3:
        declared = types.FunctionDeclaration(name=f"extra_{n}", description="new")
        request.config.tools = [*(request.config.tools or []), types.Tool(function_declarations=[declared])]


def new_history(n: int, request: Any) -> None:
    if n > 3:
        request.contents[0].parts[0].text = f"go, second {n}"


@pytest.mark.parametrize(
    ("change", "part"), [(new_instruction, "instruction"), (new_tools, "tools"), (new_history, "history")]
)
async def test_a_collapse_is_reported_once_with_its_part_and_its_cost(
    change: Any, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """9,000 cached tokens are paid in full in calls 4 and 5: twice 9,000 times $0.000009."""
    with caplog.at_level(logging.WARNING, "runguard"):
        seen = await observe(worker(reports(0, 9_000, 9_000, 0), change), prices=PRICES)
    (found,) = warnings(seen)
    assert (found.observed, found.limit, found.evidence) == (18_000, 2_000, ({"usd": "0.162", "changed": part},))
    assert f"which cost $0.162 more; changed: {part}" in found.detail
    assert [r.getMessage() for r in caplog.records] == [f"runguard.prompt_cache: {found.detail}"]
    assert seen.result.texts == ["done"], "a warning, never a stop"
    assert not seen.plugin.trips


async def test_it_is_reported_in_shadow_mode_and_without_a_price() -> None:
    seen = await observe(worker(reports(9_000, 0), new_instruction), mode="shadow")
    (found,) = warnings(seen)
    assert "at an unknown price" in found.detail


async def test_without_a_change_the_provider_is_named() -> None:
    (found,) = warnings(await observe(worker(reports(0, 9_000, 9_000, 0)), prices=PRICES))
    assert "the provider may have dropped its cache" in found.detail


def compacted(n: int, request: Any) -> None:
    """What ADK sends after a compaction: a summary instead of the old contents."""
    if n > 3:
        summary = types.Content(role="user", parts=[types.Part(text="a summary")])
        request.contents = [summary, *request.contents[-2:]]


HEALTHY: dict[str, Any] = {
    "no cache at all": reports(0),
    "a cache that grows": reports(0, 9_000, 9_010, 9_020),
    "one miss": reports(0, 9_000, 0, 9_000),
    "two misses apart": reports(9_000, 0, 9_000, 0, 9_000),
    "few tokens": reports(1_999, 1_999, 0),
    "a smaller share": reports(9_000, 9_000, 6_000),
}


@pytest.mark.parametrize("name", HEALTHY)
async def test_healthy_caches_are_not_reported(name: str) -> None:
    assert warnings(await observe(worker(HEALTHY[name]), prices=PRICES)) == []


async def test_a_compacted_history_is_not_reported() -> None:
    assert warnings(await observe(worker(reports(0, 9_000, 9_000, 0), compacted), prices=PRICES)) == []


async def test_failed_calls_are_not_misses() -> None:
    script = reports(9_000)
    errors = iter([False, False, True, True])

    def flaky(n: int, request: Any) -> Any:
        return RuntimeError("away") if next(errors, False) else script(n, request)

    root = worker(flaky)
    root.on_model_error_callback = lambda callback_context, llm_request, error: LlmResponse(
        content=types.Content(role="model", parts=[call("work", q=99)])
    )
    assert warnings(await observe(root, prices=PRICES)) == []


async def test_a_run_without_cached_tokens_enters_none_of_this_code() -> None:
    """Neither the watch nor the switch to a cheaper model costs a Python call where they are not used."""
    modules = ("cached_prompts", "prompt_parts", "downgrades", "model_choice", "switch_costs")
    entered: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (name := Path(frame.f_code.co_filename).stem) in modules:
            entered.add(f"{name}.{frame.f_code.co_name}")

    plugin = RunGuardPlugin(max_usd=10, prices=PRICES)
    sys.setprofile(note)
    try:
        await play(worker(reports(0)), plugins=[plugin])
    finally:
        sys.setprofile(None)
    assert plugin.spend()["calls"] == 8
    assert entered == set()
