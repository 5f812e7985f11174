"""Made-up answers that say "this did not work, try again" without looking like a failure, to ever new arguments; and
healthy work whose short answers look the same: accepted, pending, not found, a verdict.
"""

import json
from itertools import cycle, islice

from shapes import Shapes, Steps, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
_BUSY = "Service is busy, please try again."
_LATER = {"status": "retry later"}


def _url(n: int) -> str:
    return f"https://example.org/page/{n}"


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("constant ok")
def five_hundred_jobs_that_are_pending() -> Steps:
    for n in range(500):
        yield from turn(("submit", {"job": n}, {"status": "pending"}))


@HEALTHY.of("constant ok")
def hundred_jobs_that_are_queued() -> Steps:
    for n in range(100):
        yield from turn(("submit", {"job": n}, [{"status": "queued"}, "queued", "Request accepted."][n % 3]))


@HEALTHY.of("constant ok")
def hundred_requests_that_are_accepted() -> Steps:
    for n in range(100):
        yield from turn(("submit", {"job": n}, {"status": "accepted", "message": "it will be processed later"}))


@HEALTHY.of("constant ok")
def hundred_records_that_are_saved() -> Steps:
    for n in range(100):
        yield from turn(("save", {"id": n}, ["saved", "ok", {"status": "saved"}][n % 3]))


@HEALTHY.of("lookup sweeps")
def lookups_of_which_most_answer_not_found() -> Steps:
    for n in range(120):
        yield from turn(("find", {"id": n}, {"status": "not_found"} if n % 12 else {"status": "found", "id": n}))


@HEALTHY.of("lookup sweeps")
def crawl_in_which_each_page_has_no_match() -> Steps:
    for n in range(60):
        yield from turn(("search_page", {"url": _url(n)}, "no match"))


@HEALTHY.of("lookup sweeps")
def searches_that_end_with_the_advice_to_try_again() -> Steps:
    for n in range(40):
        answer = "No flights found for this day. Please try again with another date." if n < 39 else {"flight": "X1"}
        yield from turn(("search_flights", {"day": n}, answer))


@HEALTHY.of("lookup sweeps")
def rooms_of_which_each_is_busy() -> Steps:
    for n in range(40):
        yield from turn(("room_state", {"room": n}, {"status": "busy" if n < 39 else "free"}))


@HEALTHY.of("lookup sweeps")
def seats_that_are_held_by_others() -> Steps:
    for n in range(30):
        answer = f"Seat {n} is held by another customer, try again later." if n < 29 else {"booked": n}
        yield from turn(("book_seat", {"seat": n}, answer))


@HEALTHY.of("verdicts")
def applications_that_are_incomplete() -> Steps:
    for n in range(40):
        yield from turn(("check_application", {"id": n}, {"status": ["incomplete", "partial", "invalid"][n % 3]}))


@HEALTHY.of("verdicts")
def guesses_that_are_wrong() -> Steps:
    for n in range(40):
        yield from turn(("guess", {"code": f"{n * 37:04}"}, "Wrong code, try again." if n < 39 else "Correct!"))


@HEALTHY.of("verdicts")
def guesses_that_are_too_low_or_too_high() -> Steps:
    for n in range(30):
        answer = ["Too low, try again!", "Too high, try again!"][n % 2] if n < 29 else "Correct!"
        yield from turn(("guess", {"number": 500 + (-1) ** n * (29 - n)}, answer))


@HEALTHY.of("verdicts")
def short_messages_of_people_who_will_try_again() -> Steps:
    names = ["Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Lea", "Max", "Noa", "Oda"]
    things = ["the parcel", "my invoice", "a refund", "our meeting", "the key", "your manual"]
    for n in range(30):
        text = f"{names[n % 15]} here about {things[n % 6]}, I could not reach you and will try again later"
        yield from turn(("read_message", {"id": n}, text if n % 2 else {"from": names[n % 15], "text": text}))


@HEALTHY.of("polling without visible progress")
def twelve_jobs_polled_in_turn_that_are_running() -> Steps:
    for state in ["running"] * 6 + ["done"]:
        for job in range(12):
            yield from turn(("check_job", {"id": job}, {"status": state}))


