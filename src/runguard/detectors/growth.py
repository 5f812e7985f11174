"""The history that every turn re-sends: how much larger the prompt has become since the start."""

from collections import OrderedDict, deque
from typing import ClassVar

from runguard.decision import Finding, Rungs
from runguard.events import ModelResult

_AGENTS_KEPT = 32


class Growth:
    """Mean prompt of the last ``events`` calls over the mean of the first ``events``, per agent and lane.

    By default it only warns: three times the first prompt is normal for an agent that uses tools.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelResult,)
    per: ClassVar[str] = "lane"
    __slots__ = ("_agents", "events", "rungs")

    def __init__(self, rungs: Rungs, events: int = 5) -> None:
        self.rungs, self.events = rungs, events
        self._agents: OrderedDict[str, _Prompts] = OrderedDict()

    def observe(self, event: ModelResult) -> Finding | None:
        if event.prompt_tokens is None:
            return None
        prompts = self._agents.get(event.agent)
        if prompts is None:
            prompts = self._agents[event.agent] = _Prompts(self.events)
            if len(self._agents) > _AGENTS_KEPT:
                self._agents.popitem(last=False)
        ratio = prompts.add(event.prompt_tokens)
        if ratio is None:
            return None
        reached = self.rungs.at(ratio)
        if reached is None:
            return None
        return Finding("growth", reached[0], round(ratio, 2), reached[1], "times the first prompts", "lane", "", event.agent, f"agent {event.agent}")

    def ratios(self) -> dict[str, float]:
        """Recent over first, for every agent with enough calls to say."""
        return {agent: round(prompts.ratio, 3) for agent, prompts in self._agents.items() if prompts.ratio is not None}


class _Prompts:
    """Sums of the first and the last prompts of one agent, kept up to date."""

    __slots__ = ("first", "last", "last_sum", "ratio", "seen", "wanted")

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.seen = self.first = self.last_sum = 0
        self.last: deque[int] = deque()
        self.ratio: float | None = None

    def add(self, tokens: int) -> float | None:
        self.seen += 1
        if self.seen <= self.wanted:
            self.first += tokens
            return None
        self.last.append(tokens)
        self.last_sum += tokens
        if len(self.last) > self.wanted:
            self.last_sum -= self.last.popleft()
        if self.seen >= 2 * self.wanted and self.first:
            self.ratio = self.last_sum / self.first
        return self.ratio
