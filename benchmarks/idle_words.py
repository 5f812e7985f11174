"""Made-up talk after work: agents that have used tools and then only write, users who are programs; and the same with
people, chapters and plans.
"""

from itertools import islice

from orders import chapter
from shapes import Shapes, Steps, page, turn, user, work

LOOPS = Shapes()
HEALTHY = Shapes()
_EXCUSES = [
    "Given the limitations I cannot see the picture, but I will go on with what is there",
    "As I said, the picture cannot be seen by me, given my limitations, so I go on",
    "I will go on although the picture cannot be seen with what I have",
    "With the limitations given, what is there must do, and I go on with it",
]
_PROCEED = "Please proceed to the next step on your own. Do not ask for help."
_FORMAT = "Your last message held no call of a tool. Every message must hold exactly one call; call finish when done."


def _excuse(n: int) -> str:
    return f"{_EXCUSES[n % 4]} ({_EXCUSES[(n * 3 + 1) % 4].lower()})"


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("idle words")
def agent_that_apologises_after_its_work() -> Steps:
    yield from work(6)
    for n in range(20):
        yield from turn(text=_excuse(n))


@LOOPS.of("idle words")
def agent_that_announces_its_next_step() -> Steps:
    yield from work(3)
    for n in range(20):
        yield from turn(text=f"Now I will {['open', 'read', 'look at', 'go to'][n % 4]} the file and {_excuse(n)}")


@LOOPS.of("idle words")
def orders_to_look_at_a_picture_that_no_agent_can_see() -> Steps:
    for n in range(3):
        yield from turn(text="Reader, open the next page", agent="lead")
        yield from turn(("fetch", {"url": f"page {n}"}, page(n)), agent="reader")
    for n in range(16):
        yield from turn(text=f"Reader, look at the picture and tell me the number in it. {_excuse(n)}", agent="lead")
        yield from turn(text=f"I cannot look at a picture. {_excuse(n + 1)}", agent="reader")


@LOOPS.of("automatic users")
def same_call_after_each_please_proceed() -> Steps:
    for _ in range(30):
        yield user(_PROCEED)
        yield from turn(("get_user", {"uid": 1}, {"name": "Ann"}))
        yield from turn(text="The user is Ann.")


@LOOPS.of("automatic users")
def same_failure_after_each_continue() -> Steps:
    for n in range(14):
        yield user(f"Continue. You have {50 - n} steps left.")
        yield from turn(("parse", {"fragment": n}, {"status": "partial_parse_error", "data": None}))


@LOOPS.of("automatic users")
def two_long_files_in_turn_after_each_complaint_about_the_format() -> Steps:
    for n in range(30):
        yield user(_FORMAT)
        yield from turn(("read_file", {"path": "ab"[n % 2]}, page("ab"[n % 2])))


@LOOPS.of("automatic users")
def words_without_a_call_after_each_complaint_about_the_format() -> Steps:
    yield from work(2)
    for n in range(50):
        yield from turn(text=_excuse(n))
        yield user(_FORMAT)


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("words")
def twenty_chapters_after_some_research() -> Steps:
    yield from work(4)
    for n in range(20):
        yield from turn(text=chapter(n))


@HEALTHY.of("words")
def debate_of_five_rounds_after_a_search() -> Steps:
    yield from turn(("search", {"q": "the plan"}, page("plan")), agent="pro")
    for n in range(5):
        yield from turn(text=f"for it: {_excuse(n)}", agent="pro")
        yield from turn(text=f"against it: {_excuse(n + 2)}", agent="contra")
    yield from turn(text="pro has won", agent="judge")


@HEALTHY.of("words")
def plans_and_orders_of_a_lead_around_each_step() -> Steps:
    for n in range(15):
        yield from turn(text=f"Ledger: the request is not done yet, {_excuse(n)}", agent="lead")
        yield from turn(text=f"Please open page {n} and tell me what it says", agent="lead")
        yield from turn(text="Next speaker: surfer", agent="lead")
        yield from turn(("browse", {"page": n}, page(n)), agent="surfer")


@HEALTHY.of("words")
def four_reports_before_the_next_step() -> Steps:
    for n in range(6):
        yield from work(1, n)
        for k in range(4):
            yield from turn(text=_excuse(n + k))


