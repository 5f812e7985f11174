"""Made-up healthy work that looks like a loop: none of it may be stopped, nor a call of it refused.

"Five unchanged" is a call, five repeats with the same answer, and the seventh call, which finds the change.
"""

from shapes import Shapes, Steps, turn, user, work

HEALTHY = Shapes()
UNCHANGED = 6  # a call and five unchanged repeats

# ---- waiting
# ----------------------------------------------------------------------------------------------------------


@HEALTHY.of("polling with progress")
def polling_with_progress() -> Steps:
    for n in range(15):
        yield from turn(("check_job", {"id": 3}, {"state": "running", "percent": 6 * n}))


@HEALTHY.of("polling with progress")
def polling_every_percent() -> Steps:
    for n in range(101):
        yield from turn(("check_job", {"id": 3}, {"state": "running", "percent": n}))


@HEALTHY.of("polling without visible progress")
def five_unchanged_polls_then_done() -> Steps:
    for state in ["queued"] * UNCHANGED + ["done"]:
        yield from turn(("check_job", {"id": 3}, {"state": state}))


@HEALTHY.of("polling without visible progress")
def five_unchanged_polls_with_a_pause_then_done() -> Steps:
    for state in ["queued"] * UNCHANGED + ["done"]:
        yield from turn(("check_job", {"id": 3}, {"state": state}))
        yield from turn(("sleep", {"seconds": 5}, "slept"))


@HEALTHY.of("polling without visible progress")
def three_jobs_polled_in_turn() -> Steps:
    for state in ["queued"] * UNCHANGED + ["done"]:
        for job in "abc":
            yield from turn(("check_job", {"id": job}, {"state": state}))


@HEALTHY.of("polling without visible progress")
def six_jobs_polled_in_turn_with_a_pause() -> Steps:
    for state in ["queued"] * UNCHANGED + ["done"]:
        for job in "abcdef":
            yield from turn(("check_job", {"id": job}, {"state": state}))
        yield from turn(("sleep", {"seconds": 5}, "slept"))


@HEALTHY.of("polling without visible progress")
def three_jobs_polled_at_once() -> Steps:
    for state in ["queued"] * UNCHANGED + ["done"]:
        yield from turn(*(("check_job", {"id": job}, {"state": state}) for job in "abc"))


@HEALTHY.of("polling beyond, declared", {"check_job": {"polling": True}})
def fifty_unchanged_polls_in_eight_minutes() -> Steps:
    for n, state in enumerate(["queued"] * 50 + ["done"]):
        yield from turn(("check_job", {"id": 3}, {"state": state}), at=10.0 * n)


@HEALTHY.of("retry with back-off")
def retry_with_back_off() -> Steps:
    for n in range(UNCHANGED + 1):
        failed = n < UNCHANGED
        yield from turn(
            ("fetch", {"url": "https://example.org"}, "TimeoutError: timed out" if failed else "<html>"), raised=failed
        )
        yield from turn(("sleep", {"seconds": 2**n}, "slept"))


@HEALTHY.of("retry with back-off")
def retry_without_a_pause() -> Steps:
    for n in range(UNCHANGED + 1):
        failed = n < UNCHANGED
        yield from turn(
            ("fetch", {"url": "https://example.org"}, "TimeoutError: timed out" if failed else "<html>"), raised=failed
        )


@HEALTHY.of("retry with back-off")
def retry_of_a_busy_service() -> Steps:
    for n in range(UNCHANGED + 1):
        yield from turn(
            ("charge", {"order": 7}, {"error": "503 service unavailable"} if n < UNCHANGED else {"charged": True}),
            at=2.0**n,
        )


# ---- moving on
# --------------------------------------------------------------------------------------------------------


@HEALTHY.of("paging")
def paging_by_cursor() -> Steps:
    for n in range(15):
        yield from turn(("list_orders", {"cursor": n}, {"orders": [n * 10 + k for k in range(10)], "next": n + 1}))


@HEALTHY.of("paging")
def next_page_without_arguments() -> Steps:
    for n in range(15):
        yield from turn(("next_page", {}, f"page {n}: some new text about topic {n}"))


@HEALTHY.of("paging")
def many_pages_without_arguments() -> Steps:
    for n in range(130):
        yield from turn(("next_page", {}, " ".join(f"item{30 * n + k}" for k in range(30))))


@HEALTHY.of("paging")
def six_scrolls_with_a_bare_ack() -> Steps:
    for _ in range(UNCHANGED):
        yield from turn(("scroll_down", {}, "ok"))
    yield from work(3)


@HEALTHY.of("paging beyond, declared", {"scroll_down": {"paging": True}})
def forty_scrolls_with_a_bare_ack() -> Steps:
    for _ in range(40):
        yield from turn(("scroll_down", {}, "ok"))


# ---- many alike
# -------------------------------------------------------------------------------------------------------


@HEALTHY.of("batches")
def alternating_write_and_verify() -> Steps:
    for n in range(10):
        yield from turn(("set_flag", {"id": n}, "ok"))
        yield from turn(("get_flag", {"id": n}, {"flag": True}))


