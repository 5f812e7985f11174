"""Gemini CLI (google-gemini/gemini-cli 5411f113, 2026-08-21): counts calls, answers aside, and chanting in what the
model says.

Calls: the last 5 x k are 5 rounds of one circle, k from 1 to 5 (before 2026-07-17 only 1); key order counts. Words: a
piece of 50 characters that came 10 times close to each other with at most 5 different texts between; a call, a list, a
table, a heading, a quote or a fence begins anew, and code is skipped. The first detection since the user's message is
told to the model, the second stops the run and asks. Its judge by another model, from the thirtieth turn on, is left
out.
"""

import re
from collections import deque
from itertools import pairwise

from rivals.steps import Said, Step, as_written, is_agents_message, is_user, text_of

ROUNDS, LONGEST = 5, 5
PIECE, TIMES, KEPT = 50, 10, 5000
NEAR, VARIETY = 5 * PIECE, TIMES // 2
# As shipped a hyphen in the middle of a class makes a range: "- item" is no list, and a line of capitals is a divider.
_SHIPPED = (r"[*-+]", "[+-_=*\u2500-\u257f]+")
_MEANT = (r"[-*+]", "[-+_=*\u2500-\u257f]+")


class GeminiCli:
    def __init__(self, longest: int = LONGEST, *, repaired: bool = False) -> None:
        self.longest = longest
        self._words = Chant(*(_MEANT if repaired else _SHIPPED))
        self._calls: deque[tuple[str, str]] = deque(maxlen=ROUNDS * LONGEST)
        self._strikes = 0

    def feed(self, step: Step) -> Said:
        why = ""
        if is_user(step):
            self._calls.clear()
            self._words.begin()
            self._strikes = 0
        elif step["kind"] == "tool_call":
            self._words.begin()
            why = self._circle(step)
        elif (step["kind"] == "model" or is_agents_message(step)) and self._words.hears(text_of(step)):
            why = "chanting"
        if not why:
            return None
        self._strikes += 1
        return ("nudge" if self._strikes == 1 else "stop"), why

    def _circle(self, step: Step) -> str:
        self._calls.append((str(step.get("tool")), as_written(step.get("args"))))
        past = list(self._calls)
        for length in range(1, self.longest + 1):
            if len(past) >= ROUNDS * length and past[-ROUNDS * length :] == past[-length:] * ROUNDS:
                return f"{ROUNDS} rounds of {length} calls"
        return ""


class Chant:
    """Repeated pieces in streamed text; recorded text is streamed line by line."""

    def __init__(self, bullet: str, divider: str) -> None:
        self._divider = re.compile(divider)
        self._structure = re.compile(rf"```|(?:^|\n)(?:\s*(?:\|.*\||[|+-]{{3,}})|\s*\d+\.\s|#+\s|>\s|\s*{bullet}\s)")
        self._in_code = False  # the product does not forget it either
        self.begin()

    def begin(self) -> None:
        self._text, self._next = "", 0
        self._seen: dict[str, list[int]] = {}

    def hears(self, text: str) -> bool:
        return any(self._hears_line(line) for line in text.splitlines(keepends=True))

    def _hears_line(self, line: str) -> bool:
        is_divider = self._divider.fullmatch(line) is not None
        if is_divider or self._structure.search(line):
            self.begin()
        was_in_code = self._in_code
        self._in_code ^= line.count("```") % 2 == 1
        if was_in_code or self._in_code or is_divider:
            return False
        self._text += line
        self._drop(len(self._text) - KEPT)
        while self._next + PIECE <= len(self._text):
            if self._is_chant():
                return True
            self._next += 1
        return False

    def _drop(self, surplus: int) -> None:
        """Only the latest characters are kept."""
        if surplus <= 0:
            return
        self._text, self._next = self._text[surplus:], max(0, self._next - surplus)
        moved = {piece: [at - surplus for at in places if at >= surplus] for piece, places in self._seen.items()}
        self._seen = {piece: places for piece, places in moved.items() if places}

    def _is_chant(self) -> bool:
        places = self._seen.setdefault(self._text[self._next : self._next + PIECE], [])
        places.append(self._next)  # found again when it is a chant: the product does not move on then
        if len(places) < TIMES:
            return False
        last = places[-TIMES:]
        between = {self._text[start:end] for start, end in pairwise(last)}
        return last[-1] - last[0] <= NEAR * (TIMES - 1) and len(between) <= VARIETY
