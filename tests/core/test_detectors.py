"""Every rule where it fires and where it must not; most of them through a guard, as they are used."""

import pkgutil
import random
import sys
from collections import deque
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core import detectors
from runguard.core.decision import Action, Rungs
from runguard.core.detectors.failures import EmptyAnswers, Stall, ToolFailures
from runguard.core.detectors.growth import Growth
from runguard.core.detectors.handoffs import Depth, HandOffCycle, HandOffRounds, ReEntry
from runguard.core.detectors.limits import Deadline
from runguard.core.detectors.repetition import Cycle, NoNews, Polling, Repetition, SameCall
from runguard.core.events import (
    FAILURES,
    AgentEntered,
    Answer,
    HandOff,
    ModelCall,
    ModelResult,
    Outcome,
    ToolCall,
    ToolResults,
)

ALONE = {
    "same_call": False,
    "no_news": False,
    "repetition": False,
    "stall": False,
    "tool_failures": False,
    "empty": False,
    "handoff": False,
    "growth": False,
}


# of repetition, as it is by default
LADDER = ["allow", "allow", "allow", "nudge", "allow", "allow", "allow", "block", "stop"]
STALLED = ["allow", "allow", "nudge", "allow", "block", "stop"]  # of a stall with ever new arguments


def only(rule: str, **rungs: float) -> dict[str, Any]:
    """Policy keywords under which one rule works and all others are off."""
    return {"rules": {**{name: off for name, off in ALONE.items() if name != rule}, rule: rungs}, "max_nudges": 100}


def results(
    *answers: Answer, batch: str = "", at: float = 0.0, news: bool = False, progress: bool = False
) -> ToolResults:
    """What the guard shows a detector: answers with their names, and the sets it made of them."""
    event = ToolResults("run", "", "agent", at, batch, list(answers), news, progress)
    event.calls = frozenset(a.call for a in answers)
    event.pairs = frozenset((a.call, a.answer) for a in answers if a.outcome is not Outcome.REFUSED)
    event.failures = any(a.outcome in FAILURES for a in answers)
    return event


def answer(
    call: str = "c", says: str = "a", *, tool: str = "t", outcome: Outcome = Outcome.OK, failure: str = ""
) -> Answer:
    return Answer(tool, call.encode(), says, outcome=outcome, answer=hash(says), failure=failure)


def failing(failure: str = "boom", *, tool: str = "t", outcome: Outcome = Outcome.FAILED) -> Answer:
    return answer(tool=tool, outcome=outcome, failure=failure)


def attempt(call: str = "c", *, tool: str = "t", batch: str = "", depth: int = 0, at: float = 0.0) -> ToolCall:
    return ToolCall("run", "", "agent", at, tool, call.encode(), batch, depth=depth)


def page(n: int) -> str:
    """An answer of many words, each time others."""
    return " ".join(f"item{n}x{k}" for k in range(30))


def word(finding: Any) -> str:
    return "-" if finding is None else finding.action.word


def words(steps: Iterable[Any]) -> list[str]:
    return [step.word for step in steps]


# ---- rungs ----------------------------------------------------------------------------------------------------------


@given(rungs=st.builds(Rungs, *[st.none() | st.integers(1, 20)] * 4), count=st.integers(0, 25))
def test_the_strongest_rung_that_was_reached_answers(rungs, count):
    reached = [
        (action, limit)
        for action, limit in zip(Action, (None, rungs.warn, rungs.nudge, rungs.block, rungs.stop), strict=True)
        if limit and count >= limit
    ]
    assert rungs.at(count) == (reached[-1] if reached else None)


# ---- repetition -----------------------------------------------------------------------------------------------------


def test_nudge_rides_on_the_fourth_answer_block_refuses_the_eighth_call_stop_ends_at_the_ninth_attempt(drive):
    d = drive()
    steps = [d.tool() for _ in range(10)]
    assert words(steps) == [*LADDER, "stop"]
    assert steps[3].after.action is Action.NUDGE
    assert [step.ran for step in steps] == [True] * 7 + [False] * 3
    assert d.rules_tripped == ["repetition"]


@pytest.mark.parametrize(
    ("says", "outcome"),
    [
        pytest.param({"state": "queued"}, None, id="a poll"),
        pytest.param("Error: 1 failed, 11 passed", None, id="a flaky test"),
        pytest.param("TimeoutError: timed out", Outcome.ERROR, id="a retry"),
        pytest.param([], None, id="nothing yet"),
        pytest.param("ok", None, id="an acknowledgement"),
    ],
)
def test_a_call_and_five_unchanged_repeats_hold(drive, says, outcome):
    d = drive()
    steps = [d.tool("ask", says=says, outcome=outcome) for _ in range(6)]
    assert all(step.ran for step in steps)
    assert d.tool("ask", says={"state": "done"}).ran
    assert d.tool("ask", says={"state": "done"}).word == "allow"
    assert d.rules_tripped == []


def test_a_refused_repeat_counts_as_an_attempt(drive):
    d = drive(rules={"repetition": {"block": 3}})
    assert words(d.tool() for _ in range(4)) == ["allow", "allow", "block", "stop"]


def test_a_refused_repeat_followed_by_an_end_is_no_trip(drive):
    d = drive(rules={"repetition": {"block": 3}})
    assert words(d.tool() for _ in range(3)) == ["allow", "allow", "block"]
    assert d.rules_tripped == []


