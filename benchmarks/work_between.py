"""Made-up loops that go on between good answers: one tool fails or finds nothing while others work; and healthy work
with the same look.
"""

from shapes import WORDS, Shapes, Steps, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
_FAILED = {"status": "partial_parse_error", "data": None}

# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("work between")
def validation_that_fails_alike_after_every_edit() -> Steps:
    for n in range(60):
        yield from turn(("edit", {"path": "a.yaml", "line": n}, f"replaced line {n}"))
        yield from turn(("validate", {"path": "a.yaml"}, f"checked {n} keys\nError: 'name' is a required property"))


@LOOPS.of("work between")
def build_that_fails_alike_after_reads_and_edits() -> Steps:
    for n in range(60):
        yield from work(1, n)
        yield from turn(("edit", {"path": "a.c", "line": n}, f"replaced line {n}"))
        yield from turn(("build", {}, {"exit_code": 2, "stdout": f"part {n}", "stderr": "undefined reference to run"}))


@LOOPS.of("work between")
def check_that_ends_alike_after_a_log_in_other_words() -> Steps:
    for n in range(60):
        yield from turn(("edit", {"path": "a.yaml", "line": n}, f"replaced line {n}"))
        log = "\n".join(f"read the {WORDS[(n + k) % 16]} of {WORDS[(5 * n + k) % 16]}" for k in range(4))
        yield from turn(("check", {"path": "a.yaml"}, f"{log}\nCheckError: 'name' is a required property"))


@LOOPS.of("work between")
def parser_that_repeats_its_question_while_the_search_brings_news() -> Steps:
    for n in range(60):
        question = f"{WORDS[n % 16]} of {WORDS[3 * n % 16]} {n}"
        yield from turn(("search", {"q": f"fragment {n}"}, f"fragment {n} has {n * n} words"))
        yield from turn(("parse", {"hint": question}, {"status": "partial_parse_error", "hint": question}))


@LOOPS.of("work between")
def parser_that_fails_while_the_search_brings_news() -> Steps:
    for n in range(120):
        yield from turn(("search", {"q": f"fragment {n}"}, f"fragment {n} has {n * n} words"))
        yield from turn(("parse", {"fragment": f"f{n}", "hint": n}, _FAILED))


@LOOPS.of("work between")
def two_parsers_that_fail_while_the_search_brings_news() -> Steps:
    for n in range(120):
        yield from turn(("search", {"q": f"fragment {n}"}, f"fragment {n} has {n * n} words"))
        yield from turn((("parse", "read_table")[n % 2], {"fragment": f"f{n}"}, _FAILED))


@LOOPS.of("work between")
def one_forbidden_service_asked_beside_good_ones() -> Steps:
    for n in range(100):
        calls = [("weather", {"day": n}, f"{n % 30} degrees"), ("tides", {"day": n}, {"error": "403 forbidden"})]
        yield from turn(*calls)


@LOOPS.of("nothing found")
def empty_lists_to_ever_new_questions() -> Steps:
    for n in range(130):
        yield from turn(("search", {"q": f"wording {n}"}, {"results": []}))


@LOOPS.of("nothing found")
def no_results_to_ever_new_questions() -> Steps:
    for n in range(130):
        yield from turn(("search", {"q": f"wording {n}"}, "No results found."))


@LOOPS.of("nothing found")
def empty_answers_of_two_searches_in_turn() -> Steps:
    for n in range(260):
        yield from turn((("search", "search_archive")[n % 2], {"q": f"wording {n}"}, {"results": []}))


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("lookup sweeps")
def batch_in_which_most_lookups_are_rightly_empty() -> Steps:
    for n in range(200):
        yield from turn(("find_invoice", {"id": n}, {"results": [] if n % 15 else [{"id": n}]}))


@HEALTHY.of("lookup sweeps")
def ninety_days_without_a_free_flight() -> Steps:
    for n in range(90):
        yield from turn(("search_flights", {"day": n}, {"results": [] if n < 89 else ["X1"]}))


@HEALTHY.of("lookup sweeps")
def empty_lookups_of_parallel_calls() -> Steps:
    for part in range(12):
        yield from turn(*(("find", {"id": n}, []) for n in range(20 * part, 20 * part + 20)))
    yield from work(2)


@HEALTHY.of("batches")
def forty_closed_pages_each_written_down() -> Steps:
    for n in range(40):
        yield from turn(("fetch", {"url": f"https://example.org/{n}"}, {"error": "403 forbidden"}))
        yield from turn(("note_result", {"page": n}, f"row {n} is written"))


@HEALTHY.of("batches")
def tool_that_fails_in_a_third_of_its_calls_while_others_work() -> Steps:
    for n in range(90):
        yield from turn(("convert", {"n": n}, {"error": "unsupported codec"} if n % 3 == 0 else {"converted": n}))
        yield from turn(("upload", {"n": n}, f"uploaded {n * n}"))


@HEALTHY.of("batches")
def import_in_which_every_other_row_is_refused() -> Steps:
    for n in range(60):
        yield from turn(("insert", {"row": n}, {"error": "duplicate key"} if n % 2 else {"inserted": n}))


@HEALTHY.of("batches")
def import_in_which_every_other_row_is_refused_by_name() -> Steps:
    for n in range(200):
        refused = {"error": f"row customer-{n} is a duplicate"}
        yield from turn(("insert", {"row": f"customer-{n}"}, refused if n % 2 else {"inserted": n}))
        yield from turn(("log", {"row": n}, f"line {n * n}"))


@HEALTHY.of("edit-test-edit")
def deployment_that_fails_alike_eight_times_between_fixes() -> Steps:
    for n in range(9):
        yield from turn(("edit", {"path": "app.yaml", "line": n}, f"replaced line {n}"))
        answer = {"exit_code": 2, "stdout": "", "stderr": "health check failed"}
        yield from turn(("deploy", {"version": n}, answer if n < 8 else {"exit_code": 0, "stdout": "is up"}))


@HEALTHY.of("edit-test-edit")
def forty_edits_with_one_failing_test() -> Steps:
    for n in range(40):
        yield from turn(("edit", {"path": "a.py", "new": f"x = {n}"}, f"applied change {n}"))
        yield from turn(("run_tests", {"path": "tests"}, "Error: test_x failed: 1 != 2" if n < 39 else "12 passed"))


@HEALTHY.of("edit-test-edit")
def search_for_the_commit_that_broke_a_test() -> Steps:
    for n in range(14):
        yield from turn(("checkout", {"commit": f"{n * 7919:07x}"}, f"HEAD is now at {n * 7919:07x}"))
        yield from turn(("run_tests", {}, "Error: test_x failed" if n % 3 else "12 passed"))


@HEALTHY.of("debugging")
def twenty_attempts_at_a_program_with_looks_at_the_manual() -> Steps:
    for n in range(20):
        yield from turn(("read_manual", {"page": n}, f"page {n} about {WORDS[n % 16]}"))
        answer = {"exit_code": 2, "stdout": "", "stderr": f"type {WORDS[n % 16]} does not fit"}
        yield from turn(("compile", {"code": f"version {n}"}, answer if n < 19 else {"exit_code": 0, "stdout": "ok"}))
