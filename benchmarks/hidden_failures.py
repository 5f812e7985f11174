"""Made-up failures that are read as success: told at the end, in other words, or with text around them; and healthy
answers that look the same.
"""

import json

from shapes import WORDS, Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
_REMINDER = "\n<system-reminder>\nThe list of tasks is empty. Ignore this if it does not matter.\n</system-reminder>"


def _log(topic: object, lines: int = 12) -> str:
    return "\n".join(f"step {k} of {topic}: loaded part {k * k % 11} of the data set" for k in range(lines))


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("hidden failures")
def edits_that_introduce_a_syntax_error() -> Steps:
    for n in range(12):
        said = "Your proposed edit has introduced new syntax error(s). Please read this error message carefully.\n"
        yield from turn(("edit", {"start": n, "text": f"x = {n}:"}, f"{said}\nERRORS:\n- E999 SyntaxError"))


@LOOPS.of("hidden failures")
def place_of_an_indentation_error() -> Steps:
    for n in range(12):
        said = f'  File "main.py", line {300 + n}\n    return total\n    ^\nIndentationError: unexpected indent'
        yield from turn(("run_file", {"path": "main.py", "options": f"--seed {n}"}, said))


@LOOPS.of("hidden failures")
def log_whose_last_line_is_an_error() -> Steps:
    for n in range(12):
        said = f"{_log('the model')}\nUnboundLocalError: local variable 'best' referenced before assignment"
        yield from turn(("run_file", {"path": "train.py", "seed": n}, said))


@LOOPS.of("hidden failures")
def traceback_after_a_long_log() -> Steps:
    for n in range(12):
        trace = 'Traceback (most recent call last):\n  File "a.py", line 9, in <module>\n    main()\nKeyError: rows'
        yield from turn(("python", {"script": f"main({n})"}, f"{_log('the table')}\n{trace}"))


@LOOPS.of("hidden failures")
def answers_in_the_wrong_format() -> Steps:
    for n in range(12):
        yield from turn(("act", {"said": f"attempt {n}"}, "Thought or action not provided in the correct format."))


@LOOPS.of("hidden failures")
def answers_without_the_one_action_that_is_asked_for() -> Steps:
    for n in range(12):
        said = f"Please always provide EXACTLY ONE action in triple backticks, found {n % 3} actions."
        yield from turn(("act", {"thought": f"step {n}"}, said))


@LOOPS.of("hidden failures")
def what_an_api_says_in_its_only_field() -> Steps:
    for n in range(12):
        yield from turn(("orders", {"page": n}, {"detail": "Not authenticated"}))


@LOOPS.of("hidden failures")
def output_that_could_not_be_parsed() -> Steps:
    for n in range(12):
        yield from turn(
            ("act", {"said": f"attempt {n}"}, "Your response could not be parsed as JSON. Try to do better.")
        )


@LOOPS.of("hidden failures")
def edits_that_change_nothing() -> Steps:
    for n in range(20):
        yield from turn(("edit", {"old": f"line {n}", "new": f"line {n + 1}"}, "No changes were made to the file."))


@LOOPS.of("hidden failures")
def replacement_whose_text_is_not_there() -> Steps:
    for n in range(12):
        said = f"No replacement was performed, old_str `row {n}` did not appear verbatim in /app/a.py."
        yield from turn(("str_replace", {"path": "/app/a.py", "old_str": f"def f():\n    row {n}"}, said))


@LOOPS.of("hidden failures")
def json_failure_in_a_code_fence() -> Steps:
    for n in range(12):
        said = json.dumps({"success": False, "error": "the connection was closed"})
        yield from turn(("query", {"n": n}, f"```json\n{said}\n```"))


@LOOPS.of("hidden failures")
def json_failure_after_a_note() -> Steps:
    for n in range(12):
        said = json.dumps({"status": "error", "detail": "not permitted"}, indent=1)
        yield from turn(("query", {"n": n}, f"Result of the call:\n{said}"))


@LOOPS.of("hidden failures")
def json_failure_before_a_reminder() -> Steps:
    for n in range(12):
        said = json.dumps({"isError": True, "content": "upstream is closed"})
        yield from turn(("query", {"n": n}, f"{said}\n{_REMINDER}"))


@LOOPS.of("hidden failures")
def failure_after_a_reminder() -> Steps:
    for n in range(12):
        yield from turn(("query", {"n": n}, f"{_REMINDER.lstrip()}\nError: the table is locked"))