@HEALTHY.of("batches")
def flaky_batch() -> Steps:
    for n in range(24):
        yield from turn(("send", {"to": n}, {"error": "mailbox busy"} if n % 4 == 3 else {"sent": n}))


@HEALTHY.of("batches")
def fan_out_of_many_reads() -> Steps:
    yield from turn(*(("read", {"path": f"{n}"}, f"content {n}") for n in range(30)))
    yield from work(3)


@HEALTHY.of("batches")
def other_questions_same_answer() -> Steps:
    for n in range(12):
        yield from turn(
            (
                "is_allowed",
                {"action": f"a{n}"},
                {"allowed": True, "policy": "all staff may do this during office hours"},
            )
        )


@HEALTHY.of("constant ok")
def batch_with_constant_ok() -> Steps:
    for n in range(25):
        yield from turn(("update_row", {"id": n, "paid": True}, {"status": "ok"}))


@HEALTHY.of("fan-out of equal calls")
def fan_out_of_equal_calls() -> Steps:
    yield from turn(*(("roll_dice", {"sides": 6}, 4) for _ in range(6)))
    yield from work(3)


@HEALTHY.of("fan-out of equal calls")
def twenty_samples_at_once_in_each_of_three_rounds() -> Steps:
    for n in range(3):
        yield from turn(*(("sample", {"prompt": "a name"}, f"name {(n * k) % 7}") for k in range(20)))


@HEALTHY.of("lookup sweeps")
def lookup_sweep_with_many_not_found() -> Steps:
    for n in range(40):
        yield from turn(("find_customer", {"phone": f"555-{n:04}"}, "customer not found" if n < 39 else {"id": "C1"}))


@HEALTHY.of("lookup sweeps")
def lookup_sweep_with_empty_lists() -> Steps:
    for n in range(40):
        yield from turn(("search_flights", {"day": n}, [] if n < 39 else [{"flight": "X1"}]))


@HEALTHY.of("lookup sweeps")
def lookup_sweep_in_which_each_miss_is_named() -> Steps:
    for n in range(40):
        answer = (
            {"found": False, "message": f"no customer with phone 555-{n:04}"} if n < 39 else {"found": True, "id": "C1"}
        )
        yield from turn(("find_customer", {"phone": f"555-{n:04}"}, answer))


@HEALTHY.of("lookup sweeps")
def lookup_sweep_whose_misses_are_told_as_errors() -> Steps:
    for n in range(40):
        yield from turn(
            ("find_customer", {"phone": f"555-{n:04}"}, "Error: customer not found" if n < 39 else {"id": "C1"})
        )


@HEALTHY.of("todo updates")
def todo_updates() -> Steps:
    for n in range(12):
        yield from turn(("todo_write", {"done": n, "open": 12 - n}, "Todos have been updated."))
        yield from work(1, n)


# ---- again, and for a reason
# ------------------------------------------------------------------------------------------


@HEALTHY.of("edit-test-edit")
def edit_test_edit() -> Steps:
    for n in range(8):
        yield from turn(("edit", {"path": "a.py", "line": n}, f"applied change {n}"))
        yield from turn(("run_tests", {}, "Error: 1 failed, 11 passed" if n < 7 else "12 passed"))


@HEALTHY.of("edit-test-edit")
def twenty_edits_answered_alike_with_the_same_failing_test() -> Steps:
    for n in range(20):
        yield from turn(("edit", {"path": "a.py", "new": f"x = {n}"}, "The file has been updated."))
        yield from turn(
            (
                "run_tests",
                {},
                "FAILED test_a.py::test_x - assert 1 == 2\n1 failed, 11 passed" if n < 19 else "12 passed",
            )
        )


@HEALTHY.of("edit-test-edit")
def rereads_between_edits() -> Steps:
    for n in range(8):
        yield from turn(("read", {"path": "a.py"}, f"version {n}"))
        yield from turn(("edit", {"path": "a.py", "line": n}, "ok"))


@HEALTHY.of("flaky-test re-runs")
def flaky_test_until_it_passes() -> Steps:
    for n in range(UNCHANGED + 1):
        yield from turn(("run_tests", {}, "Error: 1 failed, 11 passed" if n < UNCHANGED else "12 passed"))


@HEALTHY.of("flaky-test re-runs")
def passing_test_run_six_times_to_be_sure() -> Steps:
    for _ in range(UNCHANGED):
        yield from turn(("run_tests", {}, "12 passed"))
    yield from work(3)


@HEALTHY.of("flaky-test re-runs")
def status_looks_between_work() -> Steps:
    for n in range(12):
        yield from turn(("git_status", {}, "nothing to commit"))
        yield from work(1, n)


@HEALTHY.of("re-reads after compaction")
def second_reading_of_the_same_files() -> Steps:
    yield from work(4)
    yield from work(4)
    yield from work(3, 10)


@HEALTHY.of("re-reads after compaction")
def all_files_again_after_each_of_three_compactions() -> Steps:
    for n in range(4):
        yield from work(30)
        yield from work(3, 40 + 3 * n)


