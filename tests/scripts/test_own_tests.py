"""The frameworks' own tests with the guard: made-up tests are compared, and what the guard alone breaks is named."""

import sys
import tomllib
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
    own = script("own_tests")
    outcomes = own.results_of(Path(sys.executable), tmp_path, "adk", ["tests/unittests"], "guard")
    begin = "tests/unittests/test_runner.py::"
    assert outcomes == {
        f"{begin}TestRunner::test_answers": "passed",
        f"{begin}test_runner::test_has_no_plugins[1]": "failed",  # it passes without the guard
        f"{begin}test_runner::test_has_no_plugins[2]": "passed",
        f"{begin}test_runner::test_fails_anyway": "failed",
        f"{begin}test_runner::test_is_skipped": "skipped",
    }
    plain = outcomes | {f"{begin}test_runner::test_has_no_plugins[1]": "passed"}
    assert own.only_guarded(plain, outcomes) == [f"{begin}test_runner::test_has_no_plugins[1]"]


def test_only_what_passes_with_a_noop_and_fails_twice_with_the_guard_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = script("own_tests")
    passed = dict.fromkeys(("a.py::x", "b.py::y", "c.py::z", "d.py::w"), "passed")
    ways = [
        {**passed, "c.py::z": "failed"},
        {**passed, "c.py::z": "failed", "d.py::w": "failed"},
        dict.fromkeys(passed, "failed"),
        passed,
        {**passed, "a.py::x": "failed"},
    ]
    asked: list[tuple[str, list[str]]] = []

    def results_of(python: Path, sources: Path, name: str, tests: list[str], way: str, *_: Any) -> dict[str, str]:
        asked.append((way, tests))
        return ways[len(asked) - 1]

    monkeypatch.setattr(own, "results_of", results_of)
    assert own.compare(Path("python"), Path("sources"), "langchain", ["tests"]) == ["a.py::x"]
    again = ["a.py", "b.py"]
    assert asked == [(way, ["tests"]) for way in own.WAYS] + [("plain", again), ("guard", again)]
    assert "langchain: 4 tests; 3 pass plain, 2 with a no-op, 0 with the guard" in capsys.readouterr().out


def test_a_test_that_ran_in_one_way_only_is_named() -> None:
    only_guarded = script("own_tests").only_guarded
    assert only_guarded({"a": "passed", "b": "failed", "c": "passed"}, {"b": "passed", "c": "passed"}) == ["a"]
    assert only_guarded({"a": "skipped"}, {"a": "failed"}) == []


def test_what_is_not_listed_with_a_reason_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"langchain": {"tests/test_a.py::*": "it counts the callbacks"}, "langgraph": {"*": "another one"}}
    failing = ["tests/test_a.py::x", "tests/test_b.py::y"]
    assert script("own_tests").unlisted("langchain", failing, listed) == ["tests/test_b.py::y"]
    said = capsys.readouterr().out
    assert "test_a.py::x: it counts the callbacks" in said
    assert "test_b.py::y: NOT LISTED" in said


def test_every_listed_test_has_a_reason_that_is_no_defect() -> None:
    own = script("own_tests")
    listed = tomllib.loads(own.LISTED.read_text(encoding="utf-8"))
    assert set(listed) <= set(own.SUITES)
    for reasons in listed.values():
        assert all(len(reason) > 20 and "defect" not in reason.lower() for reason in reasons.values())


def test_each_suite_has_a_guard_to_put_around_it() -> None:
    assert set(script("own_guards").AROUND) == set(script("own_tests").SUITES)


@pytest.mark.parametrize("name", ["adk", "pydantic-ai"])
@pytest.mark.parametrize("given", ["", "/nowhere"])
def test_without_a_checkout_a_suite_is_skipped_and_says_what_it_needs(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = script("own_tests")
    monkeypatch.setenv(own.SUITES[name].source, given)
    monkeypatch.setenv("SUITES", name)
    assert own.main() == 0
    assert f"{name}: skipped; {own.SUITES[name].source} must name a checkout" in capsys.readouterr().out


def test_an_unknown_suite_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SUITES", "adk crewai")
    assert script("own_tests").main() == 2
    assert "SUITES names crewai" in capsys.readouterr().err
