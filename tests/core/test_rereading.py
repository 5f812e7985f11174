"""Long answers given before: counted early, never after a compaction, never in work that brings news."""

from hypothesis import given
from hypothesis import strategies as st

from runguard.core.decision import Action, Rungs
from runguard.core.events import Answer, ModelCall, ToolResults
from runguard.core.rules.repetition import SameLongAnswer

RUNGS = Rungs(nudge=5, stop=10)


def answers(*names: str, news: bool = False, long: bool = True, batch: str = "") -> ToolResults:
    given = [Answer("read", name.encode(), answer=1, is_long=long and not news) for name in names]
    pairs = frozenset((a.call, a.answer) for a in given)
    return ToolResults("r", "", "a", 0.0, batch, given, news=news, calls=frozenset(a.call for a in given), pairs=pairs)


def asked(size: int, agent: str = "a", *, after_answer: bool = False) -> ModelCall:
    return ModelCall("r", "", agent, 0.0, request_bytes=size, after_answer=after_answer)


def actions(rule: SameLongAnswer, *events: ToolResults | ModelCall) -> list[Action | None]:
    return [found.action if (found := rule.observe(event)) else None for event in events]


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


def test_memory_is_bounded() -> None:
    rule = SameLongAnswer(RUNGS)
    actions(rule, asked(9_000), asked(100))
    for n in range(5_000):
        rule.observe(answers(str(n)))
        rule.observe(asked(100, f"agent {n}"))
    assert rule._read is not None
    assert len(rule._read) <= 257
    assert len(rule._sizes) <= 65
