"""Failures that do not look like one at first sight: in a string, behind a shell's path, by an exit code."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.events import Outcome
from runguard.core.outcomes import classify, named_items, was_done
from tests.kit.examples import each_row

ERROR = {"success": False, "error": "quota exceeded"}


@each_row(
    "answer",
    [
        "/bin/bash: line 7: fooctl: command not found",
        "/usr/bin/zsh: -c: line 1: syntax error near unexpected token",
        "awk '{print}': -c: line 2: syntax error: unexpected end of file",
        "cat: f: No such file or directory",
        "ls: cannot access '/mnt': No such file or directory\nls: cannot access '/opt': No such file or directory\n",
        "rm: invalid option -- 'o'\nTry 'rm --help' for more information.\n",
        "500 Internal Server Error",
        "503 Service Unavailable\nno healthy upstream",
        "Tool call failed: connection reset by peer",
        "Function call failed: bad arguments",
        "<returncode>127</returncode>\n<output>\nfoo\n</output>",
        "Exit code: 2\nmake: *** [all] Error 2",
        {"exit_code": 2, "stdout": "", "stderr": "boom"},
        {"exit_code": 1, "stdout": "", "stderr": "permission denied"},
        {"returncode": 137},
        {"command": "make", "exitCode": 2, "output": "make: *** stop"},
        json.dumps(ERROR),
        json.dumps(ERROR, indent=2),
        {"result": json.dumps(ERROR)},
        {"content": [{"type": "text", "text": json.dumps(ERROR)}]},
        {"content": [{"type": "text", "text": json.dumps(ERROR)}], "isError": False},
        [{"type": "text", "text": json.dumps(ERROR)}],
        json.dumps({"error": {"code": 429, "message": "slow down"}, "trace": "x" * 6_000}),
    ],
)
def test_it_is_a_failure(answer: object) -> None:
    outcome, why = classify(answer)
    assert outcome is Outcome.FAILED
    assert why
    assert not was_done(answer)


@each_row(
    "answer",
    [
        "/etc/hosts\n/etc/passwd",
        "grep: tmp: Is a directory\nsrc/a.py: found",
        "gzip: *.gz: No such file or directory\n0",
        "10:00 GET /a 200\n10:01 GET /b 500 Internal Server Error",
        "500 Internal Server Error is explained below. " + "It happens often. " * 40,
        "<returncode>0</returncode>\n<output>\nok\n</output>",
        "<returncode>1</returncode>\n<output>\n1 failed, 11 passed\n</output>",
        {"exit_code": 0, "stdout": "", "stderr": "warning: old"},
        {"exit_code": 1, "stdout": "< a\n> b", "stderr": ""},
        {"job": "nightly", "exit_code": 137},
        json.dumps({"job": 7, "owner": "ops", "status": "failed"}),
        json.dumps({"success": True, "error": None}),
        json.dumps({"file": "a.py", "errors": [{"line": 1}]}),
        '{"rows": "cut off',
        json.dumps([{"error": "one of many"}, {"id": 2}]),
        "[" * 3_000 + "]" * 3_000,
    ],
)
def test_it_is_no_failure(answer: object) -> None:
    assert classify(answer)[0] is Outcome.OK


@each_row(
    "answer",
    [
        {"exit_code": 1, "stdout": "", "stderr": ""},
        {"exit_code": 1, "stdout": "", "stderr": " \n"},
        "<returncode>1</returncode>\n<output>\n</output>",
        "[]",
        '{"results": []}',
        {"result": "[]"},
        json.dumps({"error": "customer 7 not found"}),
    ],
)
def test_it_says_that_nothing_is_there(answer: object) -> None:
    assert classify(answer)[0] is Outcome.EMPTY


@given(st.text(alphabet='{}[]":,errostatu \\\n0', max_size=300))
def test_any_text_is_read(text: str) -> None:
    assert classify(text)[0] in Outcome


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=20), st.lists, max_leaves=10))
def test_json_in_a_string_is_judged_like_the_same_data_in_a_dict(value: object) -> None:
    for key in ("error", "success", "status", "data"):
        assert classify(json.dumps({key: value})) == classify({key: value})


# ---- a failure that names its own item ------------------------------------------------------------------------------

LONG = "SELECT o.id, o.total, {} FROM orders o JOIN lines l ON l.order_id = o.id WHERE o.total > 10 ORDER BY 1"


@pytest.mark.parametrize("wrap", [str, lambda text: {"error": text}, lambda text: {"result": text}])
def test_a_quoted_name_in_a_long_argument_is_the_item(wrap: object) -> None:
    assert callable(wrap)
    told = {name: wrap(f"Unknown column '{name}' in 'field list'") for name in ("a1", "b2")}
    found = [named_items({"query": LONG.format(name)}, answer) for name, answer in told.items()]
    assert found == ["a1", "b2"]


@each_row(
    ("args", "answer"),
    [
        ({"query": LONG.format("total_sum")}, "Unknown column 'sum' in 'field list'"),  # only a part of a word
        ({"query": LONG.format("a1")}, "Error near 'WHERE nothing'"),
        ({"query": LONG.format("a1")}, f"Cannot run '{LONG.format('a1')}'"),  # the whole argument is no name
        ("a1", "Unknown column 'a1'"),
        ({"attempt": "number " * 20 + "a1"}, "attempt 'a1' failed"),
    ],
)
def test_what_is_no_item(args: object, answer: str) -> None:
    assert named_items(args, answer) == ""
