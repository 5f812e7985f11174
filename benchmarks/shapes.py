"""Small made-up runs: loops that should be ended, and healthy work that looks like them.

Each shape is a generator of steps (see ``replays.py``), named by its function; ``tools`` are the declarations that a user of such a
tool would make, and only RunGuard reads them.
"""

from collections.abc import Callable, Iterator
from typing import Any

Steps = Iterator[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"kind": "message", "agent": "user", "text": text}


def turn(*calls: tuple[str, dict[str, Any], Any], text: str = "", agent: str = "agent", raised: bool = False) -> Steps:
    """One model response with its calls ``(tool, args, answer)`` and their answers."""
    yield {"kind": "model", "agent": agent, "text": text, "tokens": 100}
    for number, (tool, args, _) in enumerate(calls):
        yield {"kind": "tool_call", "agent": agent, "tool": tool, "args": args, "call_id": str(number)}
    for number, (tool, _, answer) in enumerate(calls):
        yield {"kind": "error" if raised else "tool_result", "agent": agent, "tool": tool, "result": answer, "call_id": str(number)}


def work(count: int, start: int = 0) -> Steps:
    """Healthy work that brings news with every call."""
    for n in range(start, start + count):
        yield from turn(("read", {"path": f"src/part_{n}.py"}, f"def part_{n}(): return {n * n}"))


# ---- loops ----------------------------------------------------------------------------------------------------------


def same_call_same_answer() -> Steps:
    for _ in range(12):
        yield from turn(("get_user", {"uid": 1}, {"name": "Ann"}))


def answer_with_a_clock() -> Steps:
    for n in range(12):
        yield from turn(("get_order", {"id": 7}, {"state": "unknown", "checked": f"2031-05-04T10:{n:02}:00Z"}))


def answer_with_request_id_and_duration() -> Steps:
    for n in range(12):
        yield from turn(("search", {"q": "refund"}, f"request_id: a{n}f3\nno policy matches; took {20 + n} ms"))


def arguments_in_other_words() -> Steps:
    """The same call: key order, 1.0 for 1, an absent default, blanks."""
    spellings = [{"q": "a b", "page": 1}, {"page": 1.0, "q": "a b"}, {"q": " a  b", "page": 1}, {"q": "a b", "page": 1, "lang": None}]
    for n in range(12):
        yield from turn(("search", spellings[n % 4], {"hits": ["x"]}))


def ping_pong_of_two_calls() -> Steps:
    for n in range(24):
        yield from turn(("read", {"path": "ab"[n % 2]}, f"content of {'ab'[n % 2]}"))


def circle_of_three_calls() -> Steps:
    for n in range(24):
        yield from turn((["list", "stat", "read"][n % 3], {}, f"answer {n % 3}"))


def circle_of_seven_calls() -> Steps:
    for n in range(35):
        yield from turn(("read", {"path": str(n % 7)}, f"content {n % 7}"))


def same_failure_new_arguments() -> Steps:
    for n in range(12):
        yield from turn(("parse", {"fragment": f"f{n}", "hint": n}, {"status": "partial_parse_error", "data": None}))


def same_failure_other_particulars() -> Steps:
    for n in range(12):
        yield from turn(("read", {"path": f"/tmp/x{n}"}, f"Error: permission denied for '/tmp/x{n}' (uid {1000 + n})"))


def every_time_another_error() -> Steps:
    words = ["bad token", "missing key", "wrong shape", "no socket", "stale handle", "odd length", "unknown unit"]
    for n in range(21):
        yield from turn(("convert", {"n": n}, f"Error: {words[n % 7]} {'in header' * (n % 3)}"))


def tool_raises_again_and_again() -> Steps:
    for n in range(12):
        yield from turn(("fetch", {"url": f"https://example.org/{n}"}, "ConnectionError: refused"), raised=True)


def unknown_tool() -> Steps:
    for n in range(12):
        yield from turn(("delete_everything", {"n": n}, "Tool 'delete_everything' not found. Available: read, write"), raised=True)


def same_batch_again() -> Steps:
    for _ in range(12):
        yield from turn(*(("read", {"path": p}, f"content of {p}") for p in "abc"))


def same_batch_in_another_order() -> Steps:
    for n in range(12):
        yield from turn(*(("read", {"path": p}, f"content of {p}") for p in ("abc" if n % 2 else "cab")))


def edit_that_never_applies() -> Steps:
    for n in range(12):
        yield from turn(("edit", {"path": "a.py", "old": f"line {n}"}, "Error: old_string not found in file"))
        yield from turn(("read", {"path": "a.py"}, "x = 1"))


def check_again_after_done() -> Steps:
    yield from work(5)
    for _ in range(12):
        yield from turn(("run_tests", {}, "12 passed"))


def stall_after_long_work() -> Steps:
    yield from work(60)
    for _ in range(12):
        yield from turn(("submit", {}, "Submission refused: checklist incomplete"))


def busy_waiting_with_a_counter() -> Steps:
    for n in range(60):
        yield from turn(("queue", {}, {"waiting": True, "asked_times": n}))


def rephrased_search_finds_nothing() -> Steps:
    for n in range(20):
        yield from turn(("search", {"q": f"wording {n}"}, "No results found."))


def failing_call_between_equal_reads() -> Steps:
    for _ in range(12):
        yield from turn(("read", {"path": "conf"}, "port=1"))
        yield from turn(("restart", {}, {"ok": False, "message": "port is busy"}))


