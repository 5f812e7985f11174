"""The history that every turn re-sends: how much larger the prompt has become since the start."""

from collections import OrderedDict, deque
from typing import ClassVar

from runguard.decision import Action, Finding, Rungs
from runguard.events import ModelCall, ModelResult

_AGENTS_KEPT = 32


class Growth:
    """Mean prompt of the last ``events`` calls over the mean of the first ``events``, per agent and lane.

    By default it only warns: three times the first prompt is normal for an agent that uses tools.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelResult, ModelCall)
    __slots__ = ("_agents", "events", "rungs")

    def __init__(self, rungs: Rungs, events: int = 5) -> None:
        self.rungs, self.events = rungs, events
        self._agents: OrderedDict[str, _Prompts] = OrderedDict()

    def observe(self, event: ModelResult | ModelCall) -> Finding | None:
        if isinstance(event, ModelCall):  # a stop is for the next call: a run whose last answer is there is not stopped any more
            known = self._agents.get(event.agent)
            return self._finding(event.agent, known.ratio, stops=True) if known is not None else None
        if event.prompt_tokens is None:
            return None
        prompts = self._agents.get(event.agent)
        if prompts is None:
            prompts = self._agents[event.agent] = _Prompts(self.events)
            if len(self._agents) > _AGENTS_KEPT:
                self._agents.popitem(last=False)
        return self._finding(event.agent, prompts.add(event.prompt_tokens), stops=False)

    def _finding(self, agent: str, ratio: float | None, *, stops: bool) -> Finding | None:
        reached = self.rungs.at(ratio) if ratio is not None else None
        if ratio is None or reached is None or (reached[0] is Action.STOP) is not stops:
            return None
        return Finding("growth", reached[0], round(ratio, 2), reached[1], "times the first prompts", "lane", "", agent, f"agent {agent}")

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
