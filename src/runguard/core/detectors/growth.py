"""The history that every turn re-sends: how much larger the prompt has become since the start."""

from collections import OrderedDict, deque
from typing import Any, ClassVar, Final

from runguard.core.decision import Action, Finding, Rungs
from runguard.core.events import ModelCall, ModelResult

AGENTS_KEPT: Final = 128


class PromptSizes:
    """Sums of the first and the last prompts of one agent, kept up to date."""

    __slots__ = ("asked", "first", "last", "last_sum", "ratio", "seen", "size", "wanted")

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.seen = self.first = self.last_sum = 0
        self.last: deque[int] = deque()
        self.ratio: float | None = None
        self.asked = 0  # bytes of the request that is on its way, 0 where unknown
        self.size = 0  # bytes of the last request that was answered

    def add(self, tokens: int) -> float | None:
        self.seen += 1
        self.size = self.asked
        if self.seen <= self.wanted:
            self.first += tokens
            return None
        self.last.append(tokens)
        self.last_sum += tokens
        if len(self.last) > self.wanted:
            self.last_sum -= self.last.popleft()
        self.ratio = self.last_sum / self.first if len(self.last) == self.wanted and self.first else None
        return self.ratio

    def was_cut(self, size: int, stop: float) -> bool:
        """Whether the history was cut since the last answer: the next request is at most half as large, and would be
        within the limit.
        """
        if not size or not self.size or not self.last or 2 * size > self.size:
            return False
        return self.last[-1] * size * self.wanted < stop * self.first * self.size

    def start_over(self) -> None:
        """Forget the last prompts. The first ones stay the baseline."""
        self.last.clear()
        self.last_sum, self.ratio = 0, None

    def dump(self) -> list[Any]:
        return [self.seen, self.first, self.size, list(self.last)]

    @classmethod
    def load(cls, wanted: int, seen: int, first: int, size: int, last: list[int]) -> "PromptSizes":
        """The inverse of ``dump``. Raises ``ValueError`` for what it cannot have written."""
        if any(type(count) is not int or count < 0 for count in (seen, first, size, *last)) or len(last) > wanted:
            raise ValueError("sizes must be whole numbers, not negative")
        made = cls(wanted)
        made.seen, made.first, made.size, made.last, made.last_sum = seen, first, size, deque(last), sum(last)
        made.ratio = made.last_sum / first if len(last) == wanted and first else None
        return made


Sizes = OrderedDict[tuple[str, str], PromptSizes]  # by place and agent, the one used last at the end


class Growth:
    """Mean prompt of the last ``events`` calls over the mean of the first ``events``, per agent and lane.

    By default it only warns: three times the first prompt is normal for an agent that uses tools. ``known``: what
    earlier runs of the session have measured; ``place`` tells its lanes apart.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelResult, ModelCall)
    __slots__ = ("_first", "_place", "_sizes", "events", "rungs")

    def __init__(self, rungs: Rungs, events: int = 5, known: Sizes | None = None, place: str = "") -> None:
        self.rungs, self.events, self._place = rungs, events, place
        self._first = rungs.lowest  # nothing to say below the lowest rung
        self._sizes: Sizes = OrderedDict() if known is None else known

    def observe(self, event: ModelResult | ModelCall) -> Finding | None:
        key = (self._place, event.agent)
        # a stop is for the next call: a run whose last answer is there is not stopped any more
        if isinstance(event, ModelCall):
            known = self._sizes.get(key)
            if known is None:
                return None
            known.asked = event.request_bytes
            if known.ratio is None or known.ratio < self._first:
                return None
            found = self._finding(event.agent, known.ratio, stops=True)
            if found is not None and known.was_cut(event.request_bytes, float(found.limit)):
                known.start_over()
                return None
            return found
        if event.prompt_tokens is None:
            return None
        sizes = self._sizes.get(key)
        if sizes is None:
            sizes = self._sizes[key] = PromptSizes(self.events)
            if len(self._sizes) > AGENTS_KEPT:
                self._sizes.popitem(last=False)
        else:
            self._sizes.move_to_end(key)
        ratio = sizes.add(event.prompt_tokens)
        return None if ratio is None or ratio < self._first else self._finding(event.agent, ratio, stops=False)

    def _finding(self, agent: str, ratio: float, *, stops: bool) -> Finding | None:
        reached = self.rungs.at(ratio)
        if reached is None or (reached[0] is Action.STOP) is not stops:
            return None
        return Finding(
            "growth",
            reached[0],
            round(ratio, 2),
            reached[1],
            "times the first prompts",
            "lane",
            "",
            agent,
            f"agent {agent}",
        )

    def ratios(self) -> dict[str, float]:
        """Recent over first, for every agent with enough calls to say."""
        known = list(self._sizes.items())
        return {
            agent: round(sizes.ratio, 3)
            for (place, agent), sizes in known
            if place == self._place and sizes.ratio is not None
        }
