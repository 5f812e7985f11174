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
        self._agents: OrderedDict[str, tuple[list[int], deque[int]]] = OrderedDict()

    def observe(self, event: ModelResult) -> Finding | None:
        if event.prompt_tokens is None:
            return None
        history = self._agents.get(event.agent)
        if history is None:
            history = self._agents[event.agent] = ([], deque(maxlen=self.events))
            if len(self._agents) > _AGENTS_KEPT:
                self._agents.popitem(last=False)
        first, last = history
        if len(first) < self.events:
            first.append(event.prompt_tokens)
            return None
        last.append(event.prompt_tokens)
        ratio = self.ratio(event.agent)
        if ratio is None:
            return None
        reached = self.rungs.at(ratio)
        if reached is None:
            return None
        return Finding("growth", reached[0], round(ratio, 2), reached[1], "times the first prompts", "lane", "", event.agent, f"agent {event.agent}")

    def ratio(self, agent: str) -> float | None:
        """Recent over first, or None while there are too few calls to say."""
        history = self._agents.get(agent)
        if history is None or len(history[1]) < self.events or not sum(history[0]):
            return None
        return sum(history[1]) / sum(history[0])

    def ratios(self) -> dict[str, float]:
        return {agent: round(ratio, 3) for agent in self._agents if (ratio := self.ratio(agent)) is not None}
