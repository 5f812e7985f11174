"""Failures that come back while other tools succeed; and empty answers without end."""

from typing import Any

from tests.kit.driver import Driver

MANY = {"max_nudges": 100, "max_tool_calls": 10_000}


def test_one_call_that_fails_alike_after_each_edit_is_nudged_at_eight_and_stopped_at_fifty(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = []
    for n in range(52):
        d.tool("edit", {"line": n}, says=f"replaced line {n}")
        words.append(d.tool("validate", {"path": "a"}, says=f"checked {n} keys\nError: 'name' is required").word)
    assert words.index("nudge") == 7
    assert words.index("stop") == 49


def test_a_success_of_the_call_starts_anew(drive: type[Driver]) -> None:
    d = drive(**MANY)
    for n in range(60):
        assert d.tool("edit", {"line": n}, says=f"replaced line {n}").word == "allow"
        says = "Error: broken" if n % 4 else f"fine at {n}"
        assert d.tool("validate", {"path": "a"}, says=says).word == "allow"


def test_another_last_line_starts_anew(drive: type[Driver]) -> None:
    d = drive(**MANY)
    for n in range(60):
        assert d.tool("edit", {"line": n}, says=f"replaced line {n}").word == "allow"
        says = f"checked it\nError: {'abcdefgh'[n // 3 % 8] * 5} is required"
        assert d.tool("validate", {"path": "a"}, says=says).word == "allow"


def test_a_tool_that_fails_alike_with_ever_new_arguments_while_others_work_is_stopped(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = []
    for n in range(376):
        d.tool("search", {"q": n}, says=f"fragment {n}")
        words.append(d.tool("parse", {"fragment": n}, says={"status": "partial_parse_error"}).word)
    assert words.index("nudge") == 11
    assert words.index("stop") == 59


def test_a_failure_within_a_batch_of_good_answers_counts_once_per_response(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = []
    for n in range(14):
        calls: list[tuple[str, Any, Any]] = [("weather", {"day": n}, f"{n} degrees")]
        calls += [("tides", {"day": day}, {"error": "403 forbidden"}) for day in (n, -n - 1)]
        words.append(d.batch(calls).word)
    assert words.index("nudge") == 11


def test_a_tool_that_also_succeeds_is_left_alone(drive: type[Driver]) -> None:
    d = drive(**MANY)
    for n in range(200):
        assert d.tool("upload", {"n": n}, says=f"uploaded {n}").word == "allow"
        says: Any = {"error": "unsupported codec"} if n % 3 else {"converted": n}
        assert d.tool("convert", {"n": n}, says=says).word == "allow"


def test_explicit_rungs_of_stall_are_all_there_is(drive: type[Driver]) -> None:
    d = drive(**MANY, rules={"stall": {"stop": 3}})
    for n in range(100):
        assert d.tool("edit", {"line": n}, says=f"replaced line {n}").word == "allow"
        assert d.tool("validate", {"path": "a"}, says="Error: broken").word == "allow"


def test_hundred_empty_answers_to_new_questions_are_stopped(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("search", {"q": n}, says={"results": []}).word for n in range(101)]
    assert words.index("nudge") == 5
    assert words.index("stop") == 99


def test_one_find_among_many_empty_answers_starts_anew(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("search", {"q": n}, says={"results": [] if n % 90 else [n]}).word for n in range(300)]
    assert "stop" not in words


def test_a_call_without_arguments_whose_log_ends_in_an_error_was_executed(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = []
    for n in range(8):
        d.tool("edit", {"line": n}, says=f"replaced line {n}")
        words.append(d.tool("validate", {}, says=f"checked {n} keys\nError: 'name' is a required property").word)
    assert words == ["allow"] * 7 + ["nudge"]


def test_a_nudge_that_was_given_does_not_hide_another_one(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = []
    for n in range(8):
        d.tool("edit", {"line": n}, says=f"replaced line {n}")
        words.append(d.tool("write", {}, says="Error: missing required argument: text").word)
    assert [n for n, word in enumerate(words, 1) if word == "nudge"] == [2, 8]
