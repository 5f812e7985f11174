"""Made-up workers without tools that are ordered again and again: the same order and report in other words, and healthy
work through such workers.
"""

from collections.abc import Callable
from itertools import combinations
from random import Random

from orders import as_tool, chapter
from reworded import described
from shapes import Shapes, Steps, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
_VERBS = ["Please tell me", "Explain once more", "I need to know", "Find out", "Would you say", "Kindly describe"]
_ENDS = ["", "again", "in detail", "for the customer", "as soon as possible", "with care", "in other words"]
_OPINIONS = [
    ("I have looked at the plan", "The plan was read by me", "Having read the plan", "My look at the plan is done"),
    ("it seems good to me", "to me it seems good", "I see nothing wrong with it", "nothing in it seems wrong"),
    ("the team may go on with it", "so the team should go on", "going on is what the team should do"),
    ("and I will write more when I know more", "more will be written once I know it", "I will say more later"),
]
_NAMES = ["Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Lea", "Max", "Noa", "Oda"]


def _order(n: int, about: str = "which office collects the taxes") -> str:
    chance = Random(n)
    return f"{chance.choice(_VERBS)} {about} {chance.choice(_ENDS)}".strip()


def _opinion(n: int) -> str:
    chance = Random(n)
    return ", ".join(chance.choice(ways) for ways in _OPINIONS)


def _ordered(rounds: int, order: Callable[[int], str], report: Callable[[int], str], worker: str = "expert") -> Steps:
    for n in range(rounds):
        yield from as_tool(order(n), report=report(n), worker=worker)


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("words through a worker")
def forty_drafts_by_a_writer_and_their_reviews_by_a_critic() -> Steps:
    """Each draft changes one sentence of twelve; the reviews are alike."""
    for n in range(40):
        words = chapter(n).split()[:9]
        parts = [chapter(100).split()[9 * k : 9 * k + 9] for k in range(12)]
        draft = ". ".join(" ".join(part if k != n % 12 else words) for k, part in enumerate(parts))
        yield from as_tool("Improve the weakest sentence of the draft", report=draft, worker="writer")
        yield from as_tool("Say what to improve in this draft", report=_opinion(n), worker="critic")


@HEALTHY.of("words through a worker")
def sixteen_rounds_of_role_play_through_a_worker() -> Steps:
    yield from _ordered(16, lambda n: f"The knight says: {_opinion(n + 40)}", lambda n: f"dragon: {_opinion(n)}")


@HEALTHY.of("words through a worker")
def debate_of_twelve_rounds_between_two_workers() -> Steps:
    for n in range(12):
        yield from as_tool(f"Reply to this: {_opinion(n)}", report=f"for it: {_opinion(n + 20)}", worker="pro")
        yield from as_tool(f"Reply to this: {_opinion(n + 20)}", report=f"against it: {_opinion(n)}", worker="contra")


@HEALTHY.of("words through a worker")
def forty_words_that_are_translated() -> Steps:
    words = [chapter(n).split()[2] for n in range(40)]
    yield from _ordered(40, lambda n: f"Translate the word {words[n]} into French", lambda n: f"le {words[n][::-1]}")


@HEALTHY.of("words through a worker")
def letters_of_one_form_to_fifteen_people() -> Steps:
    yield from _ordered(
        15, lambda n: f"Write the standard letter to {_NAMES[n]}", lambda n: f"Dear {_NAMES[n]}, {described(0)} Yours"
    )


@HEALTHY.of("words through a worker")
def parts_of_a_text_that_are_judged_with_few_words() -> Steps:
    yield from _ordered(60, lambda n: f"Judge part {n} of the text", lambda n: ["good", "too long", "unclear"][n % 3])


@HEALTHY.of("words through a worker")
def all_pairs_of_seven_things_compared() -> Steps:
    pairs = list(combinations(["alder", "beech", "cedar", "daphne", "elm", "fir", "gorse"], 2))
    order = lambda n: f"Compare {pairs[n][0]} with {pairs[n][1]}"  # noqa: E731
    yield from _ordered(len(pairs), order, lambda n: f"{pairs[n][n % 2]} is the better one for a garden in the shade")


@HEALTHY.of("words through a worker")
def chapters_written_by_a_worker() -> Steps:
    yield from _ordered(40, lambda n: "Write the next chapter", chapter, "writer")


@HEALTHY.of("words through a worker")
def expert_asked_eight_times_between_steps() -> Steps:
    for n in range(8):
        for k in range(6):
            yield from as_tool(_order(6 * n + k), report=described(6 * n + k), worker="expert")
        yield from turn(("save", {"version": n}, {"saved": n}), agent="lead")


@HEALTHY.of("words through a worker")
def ten_opinions_on_one_question_in_other_words() -> Steps:
    yield from _ordered(10, _order, described)
    yield from work(2)


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("orders")
def expert_without_tools_asked_in_new_words() -> Steps:
    yield from _ordered(60, _order, described)


@LOOPS.of("orders")
def expert_without_tools_that_repeats_one_text() -> Steps:
    yield from _ordered(60, _order, lambda n: described(0))


@LOOPS.of("orders")
def reviewer_without_tools_whose_opinion_stays_the_same() -> Steps:
    yield from _ordered(60, lambda n: _order(n, "whether the plan is good"), _opinion, "reviewer")


@LOOPS.of("orders")
def writer_and_critic_who_say_the_same_to_their_lead() -> Steps:
    for n in range(60):
        yield from as_tool(_order(n, "the best text about the office"), report=described(n), worker="writer")
        yield from as_tool(_order(n + 9, "whether it is good"), report=_opinion(n), worker="critic")


@LOOPS.of("orders")
def expert_asked_in_new_words_between_plans() -> Steps:
    for n in range(60):
        yield from turn(("update_plan", {"plan": f"ask the expert, version {n}"}, "ok"), agent="lead")
        yield from as_tool(_order(n), report=described(n), worker="expert")