@HEALTHY.of("polling without visible progress")
def forty_reports_that_are_not_ready_yet() -> Steps:
    for state in ["The report is not ready yet, try again later.", "ready"]:
        for number in range(40):
            yield from turn(("get_report", {"id": number}, state))


@HEALTHY.of("polling without visible progress")
def six_mirrors_asked_in_turn_while_the_service_is_busy() -> Steps:
    for answer in [_BUSY] * 6 + ["content"]:
        for mirror in range(6):
            yield from turn(("fetch", {"mirror": mirror}, answer))


@HEALTHY.of("retry with back-off")
def rate_limited_batch_in_which_some_get_through() -> Steps:
    for n in range(120):
        limited = "Rate limit reached, try again in 20 s"
        yield from turn(("fetch", {"url": _url(n)}, limited if n % 7 else f"content {n}"))


@HEALTHY.of("retry with back-off")
def rate_limited_batch_with_pauses() -> Steps:
    for n in range(30):
        yield from turn(("fetch", {"url": _url(n)}, "Rate limit reached, try again in 20 s"))
        yield from turn(("sleep", {"seconds": 20 + n}, "slept"))
        yield from turn(("fetch", {"url": _url(n)}, f"content {n}"))


@HEALTHY.of("retry with back-off")
def rate_limited_batch_of_parallel_calls() -> Steps:
    for part in range(4):
        yield from turn(*(("fetch", {"url": _url(n)}, _LATER) for n in range(30 * part, 30 * part + 30)))
    yield from turn(*(("fetch", {"url": _url(n)}, f"content {n}") for n in range(120)))


@HEALTHY.of("retry with back-off")
def twelve_pages_of_a_busy_site_and_then_all_again() -> Steps:
    for answer in (_BUSY, "content"):
        for n in range(12):
            yield from turn(("fetch", {"url": _url(n)}, answer))


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("asked to try again")
def same_soft_failure_to_five_hundred_pages() -> Steps:
    for n in range(500):
        yield from turn(("fetch", {"url": _url(n)}, _LATER))


@LOOPS.of("asked to try again")
def busy_service_and_rephrased_queries() -> Steps:
    for n in range(60):
        yield from turn(("search", {"q": f"wording number {n}"}, "Service is busy, try again"))


@LOOPS.of("asked to try again")
def two_soft_failures_in_turn() -> Steps:
    for n in range(60):
        answer = [
            "Sorry, something went wrong. Please try again.",
            {"message": "The service is temporarily overloaded."},
        ]
        yield from turn(("search", {"q": f"wording number {n}"}, answer[n % 2]))


@LOOPS.of("asked to try again")
def soft_failure_and_failure_in_turn() -> Steps:
    for n in range(60):
        yield from turn(("parse", {"hint": n}, {"status": "partial_parse_error"} if n % 2 else {"status": "try_again"}))


@LOOPS.of("asked to try again")
def page_that_could_not_be_loaded_with_notes_between() -> Steps:
    for n in range(60):
        yield from turn(("think", {"thought": f"perhaps page {n} can be loaded"}, "noted"))
        yield from turn(("open_page", {"url": _url(n)}, "The page could not be loaded. Try again later."))


@LOOPS.of("asked to try again")
def soft_failure_inside_mcp_content_that_names_its_page() -> Steps:
    for n in range(60):
        content = [{"type": "text", "text": json.dumps({"status": "retry_later", "url": _url(n)})}]
        yield from turn(("fetch", {"url": _url(n)}, {"content": content, "isError": False}))


@LOOPS.of("asked to try again")
def two_tools_that_are_busy_in_turn() -> Steps:
    for n in range(100):
        yield from turn(
            (["search", "fetch"][n % 2], {"q": f"wording number {n}"}, {"result": "Server busy, retry later"})
        )


@LOOPS.of("asked to try again")
def busy_service_with_a_fifth_of_good_answers() -> Steps:
    for n, works in enumerate(islice(cycle([False] * 4 + [True]), 100)):
        yield from turn(("search", {"q": f"wording number {n}"}, f"result {n}" if works else _BUSY))


@LOOPS.of("asked to try again")
def busy_service_after_real_work() -> Steps:
    yield from work(20)
    for n in range(40):
        yield from turn(("summarize", {"part": n}, {"result": None, "status": "retry", "message": _BUSY}))
