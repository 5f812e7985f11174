"""Texts in a row without a step."""

from collections.abc import Callable
from typing import Any

import pytest

from runguard.core.decision import ORDERS, Action, Finding, Rungs, text_for_model
from runguard.core.events import AgentEntered, Answer, ModelCall, ModelResult, Outcome, StateChanged, ToolResults
from runguard.core.outcomes import classify, was_done
from runguard.core.rules.agents import RepeatedDelegation, RepeatedReports, TextOnly, Vocabulary
from runguard.core.rules.failures import RetryRequests, Stall
from tests.core.test_every_rule import weigh
from tests.kit.detectors import answer, failing, results, word
from tests.kit.examples import each_row


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


# ---- Rounds of the same work: what one agent does each time that it is set to work


RUNGS = Rungs(nudge=3, stop=6)


def enter(detector: RepeatedDelegation, agent: str, lane: str = "", branches: int = 0) -> None:
    assert detector.observe(AgentEntered("run", lane, agent, 0.0, 0, branches)) is None


def do(detector: RepeatedDelegation, *answers: Answer, agent: str = "worker", lane: str = "") -> Finding | None:
    event = results(*answers)
    event.agent, event.lane = agent, lane
    return detector.observe(event)


def ask(detector: RepeatedDelegation, agent: str, lane: str = "") -> Finding | None:
    return detector.observe(ModelCall("run", lane, agent, 0.0))


def say_orders(detector: RepeatedDelegation, text: str, agent: str = "lead") -> ModelResult:
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
    assert (
        rounds(detector, 21, lambda n: say_orders(detector, f"now look at {topics[n % 3]} number{n} {n}a {n}b {n}c"))
        == []
    )


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


def test_its_state_is_bounded_orders() -> None:
    detector = RepeatedDelegation(RUNGS)
    for n in range(3_000):
        enter(detector, f"agent {n % 700}", f"/agent {n}@{n}")
        do(detector, answer(f"call {n}"), answer("call"), agent=f"agent {n % 700}", lane=f"/agent {n}@{n}")
        ask(detector, "lead", f"/lane {n}")
        detector._counting = True
        say_orders(detector, f"word{n} other{n} third{n} fourth{n}")
    assert weigh(detector)[0] < 6_000


# ---- Reports of agents without tools that say the same in other words


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


# ---- Answers that look like success and ask to try again


ASKING = [
    {"status": "retry later"},
    {"status": "retry_later", "url": "https://example.org/7"},
    {"result": None, "status": "retry"},
    {"status": "ok", "message": "The service is busy, please try again."},
    {"result": "Server busy, retry later"},
    {"content": [{"type": "text", "text": '{"status": "try_again"}'}], "isError": False},
    "Service is busy, try again",
    "Rate limit reached, try again in 20 s",
    "Sorry, something went wrong.",
    "The page could not be loaded. Try again later.",
    '{"message": "temporarily unavailable"}',
]
RESULTS = [
    {"status": "pending"},
    {"status": "accepted", "message": "Queued; try again later to see the result."},
    {"status": "busy"},
    {"status": "retry", "rows": [1, 2]},
    {"from": "Ann", "text": "I was out, please try again later"},
    "ok",
    "The report is not ready yet, try again later.",
    "Wrong code, try again.",
    "Seat 7 is held by another customer, try again later.",
    "I will try again later, said Ann.",
    "Retry policy: exponential. The service may be busy at night. " * 5,
]


@each_row("value", ASKING)
def test_an_answer_that_asks_to_try_again_has_a_class(value: object) -> None:
    outcome, asks = classify(value)
    assert outcome is Outcome.OK
    assert asks
    assert was_done(value)  # a side effect may have happened: `once` does not let it happen again


@each_row("value", RESULTS)
def test_a_result_is_not_taken_for_a_request_to_try_again(value: object) -> None:
    assert classify(value) == (Outcome.OK, "")


def test_the_class_is_the_same_for_other_particulars() -> None:
    assert len({classify(f"Rate limit reached, try again in {n} s") for n in range(20)}) == 1


def asking(call: int, says: str = "busy", tool: str = "t") -> Answer:
    return answer(f"call {call}", says, tool=tool, failure=says)


def rule_asked_again() -> RetryRequests:
    return RetryRequests(Rungs(nudge=3, stop=6))


def test_new_calls_are_counted_until_the_run_is_stopped() -> None:
    one = rule_asked_again()
    found = [one.observe(results(asking(n))) for n in range(6)]
    assert [word(finding) for finding in found] == ["-", "-", "nudge", "nudge", "nudge", "stop"]
    assert found[2] is not None
    assert text_for_model(found[2]).startswith("3 answers have only asked to try again")


def test_a_retry_is_not_counted_and_does_not_end_the_row() -> None:
    one = rule_asked_again()
    for _ in range(20):
        assert one.observe(results(asking(0), asking(1))) is None
    assert word(one.observe(results(asking(2)))) == "nudge"


def test_a_result_ends_the_row_for_a_stop_and_makes_up_for_three_for_a_nudge() -> None:
    one = rule_asked_again()
    for n in range(100):
        works = n % 5 == 4
        found = one.observe(results(answer(f"call {n}") if works else asking(n), progress=works))
        assert found is None or found.action is Action.NUDGE


def test_calls_of_one_response_count_once() -> None:
    one = rule_asked_again()
    assert one.observe(results(*(asking(n) for n in range(30)), batch="a")) is None
    assert one.observe(results(*(asking(n) for n in range(30, 60)), batch="b")) is None


def test_a_tool_that_says_something_else_each_time_is_left_alone() -> None:
    one = RetryRequests(Rungs(nudge=5, stop=20))
    assert [one.observe(results(asking(n, f"text {n}"))) for n in range(100)] == [None] * 100


def test_failures_between_are_still_in_a_row() -> None:
    stall = Stall(Rungs(stop=3))
    steps = [failing(), asking(1), failing(), asking(2), failing()]
    assert [word(stall.observe(results(step))) for step in steps] == ["-", "-", "-", "-", "stop"]


def test_the_state_is_bounded_asked_again() -> None:
    one = RetryRequests(Rungs(nudge=5, stop=20))
    for n in range(5_000):
        one.observe(results(asking(n, f"text {n % 3}", tool=f"tool {n % 100}")))
    assert weigh(one)[0] < 1_500


def test_an_explicit_limit_counts_such_answers_too(drive: Any) -> None:
    d = drive(max_identical_tool_results=3)
    assert [d.tool(args={"q": n}, says="Server busy").word for n in range(3)] == ["allow", "allow", "stop"]
