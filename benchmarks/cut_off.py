"""Made-up runs about calls whose arguments did not arrive, and rejected calls that are mended."""

from shapes import Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
MISSING = (
    "Invoking `write_file()` failed as the following mandatory input parameters are not present:\npath\ntext\n"
    "You could retry calling this tool, but it is IMPORTANT for you to provide all the mandatory parameters."
)


@LOOPS.of("cut-off arguments")
def empty_arguments_again_and_again() -> Steps:
    for _ in range(13):
        yield from turn(("write_file", {}, {"error": MISSING}))


@LOOPS.of("cut-off arguments")
def one_argument_of_two_again_and_again() -> Steps:
    for n in range(13):
        yield from turn(("write_file", {"path": f"report{n % 2}.md"}, {"error": MISSING.replace("path\n", "")}))


@LOOPS.of("cut-off arguments")
def empty_arguments_with_thoughts_between() -> Steps:
    for n in range(13):
        yield from turn(("think", {"thought": f"I will write part {n} now"}, "noted"))
        yield from turn(("write_file", {}, "ValidationError: 2 validation errors: path Field required"))


@HEALTHY.of("cut-off arguments")
def four_rejected_calls_then_smaller_ones() -> Steps:
    for _ in range(4):
        yield from turn(("write_file", {}, {"error": MISSING}))
    for n in range(6):
        yield from turn(("write_file", {"path": f"part{n}.md", "text": page(n)}, "written"))


@HEALTHY.of("cut-off arguments")
def a_rejected_call_now_and_then() -> Steps:
    for n in range(8):
        yield from turn(("write_file", {}, {"error": MISSING}))
        yield from turn(("write_file", {"path": f"part{n}.md", "text": page(n)}, "written"))
    yield from work(2)


@HEALTHY.of("cut-off arguments")
def debugged_code_that_lacks_an_argument() -> Steps:
    for n in range(8):
        yield from turn(("edit", {"path": "a.py", "new": f"def f(x{n}): ..."}, "ok"))
        answer = "TypeError: f() missing 1 required positional argument: 'x'" if n < 7 else "42"
        yield from turn(("python", {"code": f"f()  # {n}"}, answer))