def test_stop_without_block_comes_with_the_answer(drive):
    d = drive(**only("repetition", stop=3))
    steps = [d.tool() for _ in range(3)]
    assert words(steps) == ["allow", "allow", "stop"]
    assert steps[2].ran


def test_a_changed_answer_is_progress(drive):
    d = drive()
    assert set(words(d.tool(says={"status": "RUNNING", "progress": 8 * n}) for n in range(15))) == {"allow"}


def test_an_answer_that_differs_in_its_time_alone_is_the_same_answer(drive):
    d = drive()
    steps = [d.tool(says=f"RUNNING at 2026-11-15T09:{10 + n}:00Z") for n in range(9)]
    assert words(steps) == LADDER


def test_another_call_between_starts_the_row_anew(drive):
    d = drive(**only("repetition", stop=3))
    assert set(words(d.tool(args={"n": n % 2}) for n in range(20))) == {"allow"}


def test_identical_answers_to_different_arguments_are_a_batch(drive):
    d = drive()
    assert set(words(d.tool(args={"row": n}, says={"status": "ok"}) for n in range(100))) == {"allow"}


def test_the_same_call_and_answer_is_a_stall_whatever_it_says(drive):
    for says in ("fine", "Error: boom", "not found", {"status": "RUNNING"}, None):
        d = drive()
        assert words(d.tool(says=says) for _ in range(9))[-1] == "stop", says


def test_parallel_equal_calls_collapse_into_one_observation(drive):
    d = drive()
    assert words([d.batch([("look", None, "same")] * 10)]) == ["allow"]
    assert words([d.batch([("look", None, "same")] * 10)]) == ["allow"]


def test_a_batch_is_one_observation(drive):
    d = drive()
    batch = [("look", {"n": n}, "same") for n in range(4)]
    assert words(d.batch(batch) for _ in LADDER) == LADDER


def test_a_refused_batch_counts_once_however_many_calls_it_has(drive):
    d = drive()
    batch = [("look", {"n": n}, "same") for n in range(4)]
    steps = [d.batch(batch) for _ in range(8)]
    assert [decision.action for decision in steps[7].before] == [Action.BLOCK] * 4


def test_a_batch_that_grows_by_one_new_call_is_new(drive):
    d = drive(**only("repetition", stop=3))
    assert set(words(d.batch([("look", {"n": 0}, "same"), ("look", {"n": n}, "same")]) for n in range(1, 20))) == {
        "allow"
    }


def test_repetition_names_what_it_saw(drive):
    d = drive()
    for _ in range(9):
        step = d.tool("get_user", {"uid": 1})
    finding = step.before[0].finding
    assert (finding.rule, finding.tool, finding.observed, finding.limit, finding.scope) == (
        "repetition",
        "get_user",
        9,
        9,
        "lane",
    )
    assert finding.evidence[0]["call"] == d.guard.fingerprint("get_user", {"uid": 1}).hex()


# ---- no news --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 11, 20])
def test_a_circle_of_any_period_is_seen(drive, period):
    d = drive()
    stop = max(14, min(5 * period, 48))  # every answer was told seven times, or the circle is a long one
    steps = [d.tool(args={"n": n % period}) for n in range(2 * period + stop + 1)]
    assert words(steps)[: 2 * period] == ["allow"] * (2 * period)
    assert [n - 2 * period for n, w in enumerate(words(steps), 1) if w != "allow"] == [7, stop, stop + 1]
    assert words(steps)[2 * period + 6] == "nudge"
    assert d.rules_tripped == ["no_news"]


@given(period=st.integers(2, 30), before=st.integers(0, 30))
@settings(max_examples=25)
def test_what_is_told_a_third_time_stops_at_the_tenth_answer_whatever_came_before(period, before):
    nonews = NoNews(Rungs(nudge=5, stop=10))
    for n in range(before + period):
        assert nonews.observe(results(answer(str(n)), batch=f"new {n}", news=True)) is None
    told_again = [word(nonews.observe(results(answer(str(n)), batch=f"again {n}"))) for n in range(period)]
    assert set(told_again) == {"-"}
    seen = [word(nonews.observe(results(answer(str(n % period)), batch=f"old {n}"))) for n in range(10)]
    assert seen == ["-"] * 4 + ["nudge"] * 5 + ["stop"]


@pytest.mark.parametrize("others", [1, 2])
def test_five_unchanged_repeats_hold_with_a_pause_or_other_jobs_between(drive, others):
    d = drive()
    for _ in range(6):
        assert d.tool("check", {"job": 0}, says={"state": "queued"}).ran
        for n in range(others):
            assert d.tool(*[("sleep", {"seconds": 5}, "slept"), ("check", {"job": 1}, {"state": "queued"})][n]).ran
    assert d.rules_tripped == []


@pytest.mark.parametrize("files", [12, 40, 200])
def test_reading_everything_once_more_after_a_compaction_is_free(drive, files):
    d = drive()
    for _ in range(2):
        assert set(words(d.tool("read", {"file": n}, says=f"content {n}") for n in range(files))) == {"allow"}
    assert d.tool("write", {"text": "summary"}, says="saved").word == "allow"
    assert set(words(d.tool("read", {"file": n}, says=f"content {n}") for n in range(files))) == {"allow"}


