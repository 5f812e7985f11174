"""Loops behind noise are nudged and never stopped."""

from runguard.core.decision import Action, text_for_model
from runguard.core.events import Answer, ToolResults
from runguard.core.rules.repetition import OnlyNotes, SameAnswers


def event(call: int, answer: int, *, tool: str = "ask", long: bool = True, note: bool = False) -> ToolResults:
    given = Answer(tool, str(call).encode(), answer=answer, is_long=long, is_note=note, counted=not note)
    return ToolResults("r", "", "a", 0.0, "", [given], news=not note)


def nudges(rule: SameAnswers | OnlyNotes, *events: ToolResults) -> list[int]:
    """At which events the rule nudges, counted from one."""
    found = [(n, rule.observe(one)) for n, one in enumerate(events, 1)]
    assert all(finding.action is Action.NUDGE for _, finding in found if finding is not None)
    assert all("{" not in text_for_model(finding) for _, finding in found if finding is not None)
    return [n for n, finding in found if finding is not None]


def test_one_long_answer_to_ever_new_questions() -> None:
    assert nudges(SameAnswers(), *(event(n, 7) for n in range(12))) == [9, 10, 11, 12]


def test_two_tools_in_turn_with_new_arguments() -> None:
    assert nudges(SameAnswers(), *(event(n, n % 2, tool="ab"[n % 2]) for n in range(11))) == [10, 11]


def test_equal_short_answers_are_a_batch() -> None:
    assert nudges(SameAnswers(), *(event(n, 7, long=False) for n in range(100))) == []


def test_new_long_answers_make_up_for_old_ones() -> None:
    assert nudges(SameAnswers(), *(event(n, 7 if n % 3 else 100 + n) for n in range(100))) == []


def test_the_same_call_with_the_same_long_answer_twelve_times_anywhere() -> None:
    steps = [step for n in range(14) for step in (event(0, 7, tool="test"), event(100 + n, 100 + n))]
    assert nudges(SameAnswers(), *steps) == [23, 25, 27]
    assert nudges(SameAnswers(), *(event(0, n) for n in range(100))) == []


def test_notes_in_a_row() -> None:
    notes = [event(n, n, long=False, note=True) for n in range(13)]
    assert nudges(OnlyNotes(), *notes) == [12, 13]
    assert nudges(OnlyNotes(), *notes[:11], event(0, 0), *notes[:11]) == []


def test_memory_is_bounded() -> None:
    answers = SameAnswers()
    for n in range(2_000):
        answers.observe(event(n, n))
    assert len(answers._known) <= 256
    assert len(answers._counts) <= 256
