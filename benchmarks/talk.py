"""Made-up talk without tools: agents that say the same in other words, and talk that gets somewhere or ends."""

from orders import chapter
from shapes import Shapes, Steps, turn

LOOPS = Shapes()
HEALTHY = Shapes()
_SAID = [
    "I think the plan is good and we should go on with it",
    "the plan seems fine to me, so let us go on",
    "we agree that this plan is good, and we should continue",
    "yes, it is a fine plan, and I agree that we go on",
    "let me say again that the plan is good to me",
    "so we continue with it, as we agree that it seems fine",
]


def _again(n: int) -> str:
    return f"{_SAID[n * 5 % 6]}, {_SAID[n * 7 % 6 - 1]} ({n})"


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("words")
def two_agents_that_paraphrase_each_other() -> Steps:
    for n in range(120):
        yield from turn(text=_again(n), agent="ab"[n % 2])


@LOOPS.of("words")
def three_agents_that_agree_in_other_words() -> Steps:
    for n in range(120):
        yield from turn(text=_again(n), agent="abc"[n % 3])


@LOOPS.of("words")
def one_agent_that_promises_in_other_words() -> Steps:
    for n in range(80):
        yield from turn(text=f"I will {['begin', 'start', 'do it', 'work on it'][n % 4]} now, step {n}")


# ---- healthy --------------------------------------------------------------------------------------------------------


@HEALTHY.of("words")
def debate_of_twelve_rounds_with_a_judge() -> Steps:
    for n in range(12):
        yield from turn(text=f"for it: {_again(n)}", agent="pro")
        yield from turn(text=f"against it: {_again(n + 3)}", agent="contra")
    yield from turn(text="pro has won", agent="judge")


@HEALTHY.of("words")
def role_play_of_sixteen_rounds() -> Steps:
    for n in range(16):
        yield from turn(text=f"knight: {_again(n)}", agent="knight")
        yield from turn(text=f"dragon: {_again(n + 1)}", agent="dragon")


@HEALTHY.of("words")
def twelve_drafts_and_their_reviews() -> Steps:
    for n in range(12):
        yield from turn(text=f"{chapter(1)} and then {n}", agent="writer")
        yield from turn(text=f"better, but look at the ending once more ({n})", agent="critic")


@HEALTHY.of("words")
def forty_chapters_without_a_tool() -> Steps:
    for n in range(40):
        yield from turn(text=chapter(n), agent="writer")
        yield from turn(text="good, the next one", agent="editor")


@HEALTHY.of("words")
def chain_of_fifty_agents() -> Steps:
    for n in range(50):
        yield from turn(text=_again(n), agent=f"step_{n}")


@HEALTHY.of("words")
def talk_between_steps() -> Steps:
    for n in range(8):
        for k in range(12):
            yield from turn(text=_again(k), agent="ab"[k % 2])
        yield from turn(("save", {"version": n}, {"saved": n}), agent="a")