def test_reading_everything_a_third_time_is_a_circle(drive):
    d = drive()
    steps = [d.tool("read", {"file": n % 20}, says=f"content {n % 20}") for n in range(100)]
    assert [n for n, w in enumerate(words(steps), 1) if w != "allow"][:2] == [47, 88]


@pytest.mark.parametrize(("jobs", "often"), [(1, True), (2, True), (4, True), (1, False), (4, False), (8, False)])
def test_jobs_polled_in_turn_with_a_pause_hold_five_unchanged_rounds(drive, jobs, often):
    d = drive()
    for _ in range(6):
        for job in range(jobs):
            assert d.tool("check", {"job": job}, says={"state": "queued"}).ran
            if often:
                assert d.tool("sleep", {"seconds": 5}, says="slept").ran
        assert d.tool("sleep", {"seconds": 9}, says="slept").ran
    assert d.tool("check", {"job": 0}, says={"state": "done"}).ran
    assert d.rules_tripped == []


def test_explicit_rungs_of_no_news_are_obeyed_exactly(drive):
    d = drive(rules={"no_news": {"stop": 14}})
    steps = [d.tool(args={"n": n % 5}) for n in range(24)]
    assert words(steps).index("stop") == 23


def say(words: int, agent: str = "agent") -> ModelResult:
    return ModelResult("run", "", agent, 0.0, said=words)


def ask(agent: str = "agent", question: int = 7) -> ModelCall:
    return ModelCall("run", "", agent, 0.0, asked=question)


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_the_same_words_again_and_again_end_before_the_next_model_call(agents):
    nonews = NoNews(Rungs(nudge=3, stop=5))
    heard = []
    for n in range(agents + 6):
        heard.append(word(nonews.observe(ask(f"agent {n % agents}"))))
        # a run whose last words are there has ended by itself
        assert nonews.observe(say(1 + n % agents, f"agent {n % agents}")) is None
    assert heard == ["-"] * (agents + 5) + ["stop"]


def test_new_words_and_new_answers_start_the_words_anew():
    nonews = NoNews(Rungs(stop=3))
    for n in range(20):
        events = [
            say(1),
            ask(),
            say(1),
            ask(),
            results(answer(str(n)), batch=str(n), news=True) if n % 2 else say(n + 2),
            ask(),
        ]
        assert {word(nonews.observe(event)) for event in events} == {"-"}


def test_words_that_tell_of_an_answer_are_not_counted_beside_it():
    nonews = NoNews(Rungs(stop=4))
    seen = []
    for n in range(7):  # one agent that looks, says the same, and is asked once more
        seen += [
            word(nonews.observe(event))
            for event in (ask(), results(answer(), batch=str(n), news=n == 0), ask(), say(1))
        ]
    assert seen.index("stop") == 21  # the look of its sixth round: the first is news, the second free


def test_one_new_answer_starts_the_count_anew(drive):
    d = drive(**only("no_news", stop=4))
    for n in range(20):
        assert d.tool("new", {"n": n}, says=f"fact {n}").word == "allow"
        assert words(d.tool("old", {"n": i % 3}) for i in range(6)) == ["allow"] * 6


def test_refusals_are_no_news(drive):
    d = drive(tools={"send": {"once": True}})
    d.tool("send", {"to": "ann"})
    assert words(d.tool("send", {"to": "ann"}) for _ in range(14))[-1] == "stop"


def test_edit_test_edit_is_work_even_while_the_test_fails(drive):
    d = drive()
    for n in range(30):
        assert d.tool("edit", {"change": n}, says="ok").word == "allow"
        assert d.tool("test", says="Error: 3 tests failed").word == "allow"


def test_reading_again_after_a_write_is_no_repetition(drive):
    d = drive(tools={"save": {"writes": True}})
    for _ in range(30):
        assert d.tool("save", {"text": "draft"}, says="saved").word == "allow"
        assert d.tool("read", says="draft").word == "allow"


def test_a_write_makes_everything_worth_reading_again(drive):
    d = drive(tools={"save": {"writes": True}})
    for _ in range(3):
        assert set(words(d.tool("read", {"file": n}, says=f"content {n}") for n in range(12))) == {"allow"}
        d.tool("save", {"text": "draft"}, says="saved")


def test_another_agent_may_read_what_the_first_has_read(drive):
    d = drive()
    for agent in ("writer", "reviewer", "editor", "publisher"):
        steps = [d.tool("read", {"file": n}, says=f"content {n}", agent=agent) for n in range(4)]
        assert set(words(steps)) == {"allow"}


def test_the_same_call_by_one_agent_after_the_other_is_no_row(drive):
    d = drive(**only("repetition", stop=3))
    assert set(words(d.tool(agent=agent) for agent in ("writer", "reviewer") * 5)) == {"allow"}


# ---- the same call with new answers ---------------------------------------------------------------------------------


def test_the_same_call_with_ever_new_answers_is_nudged_late_and_stopped_later(drive):
    d = drive()
    steps = [d.tool(says=f"line {n}") for n in range(120)]
    assert [n for n, w in enumerate(words(steps), 1) if w != "allow"] == [20, 120]
    assert (steps[19].word, steps[119].word) == ("nudge", "stop")


def test_a_percentage_may_be_polled_step_by_step(drive):
    d = drive()
    assert [d.tool(says={"state": "running", "percent": n}).word for n in range(101)].count("stop") == 0
    assert d.rules_tripped == []


