"""Limits of a run: calls, time, size and branches, the growth of the prompt, and the context window.

``engine/resume`` carries the counts over. The CostBreaker of ``adk/cost_breaker`` uses ``Growth`` by itself.
"""

from collections import Counter, deque
from collections.abc import Callable, Sized
from typing import Any, Final

from runguard.core.decision import Action, Finding, Rungs
from runguard.core.events import AgentEntered, HandOff, ModelCall, ModelResult, ToolCall, ToolResults
from runguard.core.identity import CHARS_PER_TOKEN, LruDict
from runguard.core.rules.rule import Limit, Rule, evidence_of

# ---- Plain limits of the whole run tree: calls, time, size, branches. Each allows exactly its number.


class ModelCalls(Limit):
    """Model calls of the run and everything nested in it."""

    name = "model_calls"
    sees = (ModelCall,)
    kept = 0  # how many calls of the limit are kept for a last answer
    count = 0

    def observe(self, event: ModelCall) -> Finding | None:
        if self.count + self.kept >= self.limit:
            wanted, detail = self.count + self.kept + 1, "one is kept for the last answer" if self.kept else ""
            return Finding(self.name, Action.STOP, wanted, self.limit, "model calls", "run", detail=detail)
        self.count += 1
        return None

    @property
    def left(self) -> int:
        """Calls that the run may still make, without those kept."""
        return max(self.limit - self.kept - self.count, 0)

    def forget(self) -> None:
        """Do not count a call that somebody else's cache answered or that was never sent."""
        self.count = max(0, self.count - 1)


class ToolCalls(Limit):
    """Tool calls of the run and everything nested in it."""

    name = "tool_calls"
    sees = (ToolCall,)
    count = 0

    def observe(self, event: ToolCall) -> Finding | None:
        self.count += 1
        if self.count <= self.limit:
            return None
        return Finding(self.name, Action.STOP, self.count, self.limit, "tool calls", "run", event.tool)

    def take_back(self, event: ToolCall) -> None:
        """Do not count a call that was allowed and not made."""
        self.count = max(self.count - 1, 0)


class CallsPerTool(Rule):
    """Calls of one tool in the run: the surplus is refused, and asking again in a later response stops the run."""

    name = "tool_limit"
    sees = (ToolCall,)
    rests = sees

    def __init__(self, limit_of: Callable[[str], int | None], limited: Sized) -> None:
        """Take the limits of tools from ``limit_of``, which returns None for a tool without one.

        ``limited``: the tools that have a limit, as far as they are known. More may be declared later.
        """
        self.limit_of, self.record = limit_of, limited
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, str] = {}

    def observe(self, event: ToolCall) -> Finding | None:
        limit = self.limit_of(event.tool)
        if limit is None:
            return None
        if self._counts[event.tool] < limit:
            self._counts[event.tool] += 1
            return None
        refused_before = self._refused.get(event.tool)
        again = refused_before is not None and (not event.batch or refused_before != event.batch)
        self._refused.setdefault(event.tool, event.batch)
        action, unit = Action.STOP if again else Action.BLOCK, "calls of one tool"
        return Finding(self.name, action, limit + 1 + again, limit, unit, "lane", event.tool, event.tool)

    def take_back(self, event: ToolCall) -> None:
        """Do not count a call that was allowed and not made."""
        if self._counts[event.tool] > 0:
            self._counts[event.tool] -= 1

    def dump(self) -> dict[str, list[int | str | None]]:
        """Return each tool that was counted, ready for JSON.

        Its values are its calls and the response in which one was refused first.
        """
        return {tool: [self._counts[tool], self._refused.get(tool)] for tool in {**self._counts, **self._refused}}

    def load(self, counted: dict[str, list[Any]]) -> None:
        """Take over what ``dump`` returned on another worker."""
        for tool, (count, refused) in counted.items():
            self._counts[tool] = int(count)
            if refused is not None:
                self._refused[tool] = str(refused)