def agents_hand_over_in_a_circle() -> Steps:
    for n in range(24):
        here, there = ("sales", "billing") if n % 2 else ("billing", "sales")
        yield from turn(("transfer_to_agent", {"agent_name": there}, None), agent=here)


def same_sentence_without_a_call() -> Steps:
    """No tool call at all: RunGuard has no rule on words."""
    for _ in range(15):
        yield from turn(text="I am still working on it. Please wait.")


# ---- healthy work that looks like a loop ----------------------------------------------------------------------------


def polling_with_progress() -> Steps:
    for n in range(15):
        yield from turn(("check_job", {"id": 3}, {"state": "running", "percent": 6 * n}))


def three_unchanged_polls_then_done() -> Steps:
    for state in ["queued"] * 3 + ["done"]:
        yield from turn(("check_job", {"id": 3}, {"state": state}))


def five_unchanged_polls_then_done() -> Steps:
    for state in ["queued"] * 5 + ["done"]:
        yield from turn(("check_job", {"id": 3}, {"state": state}))


def five_unchanged_polls_declared() -> Steps:
    yield from five_unchanged_polls_then_done()


def paging_by_cursor() -> Steps:
    for n in range(15):
        yield from turn(("list_orders", {"cursor": n}, {"orders": [n * 10 + k for k in range(10)], "next": n + 1}))


def next_page_without_arguments() -> Steps:
    for n in range(15):
        yield from turn(("next_page", {}, f"page {n}: some new text about topic {n}"))


def scrolling_with_a_bare_ack_declared() -> Steps:
    for _ in range(8):
        yield from turn(("scroll_down", {}, "ok"))


def batch_with_constant_ok() -> Steps:
    for n in range(25):
        yield from turn(("update_row", {"id": n, "paid": True}, {"status": "ok"}))


def edit_test_edit() -> Steps:
    for n in range(8):
        yield from turn(("edit", {"path": "a.py", "line": n}, f"applied change {n}"))
        yield from turn(("run_tests", {}, "Error: 1 failed, 11 passed" if n < 7 else "12 passed"))


def fan_out_of_equal_calls() -> Steps:
    yield from turn(*(("roll_dice", {"sides": 6}, 4) for _ in range(6)))
    yield from work(3)


def fan_out_of_many_reads() -> Steps:
    yield from turn(*(("read", {"path": f"{n}"}, f"content {n}") for n in range(30)))
    yield from work(3)


def lookup_sweep_with_many_not_found() -> Steps:
    for n in range(14):
        yield from turn(("find_customer", {"phone": f"555-{n:04}"}, "customer not found" if n < 13 else {"id": "C1"}))


def todo_updates() -> Steps:
    for n in range(12):
        yield from turn(("todo_write", {"done": n, "open": 12 - n}, "Todos have been updated."))
        yield from work(1, n)


def rereads_between_edits() -> Steps:
    for n in range(8):
        yield from turn(("read", {"path": "a.py"}, f"version {n}"))
        yield from turn(("edit", {"path": "a.py", "line": n}, "ok"))


def status_looks_between_work() -> Steps:
    for n in range(12):
        yield from turn(("git_status", {}, "nothing to commit"))
        yield from work(1, n)


def retry_with_back_off() -> Steps:
    for n in range(4):
        yield from turn(("fetch", {"url": "https://example.org"}, "TimeoutError: timed out" if n < 3 else "<html>"), raised=n < 3)
        yield from turn(("sleep", {"seconds": 2**n}, "slept"))


def seven_different_errors_then_success() -> Steps:
    words = ["unexpected indent", "name 'x' is not defined", "missing argument", "wrong shape", "no module", "bad operand", "empty range"]
    for n, word in enumerate(words):
        yield from turn(("python", {"code": f"try_{n}()"}, f"Traceback (most recent call last): {word}"))
    yield from turn(("python", {"code": "solve()"}, "42"))


def same_lookup_after_each_user_turn() -> Steps:
    for n in range(7):
        yield user(f"and now? ({n})")
        yield from turn(("get_details", {"id": "L1"}, {"plan": "basic"}))
        yield from turn(text=f"answer {n}")


def second_reading_of_the_same_files() -> Steps:
    yield from work(4)
    yield from work(4)
    yield from work(3, 10)


def other_questions_same_answer() -> Steps:
    for n in range(12):
        yield from turn(("is_allowed", {"action": f"a{n}"}, {"allowed": True, "policy": "all staff may do this during office hours"}))


def flaky_batch() -> Steps:
    for n in range(24):
        yield from turn(("send", {"to": n}, {"error": "mailbox busy"} if n % 4 == 3 else {"sent": n}))


def alternating_write_and_verify() -> Steps:
    for n in range(10):
        yield from turn(("set_flag", {"id": n}, "ok"))
        yield from turn(("get_flag", {"id": n}, {"flag": True}))


def _all(first: str, last: str) -> dict[str, Callable[[], Steps]]:
    names = list(globals())
    return {name.replace("_", " "): globals()[name] for name in names[names.index(first) : names.index(last) + 1]}


LOOPS = _all("same_call_same_answer", "same_sentence_without_a_call")
HEALTHY = _all("polling_with_progress", "alternating_write_and_verify")
DECLARED: dict[str, dict[str, dict[str, bool]]] = {
    "five unchanged polls declared": {"check_job": {"polling": True}},
    "scrolling with a bare ack declared": {"scroll_down": {"paging": True}},
}
