"""Reports of agents without tools that say the same in other words."""

import pytest

from runguard.core.decision import Action, Rungs, text_for_model
from runguard.core.events import AgentEntered, Answer, Outcome, ToolResults
from runguard.core.rules.agents import RepeatedReports
from tests.core.test_every_rule import weigh

REPORT = "the office on the first floor collects all taxes and sends the bills to every house by mail"
ORDER = "tell me who collects the taxes"


def told(order: str, report: str, tool: str = "expert", *, outcome: Outcome = Outcome.OK) -> ToolResults:
    answer = Answer(tool, order.encode(), {"result": report}, args={"request": order}, outcome=outcome)
    return ToolResults("run", "", "lead", 0.0, "", [answer])


def rule(*workers: str) -> RepeatedReports:
    made = RepeatedReports(Rungs(nudge=3, stop=5))
    for worker in workers or ("expert",):
        made.observe(AgentEntered("run", f"/{worker}@1", worker, 0.0))
    return made


def actions(detector: RepeatedReports, *events: ToolResults) -> str:
    """One letter for each event: n nudge, S stop, . nothing."""
    found = [detector.observe(event) for event in events]
    return "".join("." if one is None else "S" if one.action is Action.STOP else "n" for one in found)


def test_known_words_in_another_order_are_the_same() -> None:
    words = REPORT.split()
    rounds = [told(ORDER, " ".join(words[n:] + words[:n])) for n in range(6)]
    assert actions(rule(), *rounds) == "...nnS"


def test_the_nudge_asks_for_another_order() -> None:
    detector = rule()
    found = [detector.observe(told(ORDER, REPORT)) for _ in range(4)][-1]
    assert found is not None
    assert "'expert' has reported the same in other words 3 times" in text_for_model(found)


@pytest.mark.parametrize(
    ("order", "report"),
    [
        pytest.param("tell me who collects the taxes {word}", REPORT, id="another item in the order"),
        pytest.param(ORDER, f"{REPORT} {{n}}", id="a number in the report"),
        pytest.param(ORDER, "{word}a {word}b {word}c {word}d came to the office", id="another subject"),
        pytest.param(ORDER, f"{REPORT} {{word}}a {{word}}b", id="an edited sentence"),
        pytest.param(ORDER, "yes it does", id="a verdict"),
    ],
)
def test_healthy_work_through_words(order: str, report: str) -> None:
    names = ["".join(chr(97 + int(digit)) for digit in str(1000 + n)) for n in range(30)]
    rounds = [told(order.format(word=w, n=n), report.format(word=w, n=n)) for n, w in enumerate(names)]
    assert actions(rule(), *rounds) == "." * 30


def test_a_step_by_any_tool_starts_anew() -> None:
    detector = rule()
    step = ToolResults("run", "", "lead", 0.0, "", [Answer("save", b"save", "ok", outcome=Outcome.OK)])
    assert actions(detector, *[told(ORDER, REPORT)] * 3, step, *[told(ORDER, REPORT)] * 3) == "......n"


def test_new_words_make_up_for_three_reports() -> None:
    known = [told(ORDER, REPORT)] * 4
    new = told(ORDER, f"{REPORT} although citizens may prefer another way")
    assert actions(rule(), *known, new, *known) == "...n...nn"


def test_another_worker_with_known_words_does_not_end_the_row() -> None:
    rounds = [event for _ in range(4) for event in (told(ORDER, REPORT), told(ORDER, REPORT, "critic"))]
    assert actions(rule("expert", "critic"), *rounds) == "..." + "...nn"


def test_tools_that_are_no_agents_and_refused_orders_are_not_counted() -> None:
    assert actions(rule("other"), *[told(ORDER, REPORT)] * 9) == "." * 9
    assert actions(rule(), *[told(ORDER, REPORT, outcome=Outcome.REFUSED)] * 9) == "." * 9


def test_a_journal_is_judged_by_the_words_that_it_stores() -> None:
    live = [told(ORDER, REPORT) for _ in range(6)]
    actions(rule(), *live)
    stored = [told("", "") for _ in live]
    for one, event in zip(stored, live, strict=True):
        one.words, one.is_understood = event.words, True
    assert actions(rule(), *stored) == "...nnS"


def test_the_state_is_bounded() -> None:
    detector = rule()
    for n in range(3_000):
        detector.observe(AgentEntered("run", f"/worker{n % 40}@1", "w", 0.0))
        detector.observe(told(f"order {n}", f"report {n} about {n * 7919}", f"worker{n % 40}"))
    workers = detector._workers.values()
    assert len(workers) <= 16
    assert all(len(worker.orders) + len(worker.reports) <= 2_200 for worker in workers)
    assert weigh(detector)[0] < 40_000
