"""A loop whose turns are started by a program goes on from turn to turn, on every adapter."""

from contextlib import nullcontext
from typing import Any

import pytest

import runguard
from runguard import PolicyError
from runguard.testing.conformance import AgentSpec, Harness, Reply
from tests.frameworks.harnesses import OTHERS
from tests.frameworks.langchain_harness import LangChainHarness
from tests.frameworks.newest import NEWEST


@pytest.fixture(params=[*OTHERS, *(made() for made in NEWEST)], ids=lambda harness: harness.name)
def harness(request: pytest.FixtureRequest) -> Harness:
    found: Harness = request.param
    return found


async def stops(harness: Harness, message: Any, *, stream: bool = False, named: bool = True, **block: Any) -> set[str]:
    """Which rules stop an agent that calls a failing tool once in each of nine turns."""

    def parse(part: str) -> str:
        return '{"status": "partial_parse_error"}'

    def script(n: int, _: str) -> Reply:
        return Reply(calls=[("parse", {"part": f"part {n}"})]) if n % 2 else Reply("Shall I go on?")

    guard = harness.guard()
    session = harness.session(AgentSpec(script, "worker", {"parse": parse}), guard)
    for number in range(9):
        with runguard.run(user="ann", session="chat-7", **block) if named else nullcontext():
            assert (await session.turn(message(number), stream=stream)).error is None
    return {trip.rule for trip in guard.trips}


async def test_please_proceed_starts_no_count_anew(harness: Harness) -> None:
    assert await stops(harness, lambda n: "Please proceed to the next step.") == {"stall"}


async def test_the_messages_of_a_person_do(harness: Harness) -> None:
    assert await stops(harness, lambda n: "any news?") == set()


@pytest.mark.parametrize("automatic", [True, False])
async def test_an_app_marks_its_own_messages(harness: Harness, automatic: bool) -> None:
    found = await stops(harness, lambda n: f"text about {'abcdefghi'[n] * 4}", automatic=automatic)
    assert found == ({"stall"} if automatic else set())


async def test_a_thread_of_langchain_needs_no_name() -> None:
    assert await stops(LangChainHarness(), lambda n: "Please proceed to the next step.", named=False) == {"stall"}


def test_what_is_no_yes_or_no_is_rejected() -> None:
    wrong: Any = "yes"
    with pytest.raises(PolicyError, match="automatic = 'yes': give True"), runguard.run(automatic=wrong):
        pass


@pytest.mark.parametrize(("same", "expected"), [(True, {"no_news"}), (False, set())])
async def test_the_same_words_to_please_proceed_are_no_news(harness: Harness, same: bool, expected: set[str]) -> None:
    guard = harness.guard()
    spec = AgentSpec(lambda n, _: Reply("A lone soul stands." if same else f"Verse {'abcdefghijklmnopqrstuvwx'[n]}"))
    session = harness.session(spec, guard)
    for _ in range(20):
        with runguard.run(user="ann", session="chat-7"):
            assert (await session.turn("Please proceed.")).error is None
    assert {trip.rule for trip in guard.trips if trip.action == "stop"} == expected


async def test_the_same_words_to_messages_that_end_differently_are_healthy(harness: Harness) -> None:
    guard, rules = harness.guard(), "Answer with spam or ham. " * 150
    session = harness.session(AgentSpec(lambda n, _: Reply("ham")), guard)
    for number in range(20):
        with runguard.run(user="ann", session="chat-7", automatic=True):
            assert (await session.turn(f"{rules}Mail {'abcdefghijklmnopqrst'[number]}")).error is None
    assert guard.trips == []
