"""Rungs, repeated calls, answers without news, cycles and polling."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core.decision import Action, Rungs, text_for_model
from runguard.core.events import (
    Answer,
    ModelCall,
    ModelResult,
    Outcome,
    ToolResults,
)
from runguard.core.identity import read_as
from runguard.core.rules.repetition import (
    Cycle,
    NearEqualCalls,
    NoNewAnswers,
    OnlyNotes,
    Reworded,
    SameAnswers,
    SameCall,
    SameLongAnswer,
)
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


# ---- Calls that a reader cannot tell apart: letter case, width, invisible characters


SPELLINGS = ["refund policy", "Refund Policy", "REFUND POLICY", "refund\u200b policy", "\uff52efund policy"]


def test_the_same_short_answer_to_calls_that_read_alike_is_nudged_at_four_and_stopped_at_twenty(
    drive: type[Driver],
) -> None:
    d = drive(max_nudges=100)
    calls = [SPELLINGS[n % 5] + "\u200b" * (n // 5) for n in range(21)]
    words = [d.tool("search", {"q": q}, says={"days": 14}).word for q in calls]
    assert words.index("nudge") == 3
    assert words.index("stop") == 19


def test_other_answers_to_such_calls_are_left_alone(drive: type[Driver]) -> None:
    d = drive()
    names = ["README", "readme", "Readme", "ReadMe", "rEADME", "readME"]
    assert {d.tool("stat", {"path": name}, says={"size": n}).word for n, name in enumerate(names)} == {"allow"}


def test_other_questions_with_the_same_short_answer_are_a_batch(drive: type[Driver]) -> None:
    d = drive()
    assert {d.tool("is_free", {"seat": n}, says={"free": False}).word for n in range(40)} == {"allow"}


@each_row("text", SPELLINGS)
def test_spellings_read_alike(text: str) -> None:
    assert read_as({"q": text}) == read_as({"q": "refund policy"})


def test_other_words_do_not_read_alike() -> None:
    assert read_as({"q": "refund"}) != read_as({"q": "refunds"})


# ---- Long calls that nearly repeat the one before are nudged, and never stopped


BODY = " ".join(f"word{n}" for n in range(80))


def event(text: str, *, tool: str = "write", understood: bool = False, **others: object) -> ToolResults:
    given = Answer(tool, text.encode(), args={"text": text, **others})
    return ToolResults("r", "", "a", 0.0, "", [given], news=True, is_understood=understood)


def nudges(*events: ToolResults) -> list[int]:
    rule = NearEqualCalls()
    found = [(n, rule.observe(one)) for n, one in enumerate(events, 1)]
    assert all(f.action is Action.NUDGE and "{" not in text_for_model(f) for _, f in found if f is not None)
    return [n for n, finding in found if finding is not None]


def test_the_sixth_version_of_one_text_is_nudged() -> None:
    assert nudges(*(event(f"{BODY} version {n}", path="a.md") for n in range(7))) == [6, 7]


def test_another_short_argument_is_another_thing() -> None:
    assert nudges(*(event(f"{BODY} dear {n}", to=f"p{n}") for n in range(30))) == []


def test_short_and_different_texts_do_not_count() -> None:
    assert nudges(*(event(f"short {n}") for n in range(30))) == []
    assert nudges(*(event(" ".join(f"w{n}x{k}" for k in range(80))) for n in range(30))) == []


def test_equal_calls_are_left_to_repetition() -> None:
    assert nudges(*(event(BODY) for _ in range(30))) == []


def test_a_test_between_the_versions_ends_the_row() -> None:
    steps = [step for n in range(20) for step in (event(f"{BODY} {n}"), event("", tool="test"))]
    assert nudges(*steps) == []


def test_a_journal_without_texts_gives_the_same_findings() -> None:
    events = [event(f"{BODY} version {n}") for n in range(7)]
    assert nudges(*events) == [6, 7]
    for one in events:
        one.answers[0].args, one.is_understood = None, True
    assert nudges(*events) == [6, 7]


# ---- Answers to the same calls that differ in their numbers alone


MANY = {"max_nudges": 100}


def wander(n: int) -> float:
    return round(2.3 + Random(n).random(), 4)


def test_one_call_whose_numbers_wander_is_nudged_and_much_later_stopped(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("validate", says=f"done, score {wander(n)}, loss {wander(n + 99)}").word for n in range(70)]
    assert words.index("nudge") in (5, 6, 7)
    assert 58 < words.index("stop") < 66


def test_one_long_call_whose_numbers_wander_is_stopped_soon(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("edit", {"text": "x" * 300}, says=f"lines {17 * n % 29} to {31 * n % 23}").word for n in range(20)]
    assert 10 < words.index("stop") < 15


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(lambda n: f"{n} percent, load {wander(n)}", id="a percentage grows"),
        pytest.param(lambda n: {"left": 99 - n, "node": n % 3}, id="a rest falls"),
        pytest.param(lambda n: f"score {wander(n)} of model {'abcdefghijklmnop'[n]}", id="the words are new"),
        pytest.param(lambda n: [wander(k) for k in range(n)], id="a list grows"),
    ],
)
def test_an_answer_that_moves_on_is_left_alone(drive: type[Driver], says: object) -> None:
    d = drive(**MANY)
    assert {d.tool("look", {"text": "x" * 300}, says=says(n)).word for n in range(16)} == {"allow"}  # type: ignore[operator]


def test_six_calls_in_turn_whose_numbers_wander_are_nudged(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("abcdef"[n % 6], says=f"done, value {wander(n)}").word for n in range(40)]
    assert 20 < words.index("nudge") < 36
    assert "stop" not in words


def test_a_new_call_within_the_circle_starts_anew(drive: type[Driver]) -> None:
    d = drive(**MANY)
    for n in range(40):
        assert d.tool("measure", says=f"value {wander(n)}").word == "allow"
        assert d.tool("adjust", {"by": n}, says="adjusted").word == "allow"


def test_explicit_rungs_of_same_call_are_all_there_is(drive: type[Driver]) -> None:
    d = drive(**MANY, rules={"same_call": {"stop": 30}})
    words = [d.tool("validate", says=f"done, score {wander(n)}").word for n in range(30)]
    assert words == [*["allow"] * 19, "nudge", *["allow"] * 9, "stop"]


def test_memory_is_bounded() -> None:
    rule = SameCall(Rungs(stop=9), wandering=Rungs(nudge=6, block=12, stop=60))
    for n in range(2_000):
        rule.observe(results(answer(f"call {n}", f"{n}"), news=True))
    assert len(rule._said) <= 6


# ---- Loops behind noise are nudged and never stopped


def event_noise(call: int, answer: int, *, tool: str = "ask", long: bool = True, note: bool = False) -> ToolResults:
    given = Answer(tool, str(call).encode(), answer=answer, is_long=long, is_note=note, counted=not note)
    return ToolResults("r", "", "a", 0.0, "", [given], news=not note)


def nudges_noise(rule: SameAnswers | OnlyNotes, *events: ToolResults) -> list[int]:
    """At which events the rule nudges, counted from one."""
    found = [(n, rule.observe(one)) for n, one in enumerate(events, 1)]
    assert all(finding.action is Action.NUDGE for _, finding in found if finding is not None)
    assert all("{" not in text_for_model(finding) for _, finding in found if finding is not None)
    return [n for n, finding in found if finding is not None]


def test_one_long_answer_to_ever_new_questions() -> None:
    assert nudges_noise(SameAnswers(), *(event_noise(n, 7) for n in range(12))) == [9, 10, 11, 12]


def test_two_tools_in_turn_with_new_arguments() -> None:
    assert nudges_noise(SameAnswers(), *(event_noise(n, n % 2, tool="ab"[n % 2]) for n in range(11))) == [10, 11]


def test_equal_short_answers_are_a_batch() -> None:
    assert nudges_noise(SameAnswers(), *(event_noise(n, 7, long=False) for n in range(100))) == []


def test_new_long_answers_make_up_for_old_ones() -> None:
    assert nudges_noise(SameAnswers(), *(event_noise(n, 7 if n % 3 else 100 + n) for n in range(100))) == []


def test_the_same_call_with_the_same_long_answer_twelve_times_anywhere() -> None:
    steps = [step for n in range(14) for step in (event_noise(0, 7, tool="test"), event_noise(100 + n, 100 + n))]
    assert nudges_noise(SameAnswers(), *steps) == [23, 25, 27]
    assert nudges_noise(SameAnswers(), *(event_noise(0, n) for n in range(100))) == []


def test_notes_in_a_row() -> None:
    notes = [event_noise(n, n, long=False, note=True) for n in range(13)]
    assert nudges_noise(OnlyNotes(), *notes) == [12, 13]
    assert nudges_noise(OnlyNotes(), *notes[:11], event_noise(0, 0), *notes[:11]) == []


def test_memory_is_bounded_noise() -> None:
    answers = SameAnswers()
    for n in range(2_000):
        answers.observe(event_noise(n, n))
    assert len(answers._known) <= 256
    assert len(answers._counts) <= 256


# ---- Long answers given before: counted early, never after a compaction, never in work that brings news


RUNGS = Rungs(nudge=5, stop=10)


def answers(*names: str, news: bool = False, long: bool = True, batch: str = "") -> ToolResults:
    given = [Answer("read", name.encode(), answer=1, is_long=long and not news) for name in names]
    pairs = frozenset((a.call, a.answer) for a in given)
    return ToolResults("r", "", "a", 0.0, batch, given, news=news, calls=frozenset(a.call for a in given), pairs=pairs)


def asked(size: int, agent: str = "a", *, after_answer: bool = False) -> ModelCall:
    return ModelCall("r", "", agent, 0.0, request_bytes=size, after_answer=after_answer)


def actions(rule: SameLongAnswer, *events: ToolResults | ModelCall) -> list[Action | None]:
    return [seen.action if (seen := rule.observe(event)) else None for event in events]


def test_the_fifth_known_long_answer_is_nudged_and_the_tenth_stops() -> None:
    seen = actions(SameLongAnswer(RUNGS), *(answers(str(n % 3)) for n in range(10)))
    assert seen == [None] * 4 + [Action.NUDGE] * 5 + [Action.STOP]


def test_short_answers_do_not_count() -> None:
    assert actions(SameLongAnswer(RUNGS), *(answers("x", long=False) for _ in range(30))) == [None] * 30


def test_one_batch_counts_once() -> None:
    assert actions(SameLongAnswer(RUNGS), *(answers(str(n), batch="b") for n in range(12))) == [None] * 12


def test_an_occasional_new_answer_does_not_reset_the_count() -> None:
    events = [answers(str(n), news=n % 9 == 8) for n in range(27)]
    assert Action.STOP in actions(SameLongAnswer(RUNGS), *events)


@given(st.lists(st.sampled_from(["known", "short"]), max_size=3), st.integers(20, 60))
def test_up_to_three_known_answers_for_each_new_one_never_add_up(between: list[str], rounds: int) -> None:
    rule = SameLongAnswer(RUNGS)
    for n in range(rounds):
        steps = [answers("x", long=kind == "known") for kind in between]
        assert actions(rule, answers(f"new {n}", news=True), *steps) == [None] * (1 + len(steps))


def test_after_a_smaller_request_everything_may_be_read_once_more() -> None:
    rule = SameLongAnswer(RUNGS)
    actions(rule, asked(9_000), *(answers(str(n)) for n in range(9)))
    assert actions(rule, asked(1_000), *(answers(str(n)) for n in range(40))) == [None] * 41
    assert actions(rule, asked(4_000), *(answers(str(n)) for n in range(10)))[-1] is Action.STOP


def test_a_summary_resets_the_count() -> None:
    rule = SameLongAnswer(RUNGS)
    actions(rule, asked(9_000), *(answers(str(n)) for n in range(9)))
    assert (
        actions(rule, asked(100, "(direct)", after_answer=True), *(answers(str(n)) for n in range(30))) == [None] * 31
    )


def test_requests_of_other_agents_are_not_compared() -> None:
    rule = SameLongAnswer(RUNGS)
    actions(rule, asked(9_000, "a"), *(answers(str(n)) for n in range(9)))
    assert actions(rule, asked(500, "b"), asked(9_100, "a"), answers("1"))[-1] is Action.STOP


def test_memory_is_bounded_rereading() -> None:
    rule = SameLongAnswer(RUNGS)
    actions(rule, asked(9_000), asked(100))
    for n in range(5_000):
        rule.observe(answers(str(n)))
        rule.observe(asked(100, f"agent {n}"))
    assert rule._read is not None
    assert len(rule._read) <= 257
    assert len(rule._sizes) <= 65


# ---- One call whose long answer comes back in other words is nudged and then stopped. Long answers that change are not


WORDS = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}".replace("word", "w") for n in range(80)]


def said(n: int) -> str:
    """The same words, each time without another five of them."""
    left_out = {WORDS[(n * 5 + k) % 60] for k in range(5)}
    return " ".join(word for word in WORDS if word not in left_out)


def event_reworded(
    text: object, *, call: bytes = b"c", batch: str = "", news: bool = True, long: bool = True
) -> ToolResults:
    given = Answer("ask", call, text, is_long=long)
    return ToolResults("r", "", "a", 0.0, batch, [given], news=news, calls=frozenset({call}))


def found(*events: ToolResults) -> list[tuple[int, Action]]:
    rule = Reworded(Rungs(nudge=3, stop=6))
    seen = [(n, finding) for n, one in enumerate(events, 1) if (finding := rule.observe(one)) is not None]
    assert all("{" not in text_for_model(finding) for _, finding in seen)
    return [(n, finding.action) for n, finding in seen]


def test_an_answer_in_other_words_is_nudged_and_then_stopped() -> None:
    actions = [action for _, action in found(*(event_reworded(said(n)) for n in range(12)))]
    assert actions[:1] == [Action.NUDGE]
    assert Action.STOP in actions
    for wrap in (
        lambda text: {"result": text},
        lambda text: {"content": [{"type": "text", "text": text}], "isError": False},
    ):
        wrapped = found(*(event_reworded(wrap(said(n))) for n in range(12)))
        assert [action for _, action in wrapped] == actions


def test_a_new_number_or_four_new_words_start_anew() -> None:
    assert found(*(event_reworded(f"{said(n)} {n} done") for n in range(30))) == []
    letters = [chr(97 + n) for n in range(26)]
    assert (
        found(*(event_reworded(f"{said(n)} {' '.join(f'{x}{letters[n]}' for x in WORDS[:4])}") for n in range(26)))
        == []
    )


def test_a_state_that_moves_on_and_a_list_that_shrinks_do_not_count() -> None:
    body = " ".join(WORDS)
    assert found(*(event_reworded(f"{body} {state}") for state in ["queued", "running", "testing", "done"] * 5)) == []
    assert found(*(event_reworded(" ".join(WORDS[n * 2 :])) for n in range(20))) == []


def test_equal_answers_neither_count_nor_end_the_row() -> None:
    assert found(*(event_reworded(said(0), news=n == 0) for n in range(30))) == []
    row = [step for n in range(12) for step in (event_reworded(said(n)), event_reworded(said(n), news=False))]
    assert Action.STOP in [action for _, action in found(*row)]


def test_another_call_a_short_answer_and_a_batch_end_the_row() -> None:
    other = [step for n in range(12) for step in (event_reworded(said(n)), event_reworded(said(n), call=b"d"))]
    assert found(*other) == []
    short = [step for n in range(12) for step in (event_reworded(said(n)), event_reworded("ok", long=False))]
    assert found(*short) == []
    both = [event_reworded(said(n)) for n in range(12)]
    for one in both:
        one.answers.append(Answer("read", b"r", "text", is_long=True))
    assert found(*both) == []


def test_values_that_are_not_texts_do_not_count() -> None:
    assert found(*(event_reworded({"a": said(n), "b": 1}) for n in range(12))) == []
    assert found(*(event_reworded([said(n)]) for n in range(12))) == []


def test_a_journal_without_texts_gives_the_same_findings_reworded() -> None:
    events = [event_reworded(said(n)) for n in range(12)]
    live = found(*events)
    assert live
    for one in events:
        one.answers[0].value, one.is_understood = None, True
    assert found(*events) == live


def test_what_is_kept_is_bounded() -> None:
    rule = Reworded(Rungs(nudge=3, stop=6))
    for n in range(40):
        rule.observe(event_reworded(" ".join(f"x{chr(97 + k % 26)}{n}{k}" for k in range(2_000))))
    assert len(rule._known) <= 2_048 + 16_384