def test_page_after_page_by_one_call_is_no_row(drive):
    d = drive()
    assert set(words(d.tool("next_page", says=page(n)) for n in range(300))) == {"allow"}


def test_a_page_told_again_in_slightly_other_words_is_a_row():
    same = SameCall(Rungs(nudge=20, stop=40))
    seen = [
        word(same.observe(results(answer(says=f"{page(0)} and then something else {n}"), batch=str(n))))
        for n in range(40)
    ]
    assert (seen[18], seen[19], seen[39]) == ("-", "nudge", "stop")


def test_a_declared_paging_tool_may_be_called_for_ever(drive):
    d = drive(tools={"next_page": {"paging": True}})
    assert set(words(d.tool("next_page", says=f"page {n % 3}") for n in range(100))) == {"allow"}


def test_an_exempt_tool_is_left_alone(drive):
    d = drive(tools={"tick": {"exempt": True}})
    assert set(words(d.tool("tick") for _ in range(100))) == {"allow"}
    assert set(words(d.tool("tick", says="Error: boom") for _ in range(100))) == {"allow"}


# ---- cycles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_a_cycle_stops_after_its_third_full_round(period):
    cycle = Cycle(Rungs(stop=3), max_len=4)
    seen = [word(cycle.observe(results(answer(str(n % period)), batch=str(n)))) for n in range(period * 3)]
    assert seen == ["-"] * (period * 3 - 1) + ["stop"]


def test_a_circle_longer_than_asked_for_is_no_cycle():
    cycle = Cycle(Rungs(stop=2), max_len=3)
    assert {word(cycle.observe(results(answer(str(n % 4))))) for n in range(40)} == {"-"}


def test_the_same_calls_with_other_answers_are_no_cycle():
    cycle = Cycle(Rungs(stop=2), max_len=4)
    assert {word(cycle.observe(results(answer(str(n % 2), says=str(n))))) for n in range(40)} == {"-"}


def test_cycles_are_looked_for_only_when_asked(drive):
    assert "cycle" not in {type(x).__name__.lower() for x in drive().guard.runs["run"].lanes[""].detectors}
    d = drive(cycle_repeats=2, max_cycle_len=3, rules={"no_news": False, "repetition": False})
    steps = [d.tool(args={"n": n % 3}) for n in range(6)]
    assert words(steps) == ["allow"] * 5 + ["stop"]
    assert d.rules_tripped == ["cycle"]


# ---- polling --------------------------------------------------------------------------------------------------------


def test_polling_is_judged_by_time_and_not_by_count(drive):
    d = drive(tools={"check_job": {"polling": True}})
    assert set(words(d.tool("check_job", says="RUNNING") for _ in range(200))) == {"allow"}


def test_polling_without_change_is_nudged_after_ten_minutes_and_stopped_after_thirty(drive):
    d = drive(tools={"check_job": {"polling": True}})
    seen = {}
    for minute in range(31):
        step = d.tool("check_job", says="RUNNING")
        if step.word != "allow":
            seen[minute] = step.word
        d.now += 60
    assert seen == {10: "nudge", 30: "stop"}
    assert d.rules_tripped == ["polling"]


def test_polling_that_moves_goes_on_for_ever(drive):
    d = drive(tools={"check_job": {"polling": True}})
    for n in range(50):
        assert d.tool("check_job", says={"progress": n}).word == "allow"
        d.now += 500


def test_two_polled_jobs_are_judged_apart(drive):
    d = drive(tools={"check_job": {"polling": True}})
    for n in range(50):
        steps = [
            d.tool("check_job", {"job": 1}, says={"progress": n}),
            d.tool("check_job", {"job": 2}, says={"progress": -n}),
        ]
        assert words(steps) == ["allow", "allow"]
        d.now += 500


def test_a_tool_that_declares_polling_itself_is_judged_by_time_from_its_first_run(drive):
    from runguard import ToolRule

    d = drive()
    d.guard.declare("check_job", ToolRule(polling=True))  # told when the tool is first called: the run has begun
    seen = []
    for _ in range(31):
        seen.append(d.tool("check_job", says="RUNNING").word)
        d.now += 60
    assert seen[:10] == ["allow"] * 10
    assert seen[-1] == "stop"


# ---- failures -------------------------------------------------------------------------------------------------------


def test_the_same_failure_with_any_arguments_is_nudged_blocked_and_stopped(drive):
    d = drive()
    steps = [d.tool(args={"hint": n}, says={"status": "partial_parse_error"}) for n in range(6)]
    assert words(steps) == STALLED
    assert d.rules_tripped == ["stall"]


def test_the_first_three_retries_of_calls_that_failed_are_no_stall_yet(drive):
    d = drive(rules={"repetition": False, "no_news": False})
    for n in (1, 2, 1, 2, 1):  # two attempts, three retries
        assert d.tool(args={"hint": n}, says="Error: boom").word == "allow"
    assert words(d.tool(args={"hint": 2}, says="Error: boom") for _ in range(4)) == ["nudge", "allow", "block", "stop"]


def test_retries_count_when_the_rungs_are_explicit(drive):
    for policy in ({"max_identical_tool_results": 3}, {"rules": {"stall": {"stop": 3}}}):
        d = drive(**policy)
        assert words(d.tool(says="Error: boom") for _ in range(3))[-1] == "stop", policy


