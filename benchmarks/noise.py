"""Made-up loops that hide behind noise: counters, ids, other calls, spellings. And the work that looks like them."""

from shapes import Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
_CASES = ("refund policy", "Refund Policy", "REFUND POLICY", "refund\u200b policy", "\uff52efund policy")

# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("noise")
def two_calls_in_turn_with_a_counter_in_their_arguments() -> Steps:
    for n in range(40):
        tool = "search" if n % 2 else "read"
        yield from turn((tool, {"q": "refund", "request": f"r{n}"}, page(tool)))


@LOOPS.of("noise")
def one_long_answer_whatever_is_asked() -> Steps:
    for n in range(40):
        yield from turn(("ask_manual", {"question": f"how do I configure option {n}?"}, page("chapter one")))


@LOOPS.of("noise")
def one_question_in_other_letter_cases() -> Steps:
    for n in range(40):
        yield from turn(("search", {"q": _CASES[n % 5] + " " * (n % 3)}, page("policy")))


@LOOPS.of("noise")
def undeclared_arguments_around_one_question() -> Steps:
    for n in range(40):
        yield from turn(("get_account", {"id": 7, "reasoning": f"step {n}: I need the balance"}, page("account")))


@LOOPS.of("noise")
def circle_with_a_fifth_of_other_calls() -> Steps:
    for n in range(60):
        if n % 5 == 4:
            yield from turn(("look", {"at": n}, f"thing {n}"))
        else:
            yield from turn(("read_file", {"path": f"{n % 4}.py"}, page(n % 4)))


@LOOPS.of("noise")
def same_long_test_run_with_other_reads_between() -> Steps:
    for n in range(30):
        yield from turn(("run_tests", {}, page("1 failed")))
        yield from turn(("grep", {"pattern": f"name{n}"}, f"a.py:{n}: name{n}"))


@LOOPS.of("noise")
def plans_rewritten_without_action() -> Steps:
    for n in range(30):
        yield from turn(("update_plan", {"plan": [f"step {k}, version {n}" for k in range(5)]}, "Plan updated."))


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("noise")
def plan_updated_after_each_piece_of_work() -> Steps:
    for n in range(20):
        yield from turn(("update_plan", {"plan": [f"done {n}"]}, "Plan updated."))
        yield from work(1, n)


@HEALTHY.of("noise")
def many_rows_with_one_long_confirmation() -> Steps:
    """Each call changes something else, and the tool always says the same."""
    for n in range(25):
        yield from turn(("update_row", {"id": n}, "The row was updated. " + page("terms of use")))


@HEALTHY.of("noise")
def tests_run_between_edits_and_reads() -> Steps:
    for n in range(20):
        yield from turn(("grep", {"pattern": f"name{n}"}, f"a.py:{n}: name{n}"))
        yield from turn(("edit", {"path": "a.py", "line": n}, f"replaced line {n}"))
        yield from turn(("run_tests", {}, page("1 failed")))


@HEALTHY.of("noise")
def names_that_differ_in_letter_case_alone() -> Steps:
    for n, name in enumerate(["README", "readme", "Readme", "ReadMe", "rEADME", "readME"]):
        yield from turn(("stat", {"path": name}, {"path": name, "size": n}))
    yield from work(2)


@HEALTHY.of("noise")
def policy_looked_up_for_each_of_six_cases() -> Steps:
    for n in range(6):
        yield from turn(("policy_for", {"case": n}, page("the one policy")))
    yield from work(2)


@HEALTHY.of("noise")
def batch_with_a_counter_and_short_answers() -> Steps:
    for n in range(40):
        yield from turn(("write_cell" if n % 2 else "format_cell", {"cell": f"A{n}"}, "ok"))
