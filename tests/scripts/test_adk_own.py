"""ADK's own tests with the guard: tests of a made-up checkout are compared, and what the guard breaks is named."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripts import script

CHECKOUT = """
import asyncio

import pytest
from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner
from google.adk.models import BaseLlm, LlmResponse
from google.genai import types


class Model(BaseLlm):
    model: str = "gemini-2.5-flash"

    async def generate_content_async(self, request, stream=False):
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="hello")]))


def runner():
    return InMemoryRunner(LlmAgent(name="agent", model=Model()), app_name="app")


class TestRunner:
    def test_answers(self):
        events = asyncio.run(runner().run_debug("hi", quiet=True))
        assert [event.content.parts[0].text for event in events] == ["hello"]


@pytest.mark.parametrize("number", [1, 2])
def test_has_no_plugins(number):
    one = runner()
    asyncio.run(one.run_debug("hi", quiet=True))
    assert number == 2 or one.plugin_manager.plugins == []


def test_fails_anyway():
    assert False


@pytest.mark.skip
def test_is_skipped():
    pass
"""


@pytest.mark.timeout(300)
def test_what_the_guard_breaks_is_found(tmp_path: Path) -> None:
    suite = tmp_path / "tests" / "unittests"
    suite.mkdir(parents=True)
    (suite / "test_runner.py").write_text(CHECKOUT)
    outcomes = script("adk_own_tests").results_of(Path(sys.executable), tmp_path, ["tests/unittests"], guarded=True)
    begin = "tests/unittests/test_runner.py::"
    assert outcomes == {
        f"{begin}TestRunner::test_answers": "passed",
        f"{begin}test_runner::test_has_no_plugins[1]": "failed",  # it passes without the guard
        f"{begin}test_runner::test_has_no_plugins[2]": "passed",
        f"{begin}test_runner::test_fails_anyway": "failed",
        f"{begin}test_runner::test_is_skipped": "skipped",
    }


def test_only_what_fails_twice_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own = script("adk_own_tests")
    ways = [
        {"a.py::x": "passed", "b.py::y": "passed", "c.py::z": "failed"},
        {"a.py::x": "failed", "b.py::y": "failed", "c.py::z": "failed"},
        {"a.py::x": "passed", "b.py::y": "passed"},
        {"a.py::x": "failed", "b.py::y": "passed"},
    ]
    asked: list[list[str]] = []

    def results_of(python: Path, checkout: Path, tests: list[str], **_: Any) -> dict[str, str]:
        asked.append(tests)
        return ways[len(asked) - 1]

    monkeypatch.setattr(own, "results_of", results_of)
    assert own.compare(Path("python"), Path("checkout"), ["tests"]) == ["a.py::x"]
    assert asked == [["tests"], ["tests"], ["a.py", "b.py"], ["a.py", "b.py"]]
    assert "3 tests: 2 pass without the guard, 0 with it" in capsys.readouterr().out


def test_a_test_that_ran_in_one_way_only_is_named() -> None:
    only_guarded = script("adk_own_tests").only_guarded
    assert only_guarded({"a": "passed", "b": "failed", "c": "passed"}, {"b": "passed", "c": "passed"}) == ["a"]
    assert only_guarded({"a": "skipped"}, {"a": "failed"}) == []


@pytest.mark.parametrize("given", ["", "/nowhere"])
def test_without_a_checkout_it_says_what_it_needs(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADK_TESTS", given)
    assert script("adk_own_tests").main() == 2
    assert "ADK_TESTS must name a checkout" in capsys.readouterr().err