def test_the_third_equal_failure_stops_when_three_are_the_limit(drive):
    d = drive(max_identical_tool_results=3)
    steps = [d.tool(args={"hint": n}, says={"status": "partial_parse_error", "data": None}) for n in range(3)]
    assert words(steps) == ["allow", "allow", "stop"]
    assert d.guard.trips[0].tool == "look"


def test_the_same_failure_about_other_particulars_is_the_same(drive):
    d = drive()
    steps = [
        d.tool(args={"path": n}, says=f"Error: cannot read '/data/{n}.csv' (request_id={n * 7})") for n in range(9)
    ]
    assert words(steps)[-1] == "stop"


def test_an_exception_is_a_failure_like_any_other(drive):
    d = drive()
    assert (
        words(d.tool(args={"n": n}, says="ConnectionError: refused", outcome=Outcome.ERROR) for n in range(9))[-1]
        == "stop"
    )


def test_a_block_after_failures_refuses_the_tool_whatever_the_arguments(drive):
    d = drive()
    for n in range(4):
        d.tool("parse", {"hint": n}, says="Error: boom")
    assert not d.tool("parse", {"hint": "quite another"}).ran
    assert d.tool("other", says="fine").ran


def test_a_new_good_answer_of_any_tool_ends_the_stall(drive):
    d = drive(**only("stall", stop=3))
    for n in range(20):
        assert words(
            [d.tool("parse", {"n": n}, says="Error: boom"), d.tool("parse", {"m": n}, says="Error: boom")]
        ) == ["allow", "allow"]
        d.tool("read", {"n": n}, says=f"fact {n}")


def test_a_good_answer_known_before_does_not_end_the_stall(drive):
    d = drive(**only("stall", stop=3))
    d.tool("read")
    steps = []
    for n in range(3):
        steps += [d.tool("parse", {"n": n}, says="Error: boom"), d.tool("read")]
    assert words(steps) == ["allow"] * 4 + ["stop", "stop"]


def test_equal_failures_of_one_batch_count_once(drive):
    d = drive()
    assert words([d.batch([("parse", {"n": n}, "Error: boom") for n in range(10)])]) == ["allow"]
    assert words([d.batch([("parse", {"n": n}, "Error: boom") for n in range(10, 20)])]) == ["allow"]


def test_failures_of_two_tools_are_two_rows():
    stall = Stall(Rungs(stop=3))
    seen = [word(stall.observe(results(failing(tool="ab"[n % 2]), batch=str(n)))) for n in range(6)]
    assert seen == ["-"] * 4 + ["stop", "stop"]


def test_another_failure_starts_another_row_for_stall_but_not_for_failures_in_a_row():
    stall, row = Stall(Rungs(stop=3)), ToolFailures(Rungs(stop=3))
    events = [results(failing(f"failure {n}"), batch=str(n)) for n in range(3)]
    assert [word(stall.observe(event)) for event in events] == ["-", "-", "-"]
    assert [word(row.observe(event)) for event in events] == ["-", "-", "stop"]


def test_failures_with_a_success_of_the_same_tool_between_are_not_in_a_row():
    row = ToolFailures(Rungs(stop=3))
    seen = []
    for n in range(10):
        seen.append(word(row.observe(results(failing(f"failure {n}"), batch=f"f{n}"))))
        # worked, though it brought nothing new
        seen.append(word(row.observe(results(answer("known"), batch=f"ok{n}"))))
    assert set(seen) == {"-"}


def test_a_refusal_is_no_failure():
    stall = Stall(Rungs(stop=2))
    assert {word(stall.observe(results(answer(outcome=Outcome.REFUSED), batch=str(n)))) for n in range(10)} == {"-"}


@pytest.mark.parametrize("allowed", [1, 2, 5, 20])
def test_max_tool_failures_allows_exactly_that_many(drive, allowed):
    d = drive(max_tool_failures=allowed, rules={"stall": False, "repetition": False, "no_news": False})
    steps = [d.tool(args={"n": n}, says=f"Error: kind {'x' * n}", outcome=Outcome.FAILED) for n in range(allowed + 2)]
    assert [step.ran for step in steps] == [True] * allowed + [False, False]
    assert words(steps)[-2:] == ["block", "stop"]


def test_an_unknown_tool_is_a_failure(drive):
    d = drive()
    steps = [
        d.tool(f"tool_{'x' * (n % 2)}", {"n": n}, says="unknown tool", outcome=Outcome.UNKNOWN_TOOL) for n in range(18)
    ]
    assert "stop" in words(steps)


# ---- nothing found --------------------------------------------------------------------------------------------------


def test_a_lookup_sweep_is_nudged_and_never_stopped(drive):
    d = drive()
    steps = [d.tool("search", {"q": n}, says="No results found.") for n in range(60)]
    assert [n for n, w in enumerate(words(steps), 1) if w != "allow"] == [6]
    assert steps[5].word == "nudge"


def test_a_hit_ends_the_sweep(drive):
    d = drive()
    for n in range(40):
        assert d.tool("search", {"q": n}, says="3 hits" if n % 5 == 4 else []).word == "allow"


def test_empty_answers_of_one_batch_count_once(drive):
    d = drive()
    assert words(d.batch([("search", {"q": (n, i)}, []) for i in range(10)]) for n in range(5)) == ["allow"] * 5