@LOOPS.of("hidden failures")
def build_that_ends_with_an_error_of_make() -> Steps:
    for n in range(12):
        said = f"{_log('the build')}\nmake: *** [Makefile:12: all] Error 2"
        yield from turn(("build", {"jobs": n, "flags": f"-O{n % 4}"}, said))


@LOOPS.of("hidden failures")
def command_that_is_killed_at_its_end() -> Steps:
    for n in range(12):
        yield from turn(("shell", {"line": f"run {n}", "limit": n}, f"{_log('the job')}\nCommand timed out after 30 s"))


@LOOPS.of("hidden failures")
def near_equal_scripts_without_their_container() -> Steps:
    for n in range(12):
        script = f"set -e\ncd /srv\ndocker exec web{' ' * (n % 3)} cat /etc/conf | head -n {n}\n"
        yield from turn(("bash", {"command": script}, "Error response from daemon: No such container: web"))


@LOOPS.of("hidden failures")
def pages_of_complaints_about_one_missing_program() -> Steps:
    for n in range(12):
        said = "find: 'gzip': No such file or directory\n" * (200 + n)
        yield from turn(("bash", {"command": f"find . -mtime +{n} -exec gzip -9 {{}} \\;"}, said))


@LOOPS.of("hidden failures")
def complaints_about_every_file_of_a_list() -> Steps:
    for n in range(12):
        said = "".join(f"grep: part-{k}.d/part-{k}.txt: No such file or directory\n" for k in range(n, n + 20))
        yield from turn(("bash", {"command": f"ls -R | xargs grep -l {WORDS[n]}"}, said))


@LOOPS.of("hidden failures")
def package_manager_that_reports_its_errors() -> Steps:
    for n in range(12):
        said = "npm ERR! code ERESOLVE\nnpm ERR! ERESOLVE unable to resolve dependency tree"
        yield from turn(("install", {"package": f"left-pad-{n}"}, said))


@LOOPS.of("hidden failures")
def exception_of_a_tool_told_by_its_framework() -> Steps:
    for n in range(12):
        said = "An error occurred while running the tool. Please try again. Error: the connection was closed"
        yield from turn(("search", {"q": f"{WORDS[n]} in stock"}, said))


@LOOPS.of("hidden failures")
def arguments_that_do_not_validate() -> Steps:
    for n in range(12):
        said = (
            "1 validation error for Order\ncustomer\n  Field required [type=missing]\n\nFix the errors and try again."
        )
        yield from turn(("order", {"item": n, "note": WORDS[n]}, said))


@LOOPS.of("hidden failures")
def file_that_must_be_read_before_it_is_edited() -> Steps:
    for n in range(12):
        said = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
        yield from turn(("edit", {"path": f"src/{WORDS[n]}.py", "text": f"x = {n}"}, said))


@LOOPS.of("hidden failures")
def script_that_ends_with_the_version_of_its_runtime() -> Steps:
    for n in range(12):
        trace = (
            f"{_log('the orders')}\nReferenceError: rows is not defined\n    at load (a.js:{n}:3)\n\nNode.js v22.1.0"
        )
        yield from turn(("shell", {"command": f"node a.js --part {n}"}, trace))


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("answers that look like failures")
def fifteen_crash_reports_read_one_after_another() -> Steps:
    for n in range(15):
        trace = f'Traceback (most recent call last):\n  File "{WORDS[n]}.py", line {n}, in run\n    go()'
        said = f"Report of {WORDS[n]} by {WORDS[-n]}, machine {n}\n{trace}\n{WORDS[n].title()}Error: went away"
        yield from turn(("read_report", {"id": n}, said))


@HEALTHY.of("answers that look like failures")
def fifteen_tickets_that_end_with_the_error_a_customer_saw() -> Steps:
    for n in range(15):
        said = f"From: {WORDS[n]}\nI was about to order {WORDS[-n]} when I saw this:\nValueError: bad input"
        yield from turn(("get_ticket", {"id": n}, said))


@HEALTHY.of("answers that look like failures")
def lists_of_lines_that_raise_errors() -> Steps:
    for n in range(15):
        lines = "\n".join(f"{WORDS[k]}Error: raised by {WORDS[n]} for {k}" for k in range(8))
        yield from turn(("find_errors", {"module": n}, lines))


@HEALTHY.of("answers that look like failures")
def formatter_that_changes_nothing_in_forty_files() -> Steps:
    for n in range(40):
        yield from turn(("format_file", {"path": f"m{n}.py"}, "No changes were made."))


