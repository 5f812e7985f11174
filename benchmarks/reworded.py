"""Made-up long answers in other words, and long answers that change a little for a good reason."""

from random import Random

from shapes import Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
_SAYINGS = [
    ("The page shows", "On this page one sees", "Visible here is", "The screen contains"),
    ("a header with the logo and a search field", "the logo and a search field in its header"),
    ("links to payments, taxes, contact and services", "contact, services, taxes and payments as links"),
    ("below that a paragraph about the duties of the office", "then the duties of the office, in one paragraph"),
    ("the office collects all revenues and mails the bills", "all revenues are collected and bills mailed there"),
    ("citizens may pay online or by check", "payment is possible by check, and citizens may use the online form"),
    ("the phone number is 410 758 04", "one may call 410 758 04"),
    ("and a link to write to the department", "as well as the department link for mails"),
]
_LISTED = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
_LISTED += ["lambda", "mu", "nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon"]


def described(n: int) -> str:
    """The same facts, each time in another choice of words."""
    chance = Random(n)
    return ". ".join(chance.choice(ways) for ways in _SAYINGS) + "."


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("reworded answers")
def one_link_clicked_again_and_the_page_described_anew() -> Steps:
    yield from work(5)
    for n in range(24):
        yield from turn(("click", {"target": "Email the department"}, described(n)))


@LOOPS.of("reworded answers")
def one_question_to_an_agent_that_answers_in_other_words() -> Steps:
    for n in range(24):
        yield from turn(("expert", {"request": "Which office collects the taxes?"}, {"result": described(n)}))


@LOOPS.of("reworded answers")
def page_described_anew_with_equal_descriptions_between() -> Steps:
    for n in range(30):
        yield from turn(("click", {"target": "Continue"}, described(n // 2)))


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("reworded answers")
def four_opinions_on_one_question() -> Steps:
    for n in range(4):
        yield from turn(("expert", {"request": "Which office collects the taxes?"}, described(n)))
    yield from work(2)


@HEALTHY.of("reworded answers")
def form_filled_in_field_by_field_on_a_page_that_is_described_anew() -> Steps:
    for n in range(14):
        yield from turn(("type", {"field": f"f{n}", "text": f"value {n}"}, described(n)))


@HEALTHY.of("polling with progress")
def long_report_in_words_whose_states_move_on() -> Steps:
    states = ["waiting", "queued", "starting", "building", "testing", "packing", "signing", "uploading", "checking"]
    for n in range(27):
        lines = [f"{name} is {states[min(max(n - at, 0), 8)]}" for at, name in enumerate(_LISTED)]
        yield from turn(("release_report", {"id": "r"}, f"{page('release', 60)}\n" + "\n".join(lines)))


@HEALTHY.of("polling with progress")
def long_description_in_which_a_number_moves() -> Steps:
    for n in range(20):
        yield from turn(("describe_job", {"id": 3}, f"{described(n)} {n + 1} of 20 files are done."))


@HEALTHY.of("polling with progress")
def list_of_waiting_jobs_that_shrinks() -> Steps:
    for n in range(16):
        waiting = "\n".join(f"{name} waits for {name}er and {name}or" for name in _LISTED[n:])
        yield from turn(("waiting_jobs", {}, waiting))


@HEALTHY.of("polling with progress")
def inbox_into_which_mails_come() -> Steps:
    def mail(n: int) -> str:
        return " ".join(f"{word}{'abcdefghijklmnopqrstuvwxyz'[n]}" for word in _LISTED[:8])

    for n in range(18):
        yield from turn(("inbox", {}, "\n".join(mail(k) for k in range(n, n + 8))))


@HEALTHY.of("paging")
def scrolling_by_a_quarter_of_the_screen() -> Steps:
    text = [f"{a}{b}" for a in _LISTED for b in _LISTED]
    for n in range(24):
        yield from turn(("scroll", {"by": "quarter"}, " ".join(text[n * 15 : n * 15 + 60])))


@HEALTHY.of("batch work with one tool")
def ten_ideas_one_after_another() -> Steps:
    for n in range(10):
        idea = " ".join(f"{word}{'abcdefghij'[n]}" for word in _LISTED[:12])
        yield from turn(("suggest", {"topic": "a name"}, f"{described(0)} My idea: {idea}."))