def test_an_explicit_stop_for_sweeps_is_obeyed(drive):
    d = drive(rules={"empty": {"stop": 4}})
    assert words(d.tool("search", {"q": n}, says=None) for n in range(4)) == ["allow"] * 3 + ["stop"]


# ---- hand-offs ------------------------------------------------------------------------------------------------------


def test_a_hand_off_circle_without_news_is_nudged_and_stopped(drive):
    d = drive()
    seen = [d.hand_off(*("AB" if n % 2 == 0 else "BA")).action.word for n in range(11)]
    assert seen.index("nudge") == 6  # the fourth A→B
    assert seen.index("stop") == 10  # the sixth
    assert d.rules_tripped == ["handoff"]


def test_the_path_of_the_circle_is_told(drive):
    d = drive(max_handoff_repeats=3)
    for n in range(5):
        decision = d.hand_off(*("AB" if n % 2 == 0 else "BA"))
    assert decision.trip.agent_path == ("A", "B", "A", "B", "A")


def test_a_circle_of_three_peers_trips(drive):
    d = drive(max_handoff_repeats=3)
    seen = [d.hand_off("ABC"[n % 3], "ABC"[(n + 1) % 3]).action.word for n in range(7)]
    assert seen[-1] == "stop"


def test_hand_offs_with_real_results_between_are_work(drive):
    d = drive(max_handoff_repeats=3)
    for n in range(30):
        d.tool("work", {"n": n}, says=f"fact {n}")
        assert d.hand_off(*("AB" if n % 2 == 0 else "BA")).action is Action.ALLOW


def test_a_failure_between_is_no_news(drive):
    d = drive(max_handoff_repeats=3, rules={"stall": False})
    seen = []
    for n in range(5):
        d.tool("work", {"n": n}, says="Error: boom")
        seen.append(d.hand_off(*("AB" if n % 2 == 0 else "BA")).action.word)
    assert seen == ["allow"] * 4 + ["stop"]


def test_one_return_to_the_parent_is_normal(drive):
    d = drive(max_handoff_repeats=2)
    assert [d.hand_off(*edge).action for edge in ("AB", "BA", "AC", "CA", "AD", "DA")] == [Action.ALLOW] * 6


@pytest.mark.parametrize("agents", ["AB", "ABC", "ABCD"])
def test_rounds_of_hand_offs_count_as_rounds_of_calls_do(drive, agents):
    d = drive(cycle_repeats=3, max_cycle_len=4)
    hops = [agents[n % len(agents)] + agents[(n + 1) % len(agents)] for n in range(3 * len(agents))]
    assert [d.hand_off(*hop).action.word for hop in hops] == ["allow"] * (len(hops) - 1) + ["stop"]
    assert d.rules_tripped == ["cycle"]


def test_a_longer_circle_of_hand_offs_than_asked_for_is_none(drive):
    d = drive(cycle_repeats=2, max_cycle_len=3, rules={"handoff": False})
    assert {d.hand_off("ABCD"[n % 4], "ABCD"[(n + 1) % 4]).action.word for n in range(40)} == {"allow"}


def test_hand_offs_do_not_lengthen_a_circle_of_calls(drive):
    d = drive(cycle_repeats=3, max_cycle_len=2, rules={"no_news": False, "handoff": False})
    seen = []
    for n in range(6):
        seen.append(d.tool("look", {"n": n % 2}, says="the same").word)
        d.hand_off(*("AB" if n % 2 == 0 else "BA"))
    assert seen[-1] == "stop"


@pytest.mark.parametrize(
    ("limit", "edges"), [(1, "AB BA"), (1, "AB BC CA"), (1, "AB BC CB"), (2, "AB BA AB"), (2, "AB BC CA AB")]
)
def test_a_hand_off_back_into_the_chain_is_a_reentry(drive, limit, edges):
    d = drive(max_reentries=limit)
    seen = [d.hand_off(*edge).action.word for edge in edges.split()]
    assert seen == ["allow"] * (len(seen) - 1) + ["stop"]
    assert d.rules_tripped == ["reentry"]


def told(*events):
    """What a detector of first re-entries finds in 'A>B' (a hand-off), '+A' (an agent starts) and '?' (a model is
    asked).
    """
    detector = ReEntry(1)
    made = {
        ">": lambda e: HandOff("run", "", e[0], e[2], 0.0),
        "+": lambda e: AgentEntered("run", "", e[1], 0.0),
        "?": lambda _: ModelCall("run", "", "", 0.0),
    }
    return [
        found.key for e in events if (found := detector.observe(made[next(k for k in made if k in e)](e))) is not None
    ]


def test_a_chain_starts_again_where_a_container_starts_an_agent():
    iteration = ("+L", "+A", "?", "A>B", "+B", "?")
    assert told(*iteration * 3) == []
    assert told("+A", "?", "A>B", "+B", "?", "+C", "?", "C>B") == []  # a sequence starts C


def test_a_container_that_gets_the_work_passes_it_on():
    assert told("+A", "?", "A>S", "+S", "+C", "?", "C>A") == ["A"]


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 25])
def test_max_model_calls_allows_exactly_that_many(drive, limit):
    d = drive(max_model_calls=limit)
    assert [d.model().action.word for _ in range(limit + 1)] == ["allow"] * limit + ["stop"]


