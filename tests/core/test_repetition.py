"""Rungs, repeated calls, answers without news, cycles and polling."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core.decision import Action, Rungs
from runguard.core.events import (
    ModelCall,
    ModelResult,
    Outcome,
)
from runguard.core.rules.repetition import Cycle, NoNewAnswers, SameCall
from tests.kit.detectors import answer, only, page, results, word, words
from tests.kit.driver import Driver
from tests.kit.examples import each_row

# of repetition, as it is by default
LADDER = ["allow", "allow", "allow", "nudge", "allow", "allow", "allow", "block", "stop"]


# ---- rungs ----------------------------------------------------------------------------------------------------------


@given(rungs=st.builds(Rungs, *[st.none() | st.integers(1, 20)] * 4), count=st.integers(0, 25))
def test_the_strongest_rung_that_was_reached_answers(rungs: Any, count: int) -> None:
    reached = [
        (action, limit)
        for action, limit in zip(Action, (None, rungs.warn, rungs.nudge, rungs.block, rungs.stop), strict=True)
        if limit and count >= limit
    ]
    assert rungs.at(count) == (reached[-1] if reached else None)


# ---- repetition -----------------------------------------------------------------------------------------------------


def test_nudge_rides_on_the_fourth_answer_block_refuses_the_eighth_call_stop_ends_at_the_ninth_attempt(
    drive: type[Driver],
) -> None:
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
def test_a_call_and_five_unchanged_repeats_hold(
    drive: type[Driver], says: dict[str, Any] | list[Any] | str, outcome: Any
) -> None:
    d = drive()
    steps = [d.tool("ask", says=says, outcome=outcome) for _ in range(6)]
    assert all(step.ran for step in steps)
    assert d.tool("ask", says={"state": "done"}).ran
    assert d.tool("ask", says={"state": "done"}).word == "allow"
    assert d.rules_tripped == []


def test_a_refused_repeat_counts_as_an_attempt(drive: type[Driver]) -> None:
    d = drive(rules={"repetition": {"block": 3}})
    assert words(d.tool() for _ in range(4)) == ["allow", "allow", "block", "stop"]


def test_a_refused_repeat_followed_by_an_end_is_no_trip(drive: type[Driver]) -> None:
    d = drive(rules={"repetition": {"block": 3}})
    assert words(d.tool() for _ in range(3)) == ["allow", "allow", "block"]
    assert d.rules_tripped == []


def test_stop_without_block_comes_with_the_answer(drive: type[Driver]) -> None:
    d = drive(**only("repetition", stop=3))
    steps = [d.tool() for _ in range(3)]
    assert words(steps) == ["allow", "allow", "stop"]
    assert steps[2].ran


def test_a_changed_answer_is_progress(drive: type[Driver]) -> None:
    d = drive()
    assert set(words(d.tool(says={"status": "RUNNING", "progress": 8 * n}) for n in range(15))) == {"allow"}


def test_an_answer_that_differs_in_its_time_alone_is_the_same_answer(drive: type[Driver]) -> None:
    d = drive()
    steps = [d.tool(says=f"RUNNING at 2026-11-15T09:{10 + n}:00Z") for n in range(9)]
    assert words(steps) == LADDER


def test_another_call_between_starts_the_row_anew(drive: type[Driver]) -> None:
    d = drive(**only("repetition", stop=3))
    assert set(words(d.tool(args={"n": n % 2}) for n in range(20))) == {"allow"}


def test_identical_answers_to_different_arguments_are_a_batch(drive: type[Driver]) -> None:
    d = drive()
    assert set(words(d.tool(args={"row": n}, says={"status": "ok"}) for n in range(100))) == {"allow"}


def test_the_same_call_and_answer_is_a_stall_whatever_it_says(drive: type[Driver]) -> None:
    for says in ("fine", "Error: boom", "not found", {"status": "RUNNING"}, None):
        d = drive()
        assert words(d.tool(says=says) for _ in range(9))[-1] == "stop", says


def test_a_batch_is_one_observation(drive: type[Driver]) -> None:
    d = drive()
    batch = [("look", {"n": n}, "same") for n in range(4)]
    assert words(d.batch(batch) for _ in LADDER) == LADDER


def test_a_refused_batch_counts_once_however_many_calls_it_has(drive: type[Driver]) -> None:
    d = drive()
    batch = [("look", {"n": n}, "same") for n in range(4)]
    steps = [d.batch(batch) for _ in range(8)]
    assert [decision.action for decision in steps[7].before] == [Action.BLOCK] * 4


def test_a_batch_that_grows_by_one_new_call_is_new(drive: type[Driver]) -> None:
    d = drive(**only("repetition", stop=3))
    assert set(words(d.batch([("look", {"n": 0}, "same"), ("look", {"n": n}, "same")]) for n in range(1, 20))) == {
        "allow"
    }


def test_repetition_names_what_it_saw(drive: type[Driver]) -> None:
    d = drive()
    for _ in range(9):
        step = d.tool("get_user", {"uid": 1})
    finding = step.before[0].finding
    assert finding is not None
    assert (finding.rule, finding.tool, finding.observed, finding.limit, finding.scope) == (
        "repetition",
        "get_user",
        9,
        9,
        "lane",
    )
    assert finding.evidence[0]["call"] == d.guard.tools.fingerprint("get_user", {"uid": 1}).hex()


# ---- no news --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 11, 20])
def test_a_circle_of_any_period_is_seen(drive: type[Driver], period: int) -> None:
    d = drive()
    stop = max(14, min(5 * period, 96))  # every answer was told seven times, or the circle is a long one
    steps = [d.tool(args={"n": n % period}) for n in range(2 * period + stop + 1)]
    assert words(steps)[: 2 * period] == ["allow"] * (2 * period)
    assert [n - 2 * period for n, w in enumerate(words(steps), 1) if w != "allow"] == [7, stop, stop + 1]
    assert words(steps)[2 * period + 6] == "nudge"
    assert d.rules_tripped == ["no_news"]


@given(period=st.integers(2, 30), before=st.integers(0, 30))
@settings(max_examples=25)
def test_what_is_told_a_third_time_stops_at_the_tenth_answer_whatever_came_before(period: int, before: int) -> None:
    nonews = NoNewAnswers(Rungs(nudge=5, stop=10))
    for n in range(before + period):
        assert nonews.observe(results(answer(str(n)), batch=f"new {n}", news=True)) is None
    told_again = [word(nonews.observe(results(answer(str(n)), batch=f"again {n}"))) for n in range(period)]
    assert set(told_again) == {"-"}
    seen = [word(nonews.observe(results(answer(str(n % period)), batch=f"old {n}"))) for n in range(10)]
    assert seen == ["-"] * 4 + ["nudge"] * 5 + ["stop"]


@pytest.mark.parametrize("others", [1, 2])
def test_five_unchanged_repeats_hold_with_a_pause_or_other_jobs_between(drive: type[Driver], others: int) -> None:
    d = drive()
    for _ in range(6):
        assert d.tool("check", {"job": 0}, says={"state": "queued"}).ran
        for n in range(others):
            assert d.tool(*[("sleep", {"seconds": 5}, "slept"), ("check", {"job": 1}, {"state": "queued"})][n]).ran
    assert d.rules_tripped == []


@pytest.mark.parametrize("files", [12, 40, 200])
def test_reading_everything_once_more_after_a_compaction_is_free(drive: type[Driver], files: int) -> None:
    d = drive()
    for _ in range(2):
        assert set(words(d.tool("read", {"file": n}, says=f"content {n}") for n in range(files))) == {"allow"}
    assert d.tool("write", {"text": "summary"}, says="saved").word == "allow"
    assert set(words(d.tool("read", {"file": n}, says=f"content {n}") for n in range(files))) == {"allow"}


def test_reading_everything_a_third_time_is_a_circle(drive: type[Driver]) -> None:
    d = drive()
    steps = [d.tool("read", {"file": n % 20}, says=f"content {n % 20}") for n in range(140)]
    assert [n for n, w in enumerate(words(steps), 1) if w != "allow"][:2] == [47, 136]


@pytest.mark.parametrize(("jobs", "often"), [(1, True), (2, True), (4, True), (1, False), (4, False), (8, False)])
def test_jobs_polled_in_turn_with_a_pause_hold_five_unchanged_rounds(
    drive: type[Driver], jobs: int, often: bool
) -> None:
    d = drive()
    for _ in range(6):
        for job in range(jobs):
            assert d.tool("check", {"job": job}, says={"state": "queued"}).ran
            if often:
                assert d.tool("sleep", {"seconds": 5}, says="slept").ran
        assert d.tool("sleep", {"seconds": 9}, says="slept").ran
    assert d.tool("check", {"job": 0}, says={"state": "done"}).ran
    assert d.rules_tripped == []


def test_explicit_rungs_of_no_news_are_obeyed_exactly(drive: type[Driver]) -> None:
    d = drive(rules={"no_news": {"stop": 14}})
    steps = [d.tool(args={"n": n % 5}) for n in range(24)]
    assert words(steps).index("stop") == 23


def say(words: int, agent: str = "agent") -> ModelResult:
    return ModelResult("run", "", agent, 0.0, text_id=words)


def ask(agent: str = "agent", question: int = 7) -> ModelCall:
    return ModelCall("run", "", agent, 0.0, asked=question)


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_the_same_words_again_and_again_end_before_the_next_model_call(agents: int) -> None:
    nonews = NoNewAnswers(Rungs(nudge=3, stop=5))
    heard = []
    for n in range(agents + 6):
        heard.append(word(nonews.observe(ask(f"agent {n % agents}"))))
        # a run whose last words are there has ended by itself
        assert nonews.observe(say(1 + n % agents, f"agent {n % agents}")) is None
    assert heard == ["-"] * (agents + 5) + ["stop"]


def test_new_words_and_new_answers_start_the_words_anew() -> None:
    nonews = NoNewAnswers(Rungs(stop=3))
    for n in range(20):
        events: list[Any] = [
            say(1),
            ask(),
            say(1),
            ask(),
            results(answer(str(n)), batch=str(n), news=True) if n % 2 else say(n + 2),
            ask(),
        ]
        assert {word(nonews.observe(event)) for event in events} == {"-"}


def test_words_that_tell_of_an_answer_are_not_counted_beside_it() -> None:
    nonews = NoNewAnswers(Rungs(stop=4))
    seen = []
    for n in range(7):  # one agent that looks, says the same, and is asked once more
        seen += [
            word(nonews.observe(event))
            for event in (ask(), results(answer(), batch=str(n), news=n == 0), ask(), say(1))
        ]
    assert seen.index("stop") == 21  # the look of its sixth round: the first is news, the second free


def test_one_new_answer_starts_the_count_anew(drive: type[Driver]) -> None:
    d = drive(**only("no_news", stop=4))
    for n in range(20):
        assert d.tool("new", {"n": n}, says=f"fact {n}").word == "allow"
        assert words(d.tool("old", {"n": i % 3}) for i in range(6)) == ["allow"] * 6


def test_refusals_are_no_news(drive: type[Driver]) -> None:
    d = drive(tools={"send": {"once": True}})
    d.tool("send", {"to": "ann"})
    assert words(d.tool("send", {"to": "ann"}) for _ in range(14))[-1] == "stop"


def test_edit_test_edit_is_work_even_while_the_test_fails(drive: type[Driver]) -> None:
    d = drive()
    said = []
    for n in range(30):
        assert d.tool("edit", {"change": n}, says="ok").word == "allow"
        said.append(d.tool("test", says="Error: 3 tests failed").word)
    assert said == [*["allow"] * 7, "nudge", *["allow"] * 22]


def test_reading_again_after_a_write_is_no_repetition(drive: type[Driver]) -> None:
    d = drive(tools={"save": {"writes": True}})
    for _ in range(30):
        assert d.tool("save", {"text": "draft"}, says="saved").word == "allow"
        assert d.tool("read", says="draft").word == "allow"


def test_a_write_makes_everything_worth_reading_again(drive: type[Driver]) -> None:
    d = drive(tools={"save": {"writes": True}})
    for _ in range(3):
        assert set(words(d.tool("read", {"file": n}, says=f"content {n}") for n in range(12))) == {"allow"}
        d.tool("save", {"text": "draft"}, says="saved")


def test_another_agent_may_read_what_the_first_has_read(drive: type[Driver]) -> None:
    d = drive()
    for agent in ("writer", "reviewer", "editor", "publisher"):
        steps = [d.tool("read", {"file": n}, says=f"content {n}", agent=agent) for n in range(4)]
        assert set(words(steps)) == {"allow"}


def test_the_same_call_by_one_agent_after_the_other_is_no_row(drive: type[Driver]) -> None:
    d = drive(**only("repetition", stop=3))
    assert set(words(d.tool(agent=agent) for agent in ("writer", "reviewer") * 5)) == {"allow"}


# ---- the same call with new answers ---------------------------------------------------------------------------------


def test_the_same_call_with_ever_new_answers_is_nudged_late_and_stopped_later(drive: type[Driver]) -> None:
    d = drive()
    steps = [d.tool(says=f"line {n}") for n in range(120)]
    assert [n for n, w in enumerate(words(steps), 1) if w != "allow"] == [20, 120]
    assert (steps[19].word, steps[119].word) == ("nudge", "stop")


def test_a_percentage_may_be_polled_step_by_step(drive: type[Driver]) -> None:
    d = drive()
    assert [d.tool(says={"state": "running", "percent": n}).word for n in range(101)].count("stop") == 0
    assert d.rules_tripped == []


def test_page_after_page_by_one_call_is_no_row(drive: type[Driver]) -> None:
    d = drive()
    assert set(words(d.tool("next_page", says=page(n)) for n in range(300))) == {"allow"}


def test_a_page_told_again_in_slightly_other_words_is_a_row() -> None:
    same = SameCall(Rungs(nudge=20, stop=40))
    seen = [
        word(same.observe(results(answer(says=f"{page(0)} and then something else {n}"), batch=str(n))))
        for n in range(40)
    ]
    assert (seen[18], seen[19], seen[39]) == ("-", "nudge", "stop")


def test_a_declared_paging_tool_may_be_called_for_ever(drive: type[Driver]) -> None:
    d = drive(tools={"next_page": {"paging": True}})
    assert set(words(d.tool("next_page", says=f"page {n % 3}") for n in range(100))) == {"allow"}


def test_an_exempt_tool_is_left_alone(drive: type[Driver]) -> None:
    d = drive(tools={"tick": {"exempt": True}})
    assert set(words(d.tool("tick") for _ in range(100))) == {"allow"}
    assert set(words(d.tool("tick", says="Error: boom") for _ in range(100))) == {"allow"}


# ---- cycles ---------------------------------------------------------------------------------------------------------


@each_row("period", [1, 2, 3, 4])
def test_a_cycle_stops_after_its_third_full_round(period: int) -> None:
    cycle = Cycle(Rungs(stop=3), max_len=4)
    seen = [word(cycle.observe(results(answer(str(n % period)), batch=str(n)))) for n in range(period * 3)]
    assert seen == ["-"] * (period * 3 - 1) + ["stop"]


def test_a_circle_longer_than_asked_for_is_no_cycle() -> None:
    cycle = Cycle(Rungs(stop=2), max_len=3)
    assert {word(cycle.observe(results(answer(str(n % 4))))) for n in range(40)} == {"-"}


def test_the_same_calls_with_other_answers_are_no_cycle() -> None:
    cycle = Cycle(Rungs(stop=2), max_len=4)
    assert {word(cycle.observe(results(answer(str(n % 2), says=str(n))))) for n in range(40)} == {"-"}


def test_cycles_are_looked_for_only_when_asked(drive: type[Driver]) -> None:
    assert "cycle" not in {type(x).__name__.lower() for x in drive().guard.runs["run"].lanes[""].detectors}
    d = drive(cycle_repeats=2, max_cycle_len=3, rules={"no_news": False, "repetition": False})
    steps = [d.tool(args={"n": n % 3}) for n in range(6)]
    assert words(steps) == ["allow"] * 5 + ["stop"]
    assert d.rules_tripped == ["cycle"]


# ---- polling --------------------------------------------------------------------------------------------------------


def test_polling_is_judged_by_time_and_not_by_count(drive: type[Driver]) -> None:
    d = drive(tools={"check_job": {"polling": True}})
    assert set(words(d.tool("check_job", says="RUNNING") for _ in range(200))) == {"allow"}


def test_polling_without_change_is_nudged_after_ten_minutes_and_stopped_after_thirty(drive: type[Driver]) -> None:
    d = drive(tools={"check_job": {"polling": True}})
    seen = {}
    for minute in range(31):
        step = d.tool("check_job", says="RUNNING")
        if step.word != "allow":
            seen[minute] = step.word
        d.now += 60
    assert seen == {10: "nudge", 30: "stop"}
    assert d.rules_tripped == ["polling"]


def test_polling_that_moves_goes_on_for_ever(drive: type[Driver]) -> None:
    d = drive(tools={"check_job": {"polling": True}})
    for n in range(50):
        assert d.tool("check_job", says={"progress": n}).word == "allow"
        d.now += 500


def test_two_polled_jobs_are_judged_apart(drive: type[Driver]) -> None:
    d = drive(tools={"check_job": {"polling": True}})
    for n in range(50):
        steps = [
            d.tool("check_job", {"job": 1}, says={"progress": n}),
            d.tool("check_job", {"job": 2}, says={"progress": -n}),
        ]
        assert words(steps) == ["allow", "allow"]
        d.now += 500


def test_a_tool_that_declares_polling_itself_is_judged_by_time_from_its_first_run(drive: type[Driver]) -> None:
    from runguard import ToolRule

    d = drive()
    d.guard.tools.declare("check_job", ToolRule(polling=True))  # told when the tool is first called: the run has begun
    seen = []
    for _ in range(31):
        seen.append(d.tool("check_job", says="RUNNING").word)
        d.now += 60
    assert seen[:10] == ["allow"] * 10
    assert seen[-1] == "stop"
