"""Texts in a row without a step."""

from collections.abc import Callable
from typing import Any

import pytest

from runguard.core.decision import Action, Rungs
from runguard.core.events import AgentEntered, ModelCall, ModelResult, StateChanged
from runguard.core.rules.agents import TextOnly
from tests.core.test_every_rule import weigh
from tests.kit.detectors import answer, results


def say(detector: TextOnly, n: int, agent: str = "a", text: str = "") -> Action | None:
    found = detector.observe(ModelCall("run", "", agent, 0.0))
    assert detector.observe(ModelResult("run", "", agent, 0.0, text_id=n + 1, text=text)) is None
    return found.action if found is not None else None


def test_the_call_after_the_last_allowed_text_is_stopped() -> None:
    detector = TextOnly(Rungs(nudge=2, stop=4))
    assert [say(detector, n) for n in range(6)] == [None, None, None, Action.NUDGE, Action.NUDGE, Action.STOP]


@pytest.mark.parametrize(
    "step",
    [
        lambda n: results(answer(f"call {n}")),
        lambda n: results(answer("call")),
        lambda n: StateChanged("run", "", "a", 0.0, n + 1),
    ],
)
def test_a_step_starts_anew(step: Callable[..., Any]) -> None:
    detector = TextOnly(Rungs(stop=4))
    for n in range(40):
        assert say(detector, n) is None
        if n % 3 == 2:
            detector.observe(step(n))


def test_a_value_that_was_stored_before_is_not_a_step() -> None:
    detector = TextOnly(Rungs(stop=4))
    for n in range(5):
        detector.observe(StateChanged("run", "", "a", 0.0, 7))
        say(detector, n)
    assert say(detector, 5) is Action.STOP


def test_the_rounds_that_the_developer_has_set_are_not_counted() -> None:
    detector = TextOnly(Rungs(stop=4))
    for n in range(40):
        detector.observe(AgentEntered("run", "", "a", 0.0, is_bounded=True))
        assert say(detector, n) is None


def test_a_summary_after_the_answer_is_not_stopped() -> None:
    detector = TextOnly(Rungs(stop=1))
    say(detector, 0)
    say(detector, 1)
    assert detector.observe(ModelCall("run", "", "a", 0.0, after_answer=True)) is None


def test_a_text_about_something_else_is_a_step_unless_the_user_has_set_the_limit() -> None:
    texts = [f"w{n}a w{n}b w{n}c w{n}d and so on" for n in range(30)]
    patient, exact = TextOnly(Rungs(stop=4), patient=True), TextOnly(Rungs(stop=4))
    assert not any(say(patient, n, text=text) for n, text in enumerate(texts))
    assert any(say(exact, n, text=text) for n, text in enumerate(texts))


def after_work(stop: float = 12) -> TextOnly:
    return TextOnly(Rungs(nudge=16, stop=40), patient=True, after_work=Rungs(nudge=5, stop=stop))


def test_an_agent_that_has_worked_and_then_only_writes_is_nudged_at_five_and_stopped_at_twelve() -> None:
    detector = after_work()
    detector.observe(results(answer("call")))  # by the agent named "agent"
    said = [say(detector, n, "agent") for n in range(14)]
    assert said.index(Action.NUDGE) == 5
    assert said.index(Action.STOP) == 12


def test_agents_without_tools_have_the_later_limits_also_after_the_work_of_another() -> None:
    detector = after_work()
    detector.observe(results(answer("call")))
    assert not any(say(detector, n, "ab"[n % 2]) for n in range(17))


def test_a_team_that_has_acted_after_every_few_texts_and_then_only_writes_is_stopped() -> None:
    detector = after_work()
    for n in range(4):
        assert [say(detector, n, who) for who in ("lead", "reader", "lead")] == [None] * 3
        detector.observe(results(answer(f"call {n}")))
    said = [say(detector, n, ("lead", "reader")[n % 2]) for n in range(14)]
    assert said.index(Action.NUDGE) == 6  # twice the longest row so far
    assert said.index(Action.STOP) == 12


def test_a_team_that_has_always_talked_for_long_is_left_alone() -> None:
    detector = after_work()
    for n in range(6):
        assert not any(say(detector, k, "ab"[k % 2]) for k in range(12))
        detector.observe(results(answer(f"call {n}")))


def test_chapters_after_research_are_left_alone() -> None:
    detector = after_work()
    detector.observe(results(answer("call")))
    texts = [f"w{n}a w{n}b w{n}c w{n}d and so on" for n in range(30)]
    assert not any(say(detector, n, "agent", text) for n, text in enumerate(texts))


def test_its_state_is_bounded() -> None:
    detector = TextOnly(Rungs(stop=10**9), patient=True)
    for n in range(3_000):
        say(detector, n, f"agent {n % 300}", f"w{n}a w{n}b w{n}c w{n}d")
        detector.observe(StateChanged("run", "", "a", 0.0, n)) if n % 7 == 0 else None
    assert weigh(detector)[0] < 2_000
