"""One call whose long answer comes back in other words is nudged and then stopped. Long answers that change are not."""

from runguard.core.decision import Action, Rungs, text_for_model
from runguard.core.events import Answer, ToolResults
from runguard.core.rules.repetition import Reworded

WORDS = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}".replace("word", "w") for n in range(80)]


def said(n: int) -> str:
    """The same words, each time without another five of them."""
    left_out = {WORDS[(n * 5 + k) % 60] for k in range(5)}
    return " ".join(word for word in WORDS if word not in left_out)


def event(text: object, *, call: bytes = b"c", batch: str = "", news: bool = True, long: bool = True) -> ToolResults:
    given = Answer("ask", call, text, is_long=long)
    return ToolResults("r", "", "a", 0.0, batch, [given], news=news, calls=frozenset({call}))


def found(*events: ToolResults) -> list[tuple[int, Action]]:
    rule = Reworded(Rungs(nudge=3, stop=6))
    seen = [(n, finding) for n, one in enumerate(events, 1) if (finding := rule.observe(one)) is not None]
    assert all("{" not in text_for_model(finding) for _, finding in seen)
    return [(n, finding.action) for n, finding in seen]


def test_an_answer_in_other_words_is_nudged_and_then_stopped() -> None:
    actions = [action for _, action in found(*(event(said(n)) for n in range(12)))]
    assert actions[:1] == [Action.NUDGE]
    assert Action.STOP in actions
    for wrap in (
        lambda text: {"result": text},
        lambda text: {"content": [{"type": "text", "text": text}], "isError": False},
    ):
        wrapped = found(*(event(wrap(said(n))) for n in range(12)))
        assert [action for _, action in wrapped] == actions


def test_a_new_number_or_four_new_words_start_anew() -> None:
    assert found(*(event(f"{said(n)} {n} done") for n in range(30))) == []
    letters = [chr(97 + n) for n in range(26)]
    assert found(*(event(f"{said(n)} {' '.join(f'{x}{letters[n]}' for x in WORDS[:4])}") for n in range(26))) == []


def test_a_state_that_moves_on_and_a_list_that_shrinks_do_not_count() -> None:
    body = " ".join(WORDS)
    assert found(*(event(f"{body} {state}") for state in ["queued", "running", "testing", "done"] * 5)) == []
    assert found(*(event(" ".join(WORDS[n * 2 :])) for n in range(20))) == []


def test_equal_answers_neither_count_nor_end_the_row() -> None:
    assert found(*(event(said(0), news=n == 0) for n in range(30))) == []
    row = [step for n in range(12) for step in (event(said(n)), event(said(n), news=False))]
    assert Action.STOP in [action for _, action in found(*row)]


def test_another_call_a_short_answer_and_a_batch_end_the_row() -> None:
    other = [step for n in range(12) for step in (event(said(n)), event(said(n), call=b"d"))]
    assert found(*other) == []
    short = [step for n in range(12) for step in (event(said(n)), event("ok", long=False))]
    assert found(*short) == []
    both = [event(said(n)) for n in range(12)]
    for one in both:
        one.answers.append(Answer("read", b"r", "text", is_long=True))
    assert found(*both) == []


def test_values_that_are_not_texts_do_not_count() -> None:
    assert found(*(event({"a": said(n), "b": 1}) for n in range(12))) == []
    assert found(*(event([said(n)]) for n in range(12))) == []


def test_a_journal_without_texts_gives_the_same_findings() -> None:
    events = [event(said(n)) for n in range(12)]
    live = found(*events)
    assert live
    for one in events:
        one.answers[0].value, one.is_understood = None, True
    assert found(*events) == live


def test_what_is_kept_is_bounded() -> None:
    rule = Reworded(Rungs(nudge=3, stop=6))
    for n in range(40):
        rule.observe(event(" ".join(f"x{chr(97 + k % 26)}{n}{k}" for k in range(2_000))))
    assert len(rule._known) <= 2_048 + 16_384
