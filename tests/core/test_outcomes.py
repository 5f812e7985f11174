"""Answers that look like success and say no; and answers that mention failure and are none."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.events import FAILURES, Outcome
from runguard.core.outcomes import classify, ending_class, failure_class, named_items, was_done, without_items
from tests.kit.examples import each_row
from tests.kit.fingerprints import GENEROUS_S, cpu_seconds

FAILED: list[Any] = [
    {"status": "error"},
    {"status": "ERROR", "data": None},
    {"status": "partial_parse_error", "data": None},
    {"status": "partial parse error"},
    {"status": "error: disk full"},
    {"status": "failed"},
    {"status": "Failed."},
    {"status": "FAILURE", "items": [1]},
    {"status": "permission_denied"},
    {"status": "unauthorized"},
    {"status": "invalid request"},
    {"status": "timeout"},
    {"status": "timed out"},
    {"status": "timed_out"},
    {"status": "rate_limited"},
    {"status": "quota exceeded"},
    {"status": "service unavailable"},
    {"result_status": "aborted"},
    {"response_type": "error", "text": "no"},
    {"error": "disk full"},
    {"error": {"code": 500, "message": "boom"}},
    {"error": True, "message": "boom"},
    {"errors": ["first", "second"]},
    {"error_message": "boom"},
    {"errorMessage": "boom"},
    {"error_code": "E42"},
    {"errorCode": 17},
    {"exception": "ValueError: x"},
    {"isError": True, "content": [{"type": "text", "text": "boom"}]},
    {"content": [{"type": "text", "text": "could not connect"}], "isError": True},
    {"is_error": True, "value": 1},
    {"success": False},
    {"success": False, "data": [1, 2]},
    {"ok": False, "reason": "x"},
    {"succeeded": False},
    {"successful": False},
    {"result": "Error: disk full"},
    {"result": {"status": "error"}},
    {"output": "Traceback (most recent call last):\n  File ..."},
    "Error: disk full",
    "error executing tool: boom",
    "ERROR 500",
    "Exception: boom",
    "ValueError: invalid literal for int()",
    "Traceback (most recent call last):\n  File 'x.py', line 1\nKeyError: 'a'",
    "Running...\nTraceback (most recent call last):\n  File 'x.py', line 1",
    "Fatal: not a git repository",
    "fatal: not a git repository",
    "Failed to connect to host",
    "Failure: x",
    "Invalid arguments",
    "Permission denied",
    "Access denied for user",
    "bash: line 1: foo: command not found",
    "sh: foo: not found here at all, and a reason why",
    "SyntaxError: invalid syntax",
    "Timed out after 30 s",
    "Could not read the file",
    "Cannot open the file",
    "Unable to reach the server",
    "Tool execution failed: x",
    "  [Error] disk full",
    "Error: old_string not found in file",
    "Error: API key not found",
    "Error: Session does not exist",
    {"status": "partial_parse_error", "data": None, "page": 3},
    {"status": "error", "file": "a.pdf"},
    {"status": "failed", "message": "no credit"},
    "Error: command not found",
    "Error: file 'x.csv' not found",
    "Error: module pandas does not exist",
    "Error: no such directory /tmp/x",
    {"status": "error", "message": "quota of the tool exceeded, user not found"},
    "Error: no permission for user 7",
    "ERROR: No matching distribution found for nosuch",
    "Error: No closing tag found for line 3",
    "FileNotFoundError: [Errno 2] No such file or directory: 'a.txt'",
    "ModuleNotFoundError: No module named 'nosuch'",
    {"error": "ENOENT: no such file or directory, open 'a.txt'"},
    {"status": "error", "message": "The service is not available"},
    {"status": "error", "error_message": "No connection available for shard 7"},
    {"status": "error", "message": "user not found; " + "and a long story of what was done about it " * 4},
    {"status": 500, "body": "oops"},
    {"statusCode": 429, "headers": {}},
    {"content": [{"type": "text", "text": "Error: disk full"}], "isError": False},
    "The operation timed out.",
    "Connection refused",
    "Rate limit exceeded: try again later",
    "HTTP 503 from upstream",
    {"error": "No brokers available"},
    "Error: no workers available for this job",
    "RuntimeError: There is no current event loop in thread 'a'",
    "ValueError: 5 is not in list",
    "Error: getaddrinfo ENOTFOUND api.internal",
    "Something went wrong.",
    "<html><head><title>502 Bad Gateway</title></head></html>",
    "Fehler: keine Verbindung",
    "错误：连接超时",
    "Unauthorized",
    "Forbidden",
]

EMPTY: list[Any] = [
    None,
    "",
    "   \n",
    [],
    (),
    {},
    "None",
    "null",
    "not found",
    "Not found.",
    "No results",
    "No results found.",
    "No matching documents found",
    "no matches",
    "nothing found",
    "0 results",
    "Empty result",
    "User 'bob' not found",
    "File does not exist",
    {"result": None},
    {"result": ""},
    {"result": []},
    {"result": {}},
    {"result": "No results found."},
    {"output": "not found"},
    {"status": "not_found"},
    {"status": "no_results"},
    {"error": "not found"},
    {"error": "user 7 not found"},
    {"isError": True, "content": [{"type": "text", "text": "Entity 7 not found."}]},
    {"error": {"code": 404, "message": "User 7 not found"}},
    {"success": False, "message": "user 7 not found"},
    "Error: No such customer: cus_7",
    "Error: the order doesn't exist",
    "Error: user not found",
    "Error: user 553 not found",
    "Error: the order 'a-7' could not be found.",
    "LookupError: no such customer 12",
    {"status": "error", "message": "No such record 3"},
    {"error": "Error: customer 555-0003 not found"},
    {"status": "error", "message": "Not found"},
    {"status": "failed", "reason": "not found"},
    {"status": "error", "code": "NOT_FOUND"},
    {"error": "item_not_found"},
    {"error": "NotFoundError: no record"},
    {"error": {"code": 404, "message": "Requested entity was not found."}},
    {"error_code": 404},
    {"status": "error", "message": "No customer with id 1234"},
    {"status": "error", "message": "No record found for id 1234."},
    {"status": "error", "error_message": "Weather information for 'Paris' is not available."},
    {"status": "error", "error_message": "Sorry, I don't have timezone information for Paris."},
    {"success": False, "message": "SKU A-12 not in catalog"},
    "Error: No results found for query 'x'",
    "Could not find [Foo]. Similar: ['Fool', 'Food']",
    {"status": 404, "body": ""},
    {"content": [], "isError": False},
    {"error": "404 Client Error: Not Found for url: https://example.org/7"},
    {"status": "error", "error_message": "Kunde 7 wurde nicht gefunden."},
    {"error": "Client 7 introuvable"},
    {"success": False, "error": "No se encontró el cliente 7"},
    {"error": "未找到客户 7"},
    {"error": "顧客が見つかりません"},
    {"success": False, "message": "Username 'ann' is already taken"},
    {"status": "error", "message": "Slot 9:00 is already booked."},
    {"status": "error", "message": "No flights on 3 May"},
    {"error": "Group 'a' already exists"},
    {"status": "success", "data": None},
    {"status": "ok", "results": []},
    {"results": [], "total": 0},
    {"items": [], "count": 0, "query": "x"},
]

UNKNOWN_TOOL: list[Any] = [
    {"error": "Tool 'fly' not found"},
    {"error": "unknown tool: fly"},
    {"error": "'fly' is not a valid tool"},
    {"error": "Function fly is not available"},
    "Error: tool 'fly' does not exist",
    "Unknown tool fly",
]

HEALTHY: list[Any] = [
    {"state": "FAILED", "job": 7},
    {"invoice": 7, "status": "failed"},
    {"file": "f7.py", "errors": ["E501 line too long"]},
    "done",
    "ok",
    "42",
    "0",
    "false",
    "Ann",
    "The error in the second paragraph was corrected.",
    "3 results:\n1. How to fix error 500\n2. Failed builds explained",
    "2026-11-15 09:30 INFO start\n2026-11-15 09:31 ERROR disk full\n2026-11-15 09:32 INFO stop",
    "The page was not found in the old index, so a new one was built with 300 entries and stored. " * 5,
    "No problem, the order was placed.",
    "No errors.",
    "Nothing else matters is a song by Metallica.",
    "Exceptional results in the third quarter.",
    "Exceptions and how to handle them: a guide",
    "Invalidated 3 cache entries.",
    "Fatality rates fell by 3 %.",
    "Usages of the function: 12",
    0,
    1,
    3.5,
    False,
    True,
    b"bytes",
    [0],
    [None],
    ["error", "failed"],
    [{"status": "error"}],
    {"status": "RUNNING"},
    {"status": "RUNNING", "progress": 8},
    {"status": "success"},
    {"status": "ok", "data": {"a": 1}},
    {"status": "DONE"},
    {"status": "pending"},
    {"status": "terrorist watch list checked"},
    {"status": "10 passed, 0 failed"},
    {"status": "no errors"},
    {"status": "completed without errors"},
    {"status": 200},
    {"state": "open"},
    {"error": None, "data": 1},
    {"error": None},
    {"error": ""},
    {"error": False},
    {"errors": []},
    {"errors": [], "data": {"a": 1}},
    {"error": {}},
    {"error_code": 0, "rows": [1]},
    {"error_code": "0", "rows": [1]},
    {"isError": False, "content": [{"type": "text", "text": "Error pages of the site: 3"}]},
    {"success": True},
    {"success": None, "data": 1},
    {"ok": True},
    {"result": 0},
    {"result": False},
    {"result": [0]},
    {"result": {"count": 0, "name": "x"}},
    {"results": [{"title": "Error handling in Go", "error": "x"}]},
    {"logs": ["ERROR disk full", "Traceback (most recent call last)"]},
    {"content": "An article about failure."},
    {"data": {"error_rate": 0.5}},
    {"title": "Error", "body": "Failed"},
    {"query": "x"},
    {"count": 0},
]


@each_row("answer", FAILED)
def test_an_answer_that_says_no_is_a_failure(answer: dict[str, Any] | str) -> None:
    outcome, failure = classify(answer)
    assert outcome is Outcome.FAILED
    assert failure


@each_row("answer", EMPTY)
def test_nothing_there_is_empty(answer: Any) -> None:
    assert classify(answer)[0] is Outcome.EMPTY


def test_what_is_told_as_an_error_was_not_done() -> None:
    assert was_done({"result": None})
    assert was_done("no matches")
    assert not was_done({"error": "order 7 not found"})
    assert not was_done({"status": 404, "body": ""})
    assert not was_done({"status": "error"})


@each_row("answer", UNKNOWN_TOOL)
def test_a_tool_that_is_not_there_is_unknown(answer: dict[str, Any] | str) -> None:
    assert classify(answer)[0] is Outcome.UNKNOWN_TOOL


@each_row("answer", HEALTHY)
def test_a_healthy_answer_is_ok(answer: Any) -> None:
    assert classify(answer) == (Outcome.OK, "")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=30),
        lambda i: st.lists(i) | st.dictionaries(st.text(max_size=8), i),
        max_leaves=12,
    )
)
def test_every_answer_has_an_outcome(answer: Any) -> None:
    outcome, failure = classify(answer)
    assert not failure or outcome in FAILURES


# ---- the class of a failure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("No such file: '/a/b.txt'", "No such file: '/c/d.txt'", id="quoted name"),
        pytest.param("Error 7 in line 12", "Error 9 in line 80", id="numbers"),
        pytest.param("cannot open /tmp/a", "cannot open /var/b", id="path"),
        pytest.param("timeout at 2026-11-15T09:30:00Z", "timeout at 2026-11-15T10:31:10Z", id="time"),
        pytest.param("denied, request_id=abc", "denied, request_id=xyz", id="request id"),
    ],
)
def test_the_same_failure_about_another_thing_is_the_same_failure(one: str, other: str) -> None:
    assert failure_class(one) == failure_class(other)


@pytest.mark.parametrize(("one", "other"), [("permission denied", "disk full"), ("KeyError: 'a'", "ValueError: 'a'")])
def test_another_failure_is_another_failure(one: str, other: str) -> None:
    assert failure_class(one) != failure_class(other)


@each_row(
    "wrap",
    [
        lambda said: said,
        lambda said: {"result": said},
        lambda said: {"content": [{"type": "text", "text": said}], "isError": True},
        lambda said: {"result": {"content": [{"type": "text", "text": said}]}},
    ],
)
def test_the_ending_is_the_last_line_however_the_text_is_wrapped(wrap: Callable[[str], Any]) -> None:
    one, other = (ending_class(wrap(f"read {n} of {n}\nCheckError: no name"), n) for n in ("ducks", "geese"))
    assert one == other == "CheckError: no name"


@each_row("answer", ['{"ok": false, "error": "x"}', {"result": "[1]"}, {"error": "x", "n": 1}, None, ""])
def test_what_has_no_last_line_ends_as_a_whole(answer: Any) -> None:
    assert ending_class(answer, "whole") == "whole"


def test_a_failure_without_the_items_that_it_names() -> None:
    one, other = (without_items(failure_class(f"no table in {name}"), name) for name in ("page-7", "the appendix"))
    assert one == other == "no table in #"


def test_the_class_does_not_depend_on_the_order_of_fields() -> None:
    one = classify({"status": "error", "reason": "quota", "job": 7})
    other = classify({"job": 8, "reason": "quota", "status": "error"})
    assert one == other


def test_the_class_of_a_failure_is_short() -> None:
    assert len(classify({"error": "x" * 1_000_000})[1]) <= 1_000


# ---- bounded --------------------------------------------------------------------------------------------------------


def a_deep_list() -> Any:
    value: Any = "x"
    for _ in range(50_000):
        value = [value]
    return value


@each_row(
    "text",
    [
        "no " + "_" * 390,
        "no " + "a_" * 195,
        "no_" + "a" * 390,
        "no " + "a-" * 195,
        "a " * 200,
        "a" * 400,
        "a'" * 199,
        "'" * 400,
        "/" * 400,
        "a/" * 200,
        " " * 400,
        "-" * 400,
        "not found" + "." * 390 + "a",
        "error " * 20_000,
        "tool " * 80,
    ],
)
@each_row(
    "shape",
    [lambda text: text, lambda text: {"error": text}, lambda text: {"status": text}],
)
def test_no_text_takes_long_to_understand(shape: Callable[..., Any], text: str) -> None:
    assert cpu_seconds(lambda: classify(shape(text))) < GENEROUS_S


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"error": a_deep_list()}, id="deep"),
        pytest.param({"error": ["x" * 1_000_000] * 100}, id="100 MB"),
        pytest.param({"isError": True, **{str(i): "y" * 1_000 for i in range(20_000)}}, id="many fields"),
        pytest.param("x" * 100_000_000, id="long text"),
    ],
)
def test_no_answer_takes_long_to_understand(answer: dict[Any, Any] | dict[str, Any] | str) -> None:
    assert cpu_seconds(lambda: classify(answer)) < GENEROUS_S


# ---- Failures that do not look like one at first sight: in a string, behind a shell's path, by an exit code


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
