"""The table of wordings that report a failure, and texts with something around the failure."""

import json
from typing import Any

import pytest

from runguard.core.events import FAILURES, LATE, Outcome
from runguard.core.outcomes import LAST_LINES, LOOK_ALIKES, SAYINGS, bare, classify, last_line
from tests.kit.examples import each_row
from tests.kit.fingerprints import GENEROUS_S, cpu_seconds

LOG = "\n".join(f"epoch {n}: all samples were read" for n in range(30))
REMINDER = "<system-reminder>\nThe list of tasks is empty.\n</system-reminder>"
FAILURE = json.dumps({"success": False, "error": "closed"})


@each_row("text", [example for saying in SAYINGS for example in saying.examples])
def test_each_example_of_a_beginning_is_a_failure(text: str) -> None:
    assert classify(text)[0] in FAILURES


@each_row("line", [example for saying in LAST_LINES for example in saying.examples])
def test_each_example_of_a_last_line_is_a_failure_after_a_long_log(line: str) -> None:
    outcome, why = classify(f"{LOG}\n{line}\n")
    assert outcome is Outcome.FAILED
    assert why.startswith(LATE)


@each_row("text", [example for saying in LOOK_ALIKES for example in saying.examples])
def test_each_example_of_a_look_alike_is_an_answer(text: str) -> None:
    assert classify(text) == (Outcome.OK, "")
    assert classify(f"{LOG}\n{text}") == (Outcome.OK, "")


@each_row(
    "text",
    [
        "Usage: 45 % of 512 GB",
        "Usage: high",
        f"{LOG}\nerror log is empty",
        f"{LOG}\nerror handling was checked in 3 places",
        {"error": 0.0231, "epochs": 10},
        {"file": "a.py", "errors": 2, "warnings": 0},
        {"error": "None.", "data": 1},
        {"error": "No error"},
    ],
)
def test_a_figure_or_a_count_of_errors_is_an_answer(text: Any) -> None:
    assert classify(text) == (Outcome.OK, "")


@each_row(
    "text",
    [
        "Error: 500",
        "Error 404: forbidden",
        "Error code: 7",
        "Error: 0x80070005",
        "Error: 5.7.1 relaying denied",
        "Error: 0.5 is not a valid share",
        "Error: 127.0.0.1:80 is in use",
        "Error rate limit exceeded",
        "Error rate limited: 60",
        "Error count exceeded: 10",
        "Invalid rate: 5",
        "Invalid percentage: 120 %",
        "Invalid version: 2.0",
        "Invalid IDs: 12, 13",
        "Failed attempts: 5. The account is locked.",
        "timeout_error: no answer",
        "failed_precondition: quota",
        "error.InvalidKey: x",
        "Usage: copy FILE",
        "The replacement text was not found in the file.",
        "error_code: E7",
        "invalid_grant",
        "Error, try again",
        "Invalid: a name is required",
        "Invalid arguments: 3 given",
        "Invalid address: 12",
        "Failed to read 30 bytes: 0 left",
        "Timeout: 30 s",
        "Usage: grep [-abc]",
        {"error": 500},
        {"error": True},
        {"errors": ["name is required"]},
    ],
)
def test_a_failure_with_a_number_is_a_failure(text: Any) -> None:
    assert classify(text)[0] is Outcome.FAILED


@each_row(
    "text",
    [
        f"```json\n{FAILURE}\n```",
        f"```\n{FAILURE}\n```\n",
        f"Result of the call:\n{FAILURE}",
        f"{FAILURE}\n\n{REMINDER}",
        f"{REMINDER}\n{FAILURE}",
        f"{REMINDER}\nError: disk full",
        f"Error: disk full\n{REMINDER}",
        {"result": f"Answer of the server: {FAILURE}"},
    ],
)
def test_text_around_a_failure_is_looked_through(text: Any) -> None:
    assert classify(text)[0] is Outcome.FAILED