@pytest.mark.parametrize("limit", [1, 3, 25])
def test_max_tool_calls_allows_exactly_that_many(drive, limit):
    d = drive(max_tool_calls=limit)
    steps = [d.tool(args={"n": n}, says=f"fact {n}") for n in range(limit + 1)]
    assert [step.ran for step in steps] == [True] * limit + [False]
    assert d.rules_tripped == ["tool_calls"]


def test_the_frameworks_own_limit_of_model_calls_holds_for_the_tree(drive):
    d = drive()
    d.start("tree", model_call_limit=3)
    lane = d.lane("child", run="tree", concurrent=False)
    assert [d.model(run="tree", lane=where).action.word for where in ("", lane, lane, "")] == ["allow"] * 3 + ["stop"]


def test_calls_of_one_tool_are_counted_over_all_lanes_and_the_surplus_is_refused_then_stopped(drive):
    d = drive(tools={"search": {"max_calls": 2}})
    lane = d.lane("branch")
    steps = [d.tool("search", {"q": n}, says=f"hit {n}", lane=where) for n, where in enumerate(("", lane, "", ""))]
    assert words(steps) == ["allow", "allow", "block", "stop"]
    assert d.rules_tripped == ["tool_limit"]


def test_a_surplus_in_one_batch_is_refused_and_not_stopped(drive):
    d = drive(tools={"search": {"max_calls": 2}})
    step = d.batch([("search", {"q": n}, f"hit {n}") for n in range(6)])
    assert [decision.action.word for decision in step.before] == ["allow"] * 2 + ["block"] * 4


def test_a_limit_declared_beside_the_tool_holds(drive):
    from runguard import ToolRule

    d = drive()
    d.guard.declare("search", ToolRule(max_calls=2))
    assert [d.tool("search", {"q": n}, says=f"hit {n}").ran for n in range(3)] == [True, True, False]


def test_the_deadline_is_inclusive(drive):
    d = drive(max_seconds=60)
    d.now += 60
    assert d.model().action is Action.ALLOW
    d.now += 0.01
    assert d.model().action is Action.STOP
    assert d.rules_tripped == ["deadline"]


