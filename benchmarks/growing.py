"""Made-up edits that grow, and long calls that resemble each other for a good reason."""

from shapes import Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()


@LOOPS.of("growing edits")
def one_file_written_again_with_another_line() -> Steps:
    for n in range(30):
        body = page("report") + " ".join(f" added line {k}." for k in range(n))
        yield from turn(("write_file", {"path": "report.md", "text": body}, f"wrote {len(body)} bytes"))


@LOOPS.of("growing edits")
def one_query_with_another_condition_each_time() -> Steps:
    for n in range(30):
        query = page("select") + f" AND total > {n}"
        yield from turn(("sql", {"query": query}, f"{n} rows"))


@HEALTHY.of("growing edits")
def eight_drafts_of_one_text() -> Steps:
    for n in range(8):
        body = page("essay") + f" Ending number {n}."
        yield from turn(("write_file", {"path": "essay.md", "text": body}, f"wrote {len(body)} bytes"))
    yield from work(2)


@HEALTHY.of("growing edits")
def one_letter_to_each_of_thirty_people() -> Steps:
    for n in range(30):
        yield from turn(("send_mail", {"to": f"p{n}@example.org", "text": f"Dear {n}, " + page("offer")}, f"sent {n}"))


@HEALTHY.of("growing edits")
def long_files_that_share_a_licence() -> Steps:
    for n in range(20):
        body = page("licence") + " " + page(f"module {n}", 60)
        yield from turn(("write_file", {"path": f"m{n}.py", "text": body}, "written"))


@HEALTHY.of("growing edits")
def script_mended_between_test_runs() -> Steps:
    for n in range(10):
        yield from turn(("write_file", {"path": "a.py", "text": page("script") + f" fix {n}"}, "written"))
        yield from turn(("run_tests", {}, f"failed at line {n}" if n < 9 else "passed"))
