"""Long calls that nearly repeat the one before are nudged, and never stopped."""

from runguard.core.decision import Action, text_for_model
from runguard.core.events import Answer, ToolResults
from runguard.core.rules.repetition import NearEqualCalls

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