class FanOut(Limit):
    """Branches that one node starts at once: too many are refused before the first is paid."""

    name = "fan_out"
    sees = (AgentEntered,)

    def observe(self, event: AgentEntered) -> Finding | None:
        if event.branches <= self.limit:
            return None
        about = (event.branches, self.limit, "branches of one node", "lane", "", event.agent, f"agent {event.agent}")
        return Finding(self.name, Action.STOP, *about)


class Deadline(Rule):
    """Wall clock of the run."""

    name = "deadline"
    # only events that begin a step, so that a finished run is not stopped
    sees = (ModelCall, ToolCall, AgentEntered, HandOff)

    def __init__(self, seconds: float, started: float) -> None:
        self.seconds, self.started = seconds, started

    def observe(self, event: ModelCall | ToolCall | AgentEntered | HandOff) -> Finding | None:
        elapsed = event.at - self.started
        if elapsed <= self.seconds:
            return None
        return Finding(self.name, Action.STOP, round(elapsed, 3), self.seconds, "seconds", "run")

    def skip(self, seconds: float) -> None:
        """Do not count the seconds in which the run was paused."""
        self.started += seconds


class ResultSize(Limit):
    """Keeps answers that are too large out of the history: the model gets a note instead."""

    name = "result_size"
    sees = (ToolResults,)

    def observe(self, event: ToolResults) -> Finding | None:
        found: Finding | None = None
        for a in event.answers:
            if a.chars > self.limit:
                a.too_large = True
                about = (a.chars, self.limit, "characters", "call", a.tool, a.call.hex(), "", evidence_of(event))
                found = found or Finding(self.name, Action.BLOCK, *about)
        return found


# ---- The history that every turn re-sends: how much larger the prompt has become since the start.

AGENTS_KEPT: Final = 128


class PromptSizes:
    """The first prompts of one agent, as a sum, and its last ones."""

    __slots__ = ("asked", "first", "last", "ratio", "seen", "size", "wanted")

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.seen = self.first = 0
        self.last: deque[int] = deque(maxlen=wanted)
        self.ratio: float | None = None  # of last to first prompts; None while there are too few
        self.asked = 0  # bytes of the request that is on its way, 0 where unknown
        self.size = 0  # bytes of the last request that was answered

    def add(self, tokens: int) -> None:
        """Take in the prompt of one call."""
        self.seen += 1
        self.size = self.asked
        if self.seen <= self.wanted:
            self.first += tokens
            return
        self.last.append(tokens)
        if len(self.last) == self.wanted and self.first:
            self.ratio = sum(self.last) / self.first

    def was_cut(self, size: int, stop: float) -> bool:
        """Return whether the history was cut since the last answer, and the next request would be within the limit.

        It was cut when the next request, of ``size`` bytes, is at most half as large as the last one. ``stop``: the
        ratio that is the limit.
        """
        if not size or not self.size or not self.last or 2 * size > self.size:
            return False
        return self.last[-1] * size * self.wanted < stop * self.first * self.size

    def start_over(self) -> None:
        """Forget the last prompts. The first ones stay the baseline."""
        self.last.clear()
        self.ratio = None

    def dump(self) -> list[Any]:
        return [self.seen, self.first, self.size, list(self.last)]

    @classmethod
    def load(cls, wanted: int, seen: int, first: int, size: int, last: list[int]) -> "PromptSizes":
        """Return the sizes that ``dump`` described. Raise ValueError for what it cannot have returned."""
        if any(type(count) is not int or count < 0 for count in (seen, first, size, *last)) or len(last) > wanted:
            raise ValueError("sizes must be whole numbers, not negative")
        made = cls(wanted)
        made.seen, made.first, made.size = seen, first, size
        made.last.extend(last)
        made.ratio = sum(last) / first if len(last) == wanted and first else None
        return made


Sizes = LruDict[tuple[str, str], PromptSizes]  # by place and agent