@HEALTHY.of("dialogue")
def user_who_asks_for_the_state_again_and_again() -> Steps:
    for _ in range(12):
        yield user("any news?")
        yield from turn(("get_order", {"id": 7}, {"state": "on its way"}))
        yield from turn(text="It is on its way.")


@HEALTHY.of("dialogue")
def user_who_says_yes_to_every_step() -> Steps:
    for n in range(14):
        yield user("yes")
        yield from turn(("do_step", {"n": n}, f"step {n} was done"))
        yield from turn(text="Shall I go on?")


@HEALTHY.of("dialogue")
def user_who_says_continue_while_the_work_moves_on() -> Steps:
    for n in range(20):
        yield user("Please continue with the next chapter.")
        yield from work(1, n)
        yield from turn(text=chapter(n))


@HEALTHY.of("dialogue")
def one_file_read_in_each_turn_of_an_automatic_user() -> Steps:
    for n in range(12):
        yield user(_PROCEED)
        yield from turn(("read_file", {"path": "notes"}, page(f"notes {n // 6}")))
        yield from work(2, 2 * n)


@HEALTHY.of("dialogue")
def question_sent_again_after_an_error_of_the_line() -> Steps:
    long = "I would like to know which of the two tariffs that you named is cheaper for a family of five people"
    for _ in range(4):
        yield user(long)
        yield from turn(("tariffs", {}, {"basic": 7, "family": 12}))
        yield from turn(text="The family tariff.")


@HEALTHY.of("dialogue")
def users_who_ask_the_same_of_a_menu() -> Steps:
    for n in range(12):
        yield user(["opening hours", "Opening hours?"][n % 2])
        yield from turn(text="We are open from nine to five.")


# ---- what a reader cannot tell apart --------------------------------------------------------------------------------

_SPELLINGS = (
    "refund policy",
    "Refund Policy",
    "REFUND POLICY",
    "refund\u200b policy",
    "\uff52efund policy",
    "refund p\u200dolicy",
)


@LOOPS.of("noise")
def one_question_in_letters_that_look_alike_and_a_short_answer() -> Steps:
    for n in range(24):
        yield from turn(("search", {"q": _SPELLINGS[n % 6] + "\u200b" * (n // 6)}, {"policy": "within 14 days"}))


@HEALTHY.of("noise")
def three_spellings_of_a_name_that_have_one_answer() -> Steps:
    for name in islice(_SPELLINGS, 3):
        yield from turn(("is_reserved", {"name": name}, {"reserved": False}))
    yield from work(2)


@HEALTHY.of("noise")
def spellings_of_a_path_looked_for_on_a_disk() -> Steps:
    for name in ("readme", "README", "Readme", "ReadMe"):
        yield from turn(("stat", {"path": name}, "not found" if name != "ReadMe" else {"size": 9}))
    yield from work(2)


# ---- waiting --------------------------------------------------------------------------------------------------------


@LOOPS.of("waiting", {"check_job": {"polling": True}})
def declared_poll_that_shows_no_change_for_an_hour() -> Steps:
    for n in range(62):
        yield from turn(("check_job", {"id": 3}, {"state": "queued"}), at=60.0 * n)


@LOOPS.of("circles")
def circle_of_four_batches() -> Steps:
    for n in range(60):
        yield from turn(*(("read", {"path": f"{n % 4}{half}"}, f"content {n % 4}{half}") for half in "ab"))


@LOOPS.of("circles")
def state_asked_of_two_tools_in_turn() -> Steps:
    for n in range(30):
        yield from turn((("get_state", "get_status")[n % 2], {"id": 7}, {"state": "open"}))


@LOOPS.of("failures")
def timeouts_told_in_ever_other_words() -> Steps:
    for n in range(14):
        said = f"TimeoutError: part {'abcdefghijklmn'[n]} of the request took too long"
        yield from turn(("fetch", {"url": f"https://example.org/{n}"}, said), raised=True)


@HEALTHY.of("polling beyond, declared", {"check_job": {"polling": True}})
def forty_minutes_of_polls_in_which_the_state_changes() -> Steps:
    for n in range(40):
        yield from turn(
            ("check_job", {"id": 3}, {"state": ["queued", "building", "testing", "packing"][n // 10]}), at=60.0 * n
        )
