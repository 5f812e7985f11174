"""Calls that a reader cannot tell apart: letter case, width, invisible characters."""

from runguard.core.identity import read_as
from tests.kit.driver import Driver
from tests.kit.examples import each_row

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