@each_row(
    "text",
    [
        f"{LOG}\nclass OrderError(Exception): ...",
        f"{LOG}\nno error was found",
        f"{LOG}\n0 errors",
        f"{LOG}\nProcess exited with code 0",
        f"{LOG}\nKeyError: a\nKeyError: b",  # a list of errors
        f"<returncode>0</returncode>\n<output>\n{LOG}\nKeyError: a\n</output>",
        f"{LOG}\n{FAILURE}\n{LOG}",
        f"# How failures are answered\n{'Some words. ' * 30}\n```json\n{FAILURE}\n```",
        "Action movies are not valid for children",
        "The message was sent.",
        "Your order is on its way.",
        "The edit was applied.",
        "Changes were made to 3 files.",
        "File uploads work again since yesterday",
        "The tool call was made.",
        "An error occurred while I was paying with my card.",
        "There was an error in my order, please help.",
        "You do not have permission slips to sign this week.",
        "An error budget of 0.1 % is left for June.",
        "Error-free since May",
        "requests.exceptions.HTTPError is raised for an answer above 399.",
        "psql: 12 rows",
        "This plan is not valid for children.",
        "Missing persons: none",
        "page.goto opens a page.",
        "Search blocks are listed below.",
        "Message: your parcel has arrived.",
        "The code call centre is open.",
        "500 servers were found",
        "exit status 0",
        "v20.1.0",
        f"Job 7:\n{json.dumps({'job': 7, 'owner': 'Ann', 'status': 'failed'})}",
    ],
)
def test_a_text_that_only_looks_like_a_failure_is_none(text: str) -> None:
    assert classify(text)[0] is Outcome.OK


@each_row(
    "text",
    [
        "No changes made.",
        "Found 0 files",
        "There are no results.",
        "Search returned no results",
        "No relevant documents were found.",
        "We couldn't find any results",
        "Your search - a b - did not match any documents.",
        '{"hits": []}',
        "I could not find anything about that.",
        {"message": "No results found"},
        {"status": "success", "message": "No data"},
        {"organic_results": [], "took": 3},
        {"items": [], "next": None, "total_count": 0},
        {"hits": {"total": 0, "hits": []}},
    ],
)
def test_nothing_is_found_in_many_words(text: Any) -> None:
    assert classify(text)[0] is Outcome.EMPTY


@each_row(
    "answer",
    [
        {"detail": "Not authenticated"},
        {"message": "Error: cannot open the file"},
        {"success": "false", "message": "locked"},
        {"status": "unsuccessful", "reason": "locked"},
        "Could not apply the edit: the old text was not found",
        "No match for the search block in a.py",
        "Parsing error: no action found",
    ],
)
def test_a_failure_in_a_field_or_of_an_edit_is_a_failure(answer: Any) -> None:
    assert classify(answer)[0] is Outcome.FAILED


@each_row(
    "answer",
    [
        {"message": "Saved. No errors."},
        {"detail": "Chapter 4 is about errors."},
        {"text": "Error codes: E1 means that the disk is full."},
        {"success": "true", "message": "saved"},
        {"payment": 7, "status": "unsuccessful"},
        "The change has introduced a new dish to the menu.",
        "Please provide exactly what the customer asked for.",
        "Not authorized dealers sell it, too.",
        "Unknown Pleasures is an album of 1979.",
        "The service has reported an error rate of 2 %.",
        "Your message does not contain personal data.",
        "Access to the lake is free.",
        "Server errors: 3",
    ],
)
def test_a_field_or_a_sentence_that_only_looks_like_a_failure_is_none(answer: Any) -> None:
    assert classify(answer)[0] is Outcome.OK