@HEALTHY.of("debugging")
def seven_different_errors_then_success() -> Steps:
    words = [
        "unexpected indent",
        "name 'x' is not defined",
        "missing argument",
        "wrong shape",
        "no module",
        "bad operand",
        "empty range",
    ]
    for n, word in enumerate(words):
        yield from turn(("python", {"code": f"try_{n}()"}, f"Traceback (most recent call last): {word}"))
    yield from turn(("python", {"code": "solve()"}, "42"))


@HEALTHY.of("dialogue")
def same_lookup_after_each_user_turn() -> Steps:
    for n in range(7):
        yield user(f"and now? ({n})")
        yield from turn(("get_details", {"id": "L1"}, {"plan": "basic"}))
        yield from turn(text=f"answer {n}")


@HEALTHY.of("dialogue")
def same_words_to_an_insisting_user() -> Steps:
    for n in range(8):
        yield user(f"please make an exception ({n})")
        yield from turn(text="I am sorry, insurance cannot be added after the booking.")


@HEALTHY.of("dialogue")
def writer_and_critic() -> Steps:
    for n in range(12):
        yield from turn(text=f"draft {n} of the text", agent="writer")
        yield from turn(text="Needs more detail.", agent="critic")


@HEALTHY.of("dialogue")
def same_words_between_calls_that_bring_news() -> Steps:
    for n in range(12):
        yield from turn(text="Next speaker: surfer", agent="orchestrator")
        yield from turn(("browse", {"page": n}, f"page {n} about topic {n}"), agent="surfer")


# ---- told in other words
# ------------------------------------------------------------------------------------------------


@HEALTHY.of("polling with progress")
def polling_whose_progress_is_the_time_left() -> Steps:
    for n in range(15):
        yield from turn(("check_job", {"id": 3}, {"state": "running", "eta": f"00:{30 - 2 * n:02}:00"}))


@HEALTHY.of("lookup sweeps")
def lookup_sweep_told_as_errors_in_german() -> Steps:
    for n in range(20):
        answer = (
            {"status": "error", "error_message": f"Kunde {n} wurde nicht gefunden."}
            if n < 19
            else {"status": "success", "id": "C1"}
        )
        yield from turn(("kunde_suchen", {"telefon": f"555-{n:04}"}, answer))


@HEALTHY.of("lookup sweeps")
def free_slots_looked_for_among_taken_ones() -> Steps:
    for n in range(20):
        answer = {"success": False, "message": f"Slot {n}:00 is already booked."} if n < 19 else {"success": True}
        yield from turn(("book_slot", {"hour": n}, answer))


@HEALTHY.of("lookup sweeps")
def eight_codes_of_which_each_is_named_as_expired() -> Steps:
    for n in range(9):
        answer = {"success": False, "error": f"Coupon SAVE-{n:02} has expired"} if n < 8 else {"success": True}
        yield from turn(("apply_coupon", {"code": f"SAVE-{n:02}"}, answer))


@HEALTHY.of("batches")
def ids_drawn_one_after_another() -> Steps:
    for n in range(12):
        yield from turn(("new_id", {}, {"result": f"{n:08x}-1111-4222-8333-{n * 7919:012x}"}))
        yield from turn(("tag", {"item": n}, "ok"))


@HEALTHY.of("debugging")
def long_tracebacks_that_end_in_other_errors() -> Steps:
    frames = "Traceback (most recent call last):\n" + "".join(
        f'  File "app/layer_{k}.py", line {k}, in call\n    return inner()\n' for k in range(12)
    )
    for n, what in enumerate(
        (
            "KeyError: 'a'",
            "TypeError: not a number",
            "ValueError: empty",
            "IndexError: out of range",
            "AttributeError: no b",
            "OSError: full",
            "NameError: c",
        )
    ):
        yield from turn(("run", {"attempt": n}, frames + what))
    yield from turn(("run", {"attempt": 8}, "all passed"))


# ---- figures about errors
# ----------------------------------------------------------------------------------------------------------


@HEALTHY.of("figures about errors")
def error_rates_of_twenty_services() -> Steps:
    for n in range(20):
        yield from turn(("error_rate", {"service": f"service-{n}"}, f"Error rate: {0.13 * n:.2f} %"))


@HEALTHY.of("figures about errors")
def counts_of_invalid_records_in_twenty_files() -> Steps:
    for n in range(20):
        yield from turn(("validate", {"file": f"{n}.csv"}, f"Invalid records: {n % 4}"))


@HEALTHY.of("figures about errors")
def counts_of_errors_in_twenty_modules() -> Steps:
    for n in range(20):
        yield from turn(("lint", {"module": f"m{n}.py"}, {"module": f"m{n}.py", "errors": n % 5, "warnings": 2}))


@HEALTHY.of("figures about errors")
def the_error_of_twenty_models() -> Steps:
    for n in range(20):
        yield from turn(("train", {"rate": n / 100}, f"10 epochs\nerror: {1 / (n + 3):.4f}"))


@HEALTHY.of("figures about errors")
def the_usage_of_twenty_disks() -> Steps:
    for n in range(20):
        yield from turn(("disk", {"host": f"host-{n}"}, f"Usage: {40 + n} % of 512 GB"))
