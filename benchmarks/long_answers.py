"""Made-up runs about long answers: files, reports, pages. Reading one twice is rarely a wait for something."""

from typing import Any

from shapes import Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
UNCHANGED = 6  # a call and five unchanged repeats


def _read(name: object, version: object = "") -> tuple[str, dict[str, Any], Any]:
    return "read_file", {"path": f"src/{name}.py"}, page(f"{name}{version}")


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("cycles of long answers")
def two_long_files_in_turn() -> Steps:
    for n in range(14):
        yield from turn(_read("ab"[n % 2]))


@LOOPS.of("cycles of long answers")
def eight_long_files_in_a_circle() -> Steps:
    for n in range(32):
        yield from turn(_read(n % 8))


@LOOPS.of("cycles of long answers")
def twenty_long_files_in_a_circle() -> Steps:
    for n in range(40):
        yield from turn(_read(n % 20))


@LOOPS.of("cycles of long answers")
def long_files_in_a_circle_with_a_new_one_now_and_then() -> Steps:
    for n in range(36):
        yield from turn(_read(f"new{n}" if n % 9 == 8 else n % 4))


@LOOPS.of("cycles of long answers")
def listing_and_file_in_turn_with_short_looks_between() -> Steps:
    for n in range(30):
        looks: list[tuple[str, dict[str, Any], Any]] = [
            ("pwd", {}, "/srv/app"),
            ("ls", {"path": "src"}, page("list")),
            _read("main"),
        ]
        yield from turn(looks[n % 3])


@LOOPS.of("cycles of long answers")
def same_long_files_read_in_batches() -> Steps:
    for n in range(20):
        yield from turn(*(_read(f"{n % 4}{k}") for k in range(3)))


@LOOPS.of("cycles of long answers")
def long_search_and_long_page_after_real_work() -> Steps:
    yield from work(20)
    for n in range(16):
        yield from turn([("search", {"q": "refund"}, page("hits")), ("open", {"url": "a"}, page("a"))][n % 2])


@LOOPS.of("cycles of long answers")
def long_report_in_a_circle_of_random_order() -> Steps:
    for n in range(44):
        yield from turn(_read(n * n * 7 % 11))


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("re-reads after compaction")
def long_files_again_after_each_of_three_compactions() -> Steps:
    """The prompt shrinks where the history was compacted: what was read before is gone."""
    for compaction in range(4):
        size = 2_000
        for n in range(25):
            yield from turn(_read(n), prompt=size)
            size += 500
        yield from turn(("edit", {"path": "src/0.py", "new": f"x = {compaction}"}, "ok"), prompt=size)


@HEALTHY.of("re-reads after compaction")
def long_files_again_at_once_after_a_compaction() -> Steps:
    for size in (2_000, 1_500):
        for n in range(16):
            yield from turn(_read(n), prompt=size + 500 * n)


@HEALTHY.of("re-reads after compaction")
def four_long_files_read_a_second_time() -> Steps:
    for _ in range(2):
        for n in range(4):
            yield from turn(_read(n))
    yield from work(3)


@HEALTHY.of("re-reads after compaction")
def nine_long_files_read_a_second_time_before_the_change() -> Steps:
    for _ in range(2):
        for n in range(9):
            yield from turn(_read(n))
    yield from turn(("edit", {"path": "src/0.py", "new": "x = 1"}, "ok"))
    yield from work(3)


@HEALTHY.of("edit-test-edit")
def edit_test_edit_with_a_long_report() -> Steps:
    for n in range(20):
        yield from turn(("edit", {"path": "a.py", "new": f"x = {n}"}, "The file has been updated."))
        yield from turn(("run_tests", {}, page("1 failed") if n < 19 else "12 passed"))


@HEALTHY.of("edit-test-edit")
def edit_and_two_long_reports_that_stay_the_same() -> Steps:
    for n in range(15):
        yield from turn(("edit", {"path": "a.py", "new": f"x = {n}"}, "The file has been updated."))
        yield from turn(("run_tests", {}, page("1 failed")))
        yield from turn(("lint", {}, page("3 warnings")))
    yield from work(1)


@HEALTHY.of("edit-test-edit")
def one_long_file_reviewed_between_edits_of_another() -> Steps:
    for n in range(15):
        yield from turn(_read("specification"))
        yield from turn(("edit", {"path": "a.py", "line": n}, f"replaced line {n}"))
        yield from turn(_read("a", n))


@HEALTHY.of("edit-test-edit")
def three_long_files_compared_with_every_new_translation() -> Steps:
    for n in range(10):
        yield from turn(_read("glossary"), _read("style"), ("translate", {"part": n}, page(f"part {n}")))


@HEALTHY.of("polling without visible progress")
def five_unchanged_polls_of_a_long_status() -> Steps:
    status = {"job": 3, "stages": [{"stage": f"stage {n}", "state": "queued", "host": f"h{n}"} for n in range(12)]}
    for _ in range(UNCHANGED):
        yield from turn(("pipeline_status", {"id": 3}, status))
    yield from turn(("pipeline_status", {"id": 3}, {**status, "done": True}))


@HEALTHY.of("polling with progress")
def long_status_in_which_one_number_moves() -> Steps:
    for n in range(15):
        stages = [{"stage": f"stage {k}", "percent": 6 * n if k == 4 else 0} for k in range(12)]
        yield from turn(("pipeline_status", {"id": 3}, {"job": 3, "stages": stages}))


@HEALTHY.of("polling without visible progress")
def five_unchanged_polls_of_a_long_status_with_pauses() -> Steps:
    status = {"job": 3, "stages": [{"stage": f"stage {n}", "state": "queued", "host": f"h{n}"} for n in range(12)]}
    for n in range(UNCHANGED + 1):
        yield from turn(("pipeline_status", {"id": 3}, status if n < UNCHANGED else {**status, "done": True}))
        yield from turn(("sleep", {"seconds": 30}, "slept"))


@HEALTHY.of("paging")
def long_pages_by_cursor_from_an_index_that_is_looked_up_each_time() -> Steps:
    for n in range(20):
        yield from turn(("index", {}, page("index")))
        yield from turn(("page", {"number": n}, page(n)))


@HEALTHY.of("flaky-test re-runs")
def flaky_test_with_a_long_report_until_it_passes() -> Steps:
    for n in range(UNCHANGED + 1):
        yield from turn(("run_tests", {}, page("1 failed") if n < UNCHANGED else "12 passed"))


@HEALTHY.of("status looks")
def long_listing_between_new_files() -> Steps:
    for n in range(25):
        yield from turn(("write_file", {"path": f"out/{n}.md", "text": page(n)}, "written"))
        yield from turn(("read_plan", {}, page("plan")))
