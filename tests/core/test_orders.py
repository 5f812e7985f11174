"""Rounds of the same work: what one agent does each time that it is set to work."""

from collections.abc import Callable
from typing import Any

from runguard.core.decision import ORDERS, Action, Finding, Rungs
from runguard.core.events import AgentEntered, Answer, ModelCall, ModelResult
from runguard.core.rules.agents import RepeatedDelegation, Vocabulary
from tests.core.test_every_rule import weigh
from tests.kit.detectors import answer, failing, results

RUNGS = Rungs(nudge=3, stop=6)


def enter(detector: RepeatedDelegation, agent: str, lane: str = "", branches: int = 0) -> None:
    assert detector.observe(AgentEntered("run", lane, agent, 0.0, 0, branches)) is None


def do(detector: RepeatedDelegation, *answers: Answer, agent: str = "worker", lane: str = "") -> Finding | None:
    event = results(*answers)
    event.agent, event.lane = agent, lane
    return detector.observe(event)


def ask(detector: RepeatedDelegation, agent: str, lane: str = "") -> Finding | None:
    return detector.observe(ModelCall("run", lane, agent, 0.0))


def say(detector: RepeatedDelegation, text: str, agent: str = "lead") -> ModelResult:
    event = ModelResult("run", "", agent, 0.0, text_id=1, text=text)
    assert detector.observe(event) is None
    return event


def rounds(
    detector: RepeatedDelegation, count: int, between: Callable[..., Any] = lambda n: None
) -> list[tuple[int, Action]]:
    """Each round: the lead speaks, the worker makes the same call. Returns what was found, by round."""
    found = []
    for n in range(1, count + 1):
        enter(detector, "lead")
        found += [(n, f.action) for f in (ask(detector, "lead"),) if f is not None]
        enter(detector, "worker")
        found += [(n, f.action) for f in (do(detector, answer("call")),) if f is not None]
        between(n)
    return found


def test_the_lead_is_nudged_first_and_then_the_worker_is_stopped() -> None:
    # the first activation of the worker is not kept, the second is the first of a kind
    found = rounds(RepeatedDelegation(RUNGS), 8)
    assert found == [(6, Action.NUDGE), (7, Action.NUDGE), (8, Action.NUDGE), (8, Action.STOP)]


def test_a_new_answer_anywhere_in_the_run_starts_anew() -> None:
    detector = RepeatedDelegation(RUNGS)
    assert rounds(detector, 30, lambda n: n % 3 or do(detector, answer(f"news {n}"), agent="lead")) == []


def test_a_new_failure_is_not_news() -> None:
    detector = RepeatedDelegation(RUNGS)
    assert rounds(detector, 8, lambda n: do(detector, failing(f"failure {n}"), agent="lead"))[-1][1] is Action.STOP


def test_several_calls_of_one_activation_are_one_round() -> None:
    detector = RepeatedDelegation(RUNGS)
    for _ in range(4):
        ask(detector, "lead")
        enter(detector, "worker")
        for _ in range(10):
            do(detector, answer("call"))
    assert detector._workers["worker"].rounds == 2


def test_rounds_that_no_other_agent_ordered_are_not_counted() -> None:
    detector = RepeatedDelegation(RUNGS)
    for _ in range(40):
        enter(detector, "worker")
        ask(detector, "worker")
        assert do(detector, answer("call")) is None
    assert detector._workers["worker"].rounds <= 1


def test_workers_that_are_set_to_work_at_once_are_one_round() -> None:
    detector = RepeatedDelegation(RUNGS)
    ask(detector, "lead")
    for n in range(20):
        lane = f"/worker@{n}"
        enter(detector, "worker", lane)
        assert do(detector, answer("call"), lane=lane) is None


def test_the_report_of_the_worker_carries_the_nudge() -> None:
    detector = RepeatedDelegation(RUNGS)
    found = []
    for n in range(6):
        ask(detector, "lead")
        enter(detector, "worker", f"/worker@{n}")
        assert do(detector, answer("call"), lane=f"/worker@{n}") is None
        report = answer(f"order {n}", tool="worker")
        report.id = str(n)
        found.append(do(detector, report, agent="lead"))
    told = [f for f in found if f is not None]
    assert [(f.action, f.tool, f.unit) for f in told] == [(Action.NUDGE, "worker", ORDERS)] * len(told)
    assert told


def test_orders_about_something_else_start_anew() -> None:
    detector = RepeatedDelegation(RUNGS)
    topics = ["zebra quartz violin harbour", "pepper lantern meadow copper", "saddle orchid anvil thunder", "wheel"]
    assert rounds(detector, 21, lambda n: say(detector, f"now look at {topics[n % 3]} number{n} {n}a {n}b {n}c")) == []


def test_other_words_for_one_order_are_soon_known() -> None:
    words = Vocabulary()
    phrases = ["please check order seven", "would you check order seven please", "have a look at order seven"]
    assert not any([words.learn(phrase) for phrase in phrases * 3][3:])
    assert words.learn("the invoice from march was charged twice")


def test_nothing_is_kept_while_every_agent_works_once() -> None:
    detector = RepeatedDelegation(RUNGS)
    for n in range(100):
        enter(detector, f"agent {n}")
        do(detector, answer("call"), agent=f"agent {n}")
    assert not detector._known


def test_its_state_is_bounded() -> None:
    detector = RepeatedDelegation(RUNGS)
    for n in range(3_000):
        enter(detector, f"agent {n % 700}", f"/agent {n}@{n}")
        do(detector, answer(f"call {n}"), answer("call"), agent=f"agent {n % 700}", lane=f"/agent {n}@{n}")
        ask(detector, "lead", f"/lane {n}")
        detector._counting = True
        say(detector, f"word{n} other{n} third{n} fourth{n}")
    assert weigh(detector)[0] < 6_000
