"""Made-up loops: each should be ended, or at least be told to the model. Long enough for late rungs."""

from shapes import Shapes, Steps, turn, work

LOOPS = Shapes()


@LOOPS.of("the same call")
def same_call_same_answer() -> Steps:
    for _ in range(12):
        yield from turn(("get_user", {"uid": 1}, {"name": "Ann"}))


@LOOPS.of("the same call")
def answer_with_a_clock() -> Steps:
    for n in range(12):
        yield from turn(("get_order", {"id": 7}, {"state": "unknown", "checked": f"2031-05-04T10:{n:02}:00Z"}))


@LOOPS.of("the same call")
def answer_with_request_id_and_duration() -> Steps:
    for n in range(12):
        yield from turn(("search", {"q": "refund"}, f"request_id: a{n}f3\nno policy matches; took {20 + n} ms"))


@LOOPS.of("the same call")
def arguments_in_other_words() -> Steps:
    """The same call: key order, 1.0 for 1, an absent default, blanks."""
    spellings = [
        {"q": "a b", "page": 1},
        {"page": 1.0, "q": "a b"},
        {"q": " a  b", "page": 1},
        {"q": "a b", "page": 1, "lang": None},
    ]
    for n in range(12):
        yield from turn(("search", spellings[n % 4], {"hits": ["x"]}))


@LOOPS.of("circles")
def ping_pong_of_two_calls() -> Steps:
    for n in range(24):
        yield from turn(("read", {"path": "ab"[n % 2]}, f"content of {'ab'[n % 2]}"))


@LOOPS.of("circles")
def circle_of_three_calls() -> Steps:
    for n in range(24):
        yield from turn((["list", "stat", "read"][n % 3], {}, f"answer {n % 3}"))


@LOOPS.of("circles")
def circle_of_seven_calls() -> Steps:
    for n in range(56):
        yield from turn(("read", {"path": str(n % 7)}, f"content {n % 7}"))


@LOOPS.of("failures")
def same_failure_new_arguments() -> Steps:
    for n in range(12):
        yield from turn(("parse", {"fragment": f"f{n}", "hint": n}, {"status": "partial_parse_error", "data": None}))


@LOOPS.of("failures")
def same_failure_other_particulars() -> Steps:
    for n in range(12):
        yield from turn(("read", {"path": f"/tmp/x{n}"}, f"Error: permission denied for '/tmp/x{n}' (uid {1000 + n})"))


@LOOPS.of("failures")
def every_time_another_error() -> Steps:
    words = ["bad token", "missing key", "wrong shape", "no socket", "stale handle", "odd length", "unknown unit"]
    for n in range(21):
        yield from turn(("convert", {"n": n}, f"Error: {words[n % 7]} {'in header' * (n % 3)}"))


@LOOPS.of("failures")
def tool_raises_again_and_again() -> Steps:
    for n in range(12):
        yield from turn(("fetch", {"url": f"https://example.org/{n}"}, "ConnectionError: refused"), raised=True)


@LOOPS.of("failures")
def unknown_tool() -> Steps:
    for n in range(12):
        yield from turn(
            ("delete_everything", {"n": n}, "Tool 'delete_everything' not found. Available: read, write"), raised=True
        )


@LOOPS.of("the same call")
def same_batch_again() -> Steps:
    for _ in range(12):
        yield from turn(*(("read", {"path": p}, f"content of {p}") for p in "abc"))


@LOOPS.of("the same call")
def same_batch_in_another_order() -> Steps:
    for n in range(12):
        yield from turn(*(("read", {"path": p}, f"content of {p}") for p in ("abc" if n % 2 else "cab")))


@LOOPS.of("failures")
def edit_that_never_applies() -> Steps:
    for n in range(12):
        yield from turn(("edit", {"path": "a.py", "old": f"line {n}"}, "Error: old_string not found in file"))
        yield from turn(("read", {"path": "a.py"}, "x = 1"))


@LOOPS.of("the same call")
def check_again_after_done() -> Steps:
    yield from work(5)
    for _ in range(12):
        yield from turn(("run_tests", {}, "12 passed"))


@LOOPS.of("failures")
def stall_after_long_work() -> Steps:
    yield from work(60)
    for _ in range(12):
        yield from turn(("submit", {}, "Submission refused: checklist incomplete"))


@LOOPS.of("the same call")
def busy_waiting_with_a_counter() -> Steps:
    for n in range(150):
        yield from turn(("queue", {}, {"waiting": True, "asked_times": n}))


@LOOPS.of("nothing found")
def rephrased_search_finds_nothing() -> Steps:
    for n in range(20):
        yield from turn(("search", {"q": f"wording {n}"}, "No results found."))


@LOOPS.of("circles")
def failing_call_between_equal_reads() -> Steps:
    for _ in range(12):
        yield from turn(("read", {"path": "conf"}, "port=1"))
        yield from turn(("restart", {}, {"ok": False, "message": "port is busy"}))


@LOOPS.of("agents")
def agents_hand_over_in_a_circle() -> Steps:
    for n in range(24):
        here, there = ("sales", "billing") if n % 2 else ("billing", "sales")
        yield from turn(("transfer_to_agent", {"agent_name": there}, None), agent=here)


@LOOPS.of("words")
def same_sentence_without_a_call() -> Steps:
    for _ in range(20):
        yield from turn(text="I am still working on it. Please wait.")


@LOOPS.of("words")
def two_agents_with_the_same_phrases() -> Steps:
    for _ in range(15):
        yield from turn(text="Could you check the order?", agent="sales")
        yield from turn(text="Please ask sales about that.", agent="billing")


@LOOPS.of("failures")
def thoughts_between_equal_failures() -> Steps:
    for n in range(12):
        yield from turn(("think", {"thought": f"perhaps it helps to ask for part {n}"}, "noted"))
        yield from turn(("parse", {"part": n}, {"status": "partial_parse_error", "data": None}))


@LOOPS.of("failures")
def status_codes_of_a_server_that_is_down() -> Steps:
    for n in range(12):
        yield from turn(("fetch", {"query": f"report {n}"}, {"statusCode": 503, "body": "upstream connect error"}))


@LOOPS.of("the same call")
def answer_with_its_execution_time() -> Steps:
    for n in range(12):
        yield from turn(("query", {"sql": "SELECT 1"}, {"rows": [[1]], "execution_time_ms": 11.7 + n}))


@LOOPS.of("the same call")
def another_attempt_each_time() -> Steps:
    for n in range(12):
        yield from turn(("run", {"command": "make", "attempt": n}, "nothing to be done"))
