"""Made-up runs about failures that do not look like one at first sight, and answers that only look like a failure."""

import json

from shapes import Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()


def _mcp(text: object, **more: object) -> dict[str, object]:
    return {"content": [{"type": "text", "text": text if isinstance(text, str) else json.dumps(text)}], **more}


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("unseen failures")
def shell_with_a_path_reports_a_missing_command() -> Steps:
    for n in range(12):
        yield from turn(("bash", {"command": f"fooctl get {n}"}, f"/bin/bash: line {n}: fooctl: command not found"))


@LOOPS.of("unseen failures")
def cat_of_files_that_are_not_there() -> Steps:
    for n in range(12):
        yield from turn(("bash", {"command": "cat $TARGET", "try": n}, "cat: conf.yaml: No such file or directory"))


@LOOPS.of("unseen failures")
def internal_server_error_as_first_line() -> Steps:
    for n in range(12):
        yield from turn(("fetch", {"page": n}, "500 Internal Server Error\nPlease contact the administrator."))


@LOOPS.of("unseen failures")
def tool_call_failed_in_words() -> Steps:
    for n in range(12):
        yield from turn(("lookup", {"n": n}, f"Tool call failed: upstream closed the stream after {n} bytes"))


@LOOPS.of("unseen failures")
def exit_code_of_a_command() -> Steps:
    for n in range(12):
        answer = {"exit_code": 2, "stdout": "", "stderr": f"make: *** No rule to make target 'all{n}'. Stop."}
        yield from turn(("shell", {"command": f"make all{n % 3} -j{n}"}, answer))


@LOOPS.of("unseen failures")
def json_error_inside_a_string() -> Steps:
    for n in range(12):
        yield from turn(("query", {"n": n}, json.dumps({"success": False, "error": "quota exceeded", "data": None})))


@LOOPS.of("unseen failures")
def json_error_inside_mcp_content() -> Steps:
    for n in range(12):
        yield from turn(("query", {"n": n}, _mcp({"error": {"code": 429, "message": "slow down"}}, isError=False)))


@LOOPS.of("unseen failures")
def json_error_inside_a_wrapped_string() -> Steps:
    for n in range(12):
        yield from turn(("query", {"n": n}, {"result": json.dumps({"status": "error", "detail": "not permitted"})}))


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("answers that look like failures")
def grep_without_matches_over_many_patterns() -> Steps:
    for n in range(20):
        yield from turn(("shell", {"command": f"grep -r name{n}"}, {"exit_code": 1, "stdout": "", "stderr": ""}))
    yield from work(2)


@HEALTHY.of("answers that look like failures")
def diff_that_finds_differences() -> Steps:
    for n in range(15):
        answer = {"exit_code": 1, "stdout": f"< old {n}\n> new {n}", "stderr": ""}
        yield from turn(("shell", {"command": f"diff a{n} b{n}"}, answer))


@HEALTHY.of("answers that look like failures")
def log_pages_that_speak_of_errors() -> Steps:
    for n in range(15):
        lines = "\n".join(f"10:{n:02} GET /{k} 200" for k in range(8))
        yield from turn(("read_log", {"page": n}, f"{lines}\n10:{n:02} GET /x 500 Internal Server Error\n{lines}"))


@HEALTHY.of("answers that look like failures")
def json_records_with_a_failed_state() -> Steps:
    for n in range(15):
        yield from turn(("get_job", {"id": n}, json.dumps({"job": n, "owner": f"team {n % 4}", "status": "failed"})))


@HEALTHY.of("answers that look like failures")
def json_lists_of_errors_that_were_asked_for() -> Steps:
    for n in range(15):
        found = [{"line": k, "rule": "E501", "error": "line too long"} for k in range(n % 5)]
        yield from turn(("lint", {"path": f"{n}.py"}, json.dumps({"file": f"{n}.py", "errors": found})))


@HEALTHY.of("answers that look like failures")
def json_answers_without_an_error() -> Steps:
    for n in range(20):
        yield from turn(("save", {"id": n}, json.dumps({"success": True, "error": None, "errors": []})))


@HEALTHY.of("answers that look like failures")
def failing_tests_by_exit_code_between_edits() -> Steps:
    for n in range(15):
        yield from turn(("edit", {"path": "a.py", "new": f"x = {n}"}, "ok"))
        answer = {"exit_code": 1, "stdout": page("1 failed"), "stderr": "1 failed, 11 passed"}
        yield from turn(("shell", {"command": "pytest"}, answer))


@HEALTHY.of("answers that look like failures")
def source_files_about_errors() -> Steps:
    for n in range(15):
        yield from turn(("read", {"path": f"errors_{n}.py"}, f'class Error{n}(Exception):\n    """500 Internal."""'))


@HEALTHY.of("answers that look like failures")
def missing_records_told_as_json() -> Steps:
    for n in range(20):
        answer = json.dumps({"error": f"customer {n} not found"} if n < 19 else {"id": "C1"})
        yield from turn(("find_customer", {"phone": f"555-{n:04}"}, answer))


# ---- a failure that names its own item ------------------------------------------------------------------------------


@HEALTHY.of("failures that name their item")
def eight_columns_tried_in_long_queries() -> Steps:
    for n, column in enumerate(["cust_name", "client", "customer", "buyer", "holder", "owner_name", "party", "person"]):
        sql = f"SELECT o.id, o.total, {column} FROM orders o JOIN lines l ON l.order_id = o.id WHERE o.total > {n}"
        yield from turn(("sql", {"query": sql}, f"Error: Unknown column '{column}' in 'field list'"))
    yield from turn(("sql", {"query": "SELECT name FROM orders"}, {"rows": [["Ann"]]}))


@HEALTHY.of("failures that name their item")
def eight_hosts_tried_in_long_commands() -> Steps:
    for n in range(8):
        command = (
            f"ssh -o ConnectTimeout=5 -o BatchMode=yes deploy@host{n:02}.example.org 'systemctl status web | head -5'"
        )
        answer = {"error": f"ssh: connect to host 'host{n:02}.example.org' port 22: Connection timed out"}
        yield from turn(("run", {"command": command}, answer))
    yield from work(2)


@LOOPS.of("unseen failures")
def one_unknown_column_in_ever_new_queries() -> Steps:
    for n in range(12):
        sql = f"SELECT o.id, o.total, revenue FROM orders o JOIN lines l ON l.order_id = o.id WHERE o.total > {n}"
        yield from turn(("sql", {"query": sql}, "Error: Unknown column 'revenue' in 'field list'"))


@HEALTHY.of("commands")
def four_equal_failures_of_a_shell_then_another_command() -> Steps:
    """A fifth command that differs in what matters is not refused by the failures of the first four."""
    for place in ("/etc/mtab", "/proc/mounts", "/proc/self/mounts", "/etc/fstab"):
        yield from turn(
            ("bash", {"command": f"df . | xargs grep -w {place}"}, "grep: overlay: No such file or directory")
        )
    yield from turn(("bash", {"command": "mount | grep overlay"}, "overlay on / type overlay"))


@LOOPS.of("commands")
def new_commands_that_fail_in_the_same_way() -> Steps:
    for n in range(12):
        yield from turn(("bash", {"command": f"deploy --region {n}"}, "/bin/bash: line 1: deploy: command not found"))