class Growth(Rule):
    """Mean prompt of the last ``events`` calls over the mean of the first ``events``, per agent and lane.

    By default it only warns: three times the first prompt is normal for an agent that uses tools. ``known``: what
    earlier runs of the session have measured; ``place`` tells its lanes apart.
    """

    name = "growth"
    sees = (ModelResult, ModelCall)

    def __init__(self, rungs: Rungs, events: int = 5, known: Sizes | None = None, place: str = "") -> None:
        self.rungs = rungs
        self.events, self._place = events, place
        self._sizes: Sizes = LruDict(AGENTS_KEPT) if known is None else known

    def observe(self, event: ModelResult | ModelCall) -> Finding | None:
        key = (self._place, event.agent)
        sizes = self._sizes.get(key)
        # only a call is stopped, so a run that has given its last answer is not stopped any more
        if isinstance(event, ModelCall):
            if sizes is None:
                return None
            sizes.asked = event.request_bytes
            found = self._judge(event.agent, sizes.ratio, stops=True) if sizes.ratio is not None else None
            if found is not None and sizes.was_cut(event.request_bytes, float(found.limit)):
                sizes.start_over()
                return None
            return found
        if event.prompt_tokens is None:
            return None
        if sizes is None:
            sizes = self._sizes[key] = PromptSizes(self.events)
        else:
            self._sizes.move_to_end(key)
        sizes.add(event.prompt_tokens)
        return self._judge(event.agent, sizes.ratio, stops=False) if sizes.ratio is not None else None

    def _judge(self, agent: str, ratio: float, *, stops: bool) -> Finding | None:
        reached = self.rungs.at(ratio)
        if reached is None or (reached[0] is Action.STOP) is not stops:
            return None
        about = ("times the first prompts", "lane", "", agent, f"agent {agent}")
        return Finding(self.name, reached[0], round(ratio, 2), reached[1], *about)

    def ratios(self) -> dict[str, float]:
        """Return the ratio of recent to first prompts, for every agent with enough calls."""
        known = list(self._sizes.items())
        return {
            agent: round(sizes.ratio, 3)
            for (place, agent), sizes in known
            if place == self._place and sizes.ratio is not None
        }


# ---- The context window.


class Context(Rule):
    """Projected prompt against what the model, or the policy, allows.

    Warns at a fraction of it. A request that would not fit is stopped, and an answer that alone would overflow the
    window does not enter the history.
    """

    name = "context"
    sees = (ModelCall, ToolResults)
    rests = (ToolResults,)
    record = ()  # a plain event has no large answer
    limit = prompt = 0  # of the last request in this lane

    def __init__(self, warn: float | None) -> None:
        self.warn = warn

    def observe(self, event: ModelCall | ToolResults) -> Finding | None:
        if isinstance(event, ToolResults):
            return self._too_large(event) if self.limit else None
        limit, projected = event.context_limit, event.projected_tokens
        if limit is None or projected is None:
            self.limit = 0
            return None
        self.limit, self.prompt = limit, projected
        if projected <= limit and (self.warn is None or projected < self.warn * limit):
            return None
        action = Action.STOP if projected > limit else Action.WARN
        about = ("tokens", "lane", "", event.agent, f"agent {event.agent}")
        return Finding(self.name, action, projected, limit, *about)

    @property
    def suspicious_chars(self) -> int:
        """The most characters of an answer that needs no second look; 0 when there is nothing to compare with."""
        return self.limit * CHARS_PER_TOKEN // 2

    def _too_large(self, event: ToolResults) -> Finding | None:
        """Refuse an answer that does not fit beside the prompt and is itself the larger half of the window.

        A smaller one that does not fit is let in: the next request is stopped instead.
        """
        room = max((self.limit - self.prompt) * CHARS_PER_TOKEN, self.suspicious_chars)
        large = [a for a in event.answers if a.chars > room]
        if not large:
            return None
        for a in large:
            a.too_large = True
        worst = max(large, key=lambda a: a.chars)
        about = ("tokens", "call", worst.tool, worst.call.hex(), "", evidence_of(event))
        return Finding(self.name, Action.BLOCK, worst.chars // CHARS_PER_TOKEN, self.limit, *about)