@pytest.mark.parametrize(
    "event",
    [
        ModelCall("run", "", "a", 61.0),
        attempt(at=61.0),
        AgentEntered("run", "", "a", 61.0),
        HandOff("run", "", "a", "b", 61.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_deadline_is_seen_before_whatever_comes_next(event):
    deadline = Deadline(60, started=0.0)
    assert type(event) in deadline.sees
    assert word(deadline.observe(event)) == "stop"


def test_depth_refuses_the_callee_and_not_the_caller():
    depth = Depth(5)
    assert depth.observe(attempt(depth=5)) is None
    found = depth.observe(attempt(depth=6))
    assert (found.action, found.scope, found.observed, found.limit) == (Action.BLOCK, "call", 6, 5)
    assert word(depth.observe(AgentEntered("run", "", "a", 0.0, depth=6))) == "block"


def test_branches_of_one_node_are_limited_before_the_first_is_paid(drive):
    d = drive()
    assert d.guard.check(AgentEntered("run", "", "fan", d.now, branches=100)).action is Action.ALLOW
    assert d.guard.check(AgentEntered("run", "", "fan", d.now, branches=101)).action is Action.STOP


def test_an_answer_too_large_is_kept_out(drive):
    d = drive(max_tool_result_chars=1_000)
    assert d.tool(args={"n": 1}, says="x" * 900).word == "allow"
    step = d.tool(args={"n": 2}, says={"rows": ["x" * 600, "x" * 600]})
    assert (step.after.action, step.after.finding.rule, step.ran) == (Action.BLOCK, "result_size", True)


# ---- growth ---------------------------------------------------------------------------------------------------------


def test_growth_compares_the_last_calls_with_the_first(drive):
    d = drive(**only("growth", stop=3), cost_baseline_events=2)
    seen = []
    for prompt in (100, 100, 200, 200, 290, 309, 291, 300):
        seen.append(d.model().action.word)
        assert d.model_result(prompt).action is Action.ALLOW  # what was answered is kept; the next call is refused
    assert seen == ["allow"] * 7 + ["stop"]
    assert d.guard.trips[0].observed == 3.0


def test_growth_only_warns_by_default_and_says_it_once(drive):
    d = drive()
    seen = [d.model_result(1_000 * n).action.word for n in range(1, 60)]
    assert seen.count("warn") == 1
    assert set(seen) == {"allow", "warn"}


def test_growth_is_told_apart_by_agent_and_lane(drive):
    d = drive(**only("growth", stop=2), cost_baseline_events=1)
    lane = d.lane("branch")
    sizes = {"small": 100, "large": 10_000}
    for _ in range(10):
        for agent, prompt in sizes.items():
            assert d.model_result(prompt, agent=agent).action is Action.ALLOW
            assert d.model_result(3 * prompt, agent=agent, lane=lane).action is Action.ALLOW


def test_growth_knows_nothing_of_calls_without_usage(drive):
    d = drive(**only("growth", stop=2), cost_baseline_events=1)
    assert [d.model_result(prompt).action.word for prompt in (None, 100, None, 150, None)] == ["allow"] * 5


def test_growth_is_shown_in_the_snapshot(drive):
    d = drive(cost_baseline_events=1)
    d.model_result(100)
    d.model_result(250)
    assert d.guard.snapshot()["runs"][0]["growth"] == {"agent": 2.5}


# ---- what every rule owes -------------------------------------------------------------------------------------------


def test_every_detector_says_what_it_sees():
    found = 0
    for module in pkgutil.iter_modules(detectors.__path__):
        for name, kind in vars(import_module(f"{detectors.__name__}.{module.name}")).items():
            if isinstance(kind, type) and hasattr(kind, "observe") and name != "Detector":
                found += 1
                assert kind.sees, name
    assert found >= 18


def weigh(root: Any) -> tuple[int, int]:
    """How many objects hang on ``root``, and their bytes; code and classes aside."""
    seen: dict[int, Any] = {}
    pending = [root]
    while pending:
        item = pending.pop()
        if (
            id(item) in seen
            or isinstance(item, type)
            or callable(item)
            or type(item).__module__ in ("builtins.module", "_thread", "threading")
        ):
            continue
        seen[id(item)] = item
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            pending += item
        pending += [
            getattr(item, name)
            for kind in type(item).__mro__
            for name in getattr(kind, "__slots__", ())
            if hasattr(item, name)
        ]
        if type(item).__module__.startswith("runguard") and hasattr(item, "__dict__"):
            pending += vars(item).values()
    return len(seen), sum(map(sys.getsizeof, seen.values()))


@pytest.mark.parametrize(
    ("detector", "event"),
    [
        pytest.param(HandOffCycle(Rungs(stop=9)), lambda n: HandOff("run", "", f"agent {n}", "b", 0.0), id="hand-offs"),
        pytest.param(
            HandOffRounds(Rungs(stop=9), 64),
            lambda n: HandOff("run", "", f"agent {n}", "b", 0.0),
            id="rounds of hand-offs",
        ),
        pytest.param(ReEntry(9), lambda n: HandOff("run", "", f"agent {n}", f"agent {n + 1}", 0.0), id="re-entries"),
        pytest.param(Growth(Rungs(stop=9)), lambda n: ModelResult("run", "", f"agent {n}", 0.0, 100), id="growth"),
        pytest.param(Stall(Rungs(stop=9)), lambda n: results(failing(f"failure {n}", tool=f"tool {n}")), id="stall"),
        pytest.param(
            EmptyAnswers(Rungs(stop=9)), lambda n: results(answer(tool=f"tool {n}", outcome=Outcome.EMPTY)), id="empty"
        ),
        pytest.param(
            Polling(Rungs(stop=9), lambda tool: True),
            lambda n: results(answer(f"call {n}", f"answer {n}")),
            id="polling",
        ),
        pytest.param(Cycle(Rungs(stop=9), 64), lambda n: results(answer(f"call {n}")), id="cycle"),
        pytest.param(Repetition(Rungs(stop=9)), lambda n: results(answer(f"call {n}")), id="repetition"),
        pytest.param(SameCall(Rungs(stop=9)), lambda n: results(answer(f"call {n}")), id="same call"),
        pytest.param(SameCall(Rungs(stop=9)), lambda n: results(answer("call", page(n))), id="pages"),
        pytest.param(NoNews(Rungs(stop=9)), lambda n: results(answer(f"call {n}"), batch=str(n)), id="no news"),
        pytest.param(NoNews(Rungs(stop=9)), lambda n: ModelResult("run", "", "agent", 0.0, said=n + 1), id="words"),
    ],
)
def test_the_state_of_a_detector_is_bounded(detector, event):
    for n in range(2_000):
        detector.observe(event(n))
    assert weigh(detector)[0] < 1_500


def test_the_state_of_a_run_is_bounded(drive):
    d = drive(
        mode="shadow",  # so that it goes on whatever is found
        max_tool_calls=None,
        rules={"cycle": {"stop": 3}},
        tools={"poll_*": {"polling": True}, "many_*": {"max_calls": 10}},
    )
    rng = random.Random(7)
    weights = []
    for _ in range(2):
        for n in range(12_500):  # four events each: 100,000 in all
            tool = rng.choice(["same", "read", f"poll_{n % 500}", f"many_{n % 3}", f"made_up_{rng.random()}"])
            says = rng.choice(
                [
                    "same",
                    f"fact {rng.random()}",
                    "Error: boom",
                    f"Error: kind {'x' * (n % 100)}",
                    [],
                    "x" * (n % 50) ** 2,
                ]
            )
            d.tool(tool, {"n": rng.choice([0, 1, rng.random()])}, says)
            d.model_result(rng.randint(1, 10_000), agent=f"agent {rng.choice([0, rng.random()])}")
            d.hand_off(f"agent {rng.choice([0, rng.random()])}", "b")
        weights.append(weigh(d.guard.runs["run"]))
    objects, size = zip(*weights, strict=True)
    assert objects[1] < 20_000
    assert objects[1] < 1.1 * objects[0]
    assert size[1] < 3_000_000


def test_a_loop_that_never_ends_keeps_the_state_bounded_in_shadow_mode(drive):
    d = drive(mode="shadow", max_tool_calls=None, rules={"no_news": False, "same_call": False, "empty": False})
    weights = []
    for start in (0, 1_000):
        for n in range(start, start + 1_000):  # every call is made until it would have been stopped, then the next one
            for _ in range(9):
                d.tool(args={"n": n})
        weights.append(weigh(d.guard.runs["run"])[0])
    assert weights[1] < 1.1 * weights[0]