@each_row(
    "text",
    [
        "No changes were made.",
        "No modifications have been made to the file.",
        "Nothing was changed.",
        "0 replacements made",
        "Replaced 0 occurrences of x in a.py",
        "The file was not modified.",
    ],
)
def test_an_edit_that_changes_nothing_is_an_empty_answer(text: str) -> None:
    assert classify(text)[0] is Outcome.EMPTY


def test_the_container_that_is_needed_is_no_item_that_is_missing() -> None:
    assert classify("Error response from daemon: No such container: web")[0] is Outcome.FAILED
    assert classify("Error: no such customer: Ann")[0] is Outcome.EMPTY


def test_a_reminder_is_cut_off_and_other_tags_stay() -> None:
    assert bare(f"{REMINDER}\ntext") == "text"
    assert bare(f"text\n{REMINDER}") == "text"
    assert bare("<html><body>text</body></html>") == "<html><body>text</body></html>"
    assert bare(f"before {REMINDER} after") == f"before {REMINDER} after"


def test_the_last_line_is_found_before_closing_tags_and_fences() -> None:
    assert last_line("a\nb: c\n```\n</output>\n\n") == "b: c"
    assert last_line("") == ""


@each_row(
    "text",
    [
        "{" * 16_000,
        "<system-reminder>" * 1_000,
        '{"error": "x", ' * 1_000,
        "Error" * 10_000,
        "your " + "action " * 10_000,
        'file "a", line 1 ' + "x" * 50_000,
        "\n" * 50_000 + "Error: x",
        "AError: " * 5_000,
    ],
)
def test_hostile_texts_are_read_in_bounded_time(text: str) -> None:
    assert cpu_seconds(lambda: classify(text)) < GENEROUS_S


GZIP = "find: 'gzip': No such file or directory\n"
DENIED = "find: '/root': Permission denied\nfind: '/proc/1/fd': Permission denied\n"


@each_row(
    "text",
    [
        GZIP * 20,
        GZIP * 8_000,
        "".join(f"grep: part-{n}: No such file or directory\n" for n in range(40)),
        "\n" + "tar: a: Cannot open: Permission denied\n" * 30,
    ],
)
def test_a_page_of_complaints_is_a_failure(text: str) -> None:
    assert classify(text)[0] is Outcome.FAILED


@each_row(
    "text",
    [
        f"{GZIP * 20}./a.txt\n{GZIP * 20}",
        f"{GZIP * 8_000}./a.txt\n",
        f"{LOG}\n{GZIP}" * 3,
        f"{DENIED * 20}/etc/a.conf\n{DENIED * 20}",
    ],
)
def test_output_between_complaints_is_a_result(text: str) -> None:
    assert classify(text)[0] is Outcome.OK


@each_row(
    "answer",
    [
        DENIED,
        DENIED * 20,
        {"output": DENIED, "returncode": 1},
        {"stdout": "", "stderr": DENIED, "exit_code": 1},
        {"error": DENIED},
    ],
)
def test_a_search_past_places_that_it_may_not_read_has_found_nothing(answer: Any) -> None:
    assert classify(answer)[0] is Outcome.EMPTY


@pytest.mark.parametrize("errors", [DENIED, "find: '/root': Permission denied\n"])
def test_what_such_a_search_finds_is_its_result(errors: str) -> None:
    assert classify({"stdout": "/etc/a.conf\n", "stderr": errors, "exit_code": 1})[0] is Outcome.OK


@each_row(
    "answer",
    [
        "find: '/root': Permission denied\n",  # all that was to be searched
        {"stdout": "", "stderr": "find: '/root': Permission denied\n", "exit_code": 1},
        "cat: /srv/a: Permission denied\ncat: /srv/b: Permission denied\n",
        f"{DENIED}find: '/nowhere': No such file or directory\n",
        {"stdout": "half a page", "stderr": "sed: a: Permission denied\n", "exit_code": 1},
    ],
)
def test_what_cannot_be_read_at_all_is_a_failure(answer: Any) -> None:
    assert classify(answer)[0] is Outcome.FAILED