@HEALTHY.of("answers that look like failures")
def pages_that_show_how_a_failure_is_answered() -> Steps:
    for n in range(15):
        example = json.dumps({"success": False, "error": f"code {n}"})
        text = f"# {WORDS[n]}\n{page(WORDS[n])}\n```json\n{example}\n```\n{page(n)}"
        yield from turn(("read_docs", {"chapter": n}, text))


@HEALTHY.of("answers that look like failures")
def modules_that_define_exceptions_at_their_end() -> Steps:
    for n in range(15):
        text = f"def {WORDS[n]}(): ...\n\n\nclass {WORDS[n].title()}Error(Exception): ...\n"
        yield from turn(("read", {"path": f"{WORDS[n]}.py"}, text))


@HEALTHY.of("answers that look like failures")
def jobs_with_a_note_and_a_failed_state() -> Steps:
    for n in range(15):
        said = json.dumps({"job": n, "owner": WORDS[n], "status": "failed"})
        yield from turn(("get_job", {"id": n}, f"Job {n}:\n{said}"))


@HEALTHY.of("answers that look like failures")
def fenced_answers_without_an_error() -> Steps:
    for n in range(20):
        said = json.dumps({"success": True, "error": None, "id": n})
        yield from turn(("save", {"id": n}, f"```json\n{said}\n```{_REMINDER}"))


@HEALTHY.of("answers that look like failures")
def history_of_changes_about_syntax_errors() -> Steps:
    for n in range(15):
        said = "\n".join(f"{k:07x} fix a syntax error in {WORDS[(n + k) % 16]}" for k in range(6))
        yield from turn(("git_log", {"page": n}, said))


@HEALTHY.of("debugging")
def edits_with_other_syntax_errors_and_then_a_good_one() -> Steps:
    for n in range(8):
        said = "Your proposed edit has introduced new syntax error(s).\n"
        wrong = f"{said}- E{900 + n} {WORDS[n]} is {WORDS[-n - 1]}"
        yield from turn(("edit", {"text": f"x{n}"}, wrong if n < 7 else "The file was updated."))
    yield from work(2)


@HEALTHY.of("edit-test-edit")
def edits_between_runs_whose_log_ends_with_an_error() -> Steps:
    for n in range(15):
        yield from turn(("edit", {"path": "a.py", "new": f"x = {n}"}, f"applied change {n}"))
        yield from turn(("run_file", {"path": "a.py"}, f"{_log('it')}\nAssertionError: totals differ"))


@HEALTHY.of("edit-test-edit")
def one_container_looked_for_until_it_is_there() -> Steps:
    for n in range(6):
        there = "Error: No such container: web" if n < 5 else "web is up"
        yield from turn(("compose", {"step": n}, f"step {n} was done"))
        yield from turn(("inspect", {"name": "web"}, there))


def _denied(places: int) -> str:
    return "".join(f"find: '/proc/{40 + k}/task': Permission denied\n" for k in range(places))


@HEALTHY.of("answers that look like failures")
def disk_searched_that_may_not_be_read_everywhere() -> Steps:
    for n in range(11):
        yield from turn(("bash", {"command": f"find / -name {WORDS[n]}.conf"}, _denied(3 + 4 * n)))
    yield from turn(("bash", {"command": f"find / -name {WORDS[11]}.conf"}, _denied(9) + f"/etc/{WORDS[11]}.conf\n"))


@HEALTHY.of("answers that look like failures")
def searches_that_find_one_file_between_complaints() -> Steps:
    for n in range(15):
        said = f"{_denied(30)}/srv/{WORDS[n]}.conf\n{_denied(30)}"
        yield from turn(("bash", {"command": f"find / -name {WORDS[n]}.conf"}, said))


@HEALTHY.of("hidden failures")
def fifteen_modules_checked_one_after_another() -> Steps:
    """The tool works: what it finds is its answer."""
    for n in range(15):
        yield from turn(
            (
                "shell",
                {"command": f"mypy src/{WORDS[n]}.py"},
                f'src/{WORDS[n]}.py:{n}:5: error: Name "x" is not defined',
            )
        )


@HEALTHY.of("hidden failures")
def fifteen_letters_that_begin_with_what_went_wrong() -> Steps:
    for n in range(15):
        said = f"An error occurred while I was paying for {WORDS[n]}. {page(n, 30)}"
        yield from turn(("read_letter", {"number": n}, said))


@HEALTHY.of("hidden failures")
def fifteen_files_without_a_finding() -> Steps:
    for n in range(15):
        yield from turn(("lint", {"path": f"src/{WORDS[n]}.py"}, "No issues found."))
