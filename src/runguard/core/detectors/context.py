"""The context window: a request that would not fit is not sent, an answer that alone would overflow it does not enter
the history.
"""

from typing import ClassVar

from runguard.core.decision import Action, Finding
from runguard.core.detectors.evidence import evidence_of
from runguard.core.events import ModelCall, ToolResults
from runguard.core.fingerprint import CHARS_PER_TOKEN


class Context:
    """Projected prompt against what the model, or the policy, allows.

    Warns at a fraction of it, stops what would not fit.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelCall, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ToolResults,)
    record: ClassVar[tuple[()]] = ()  # a plain event has no large answer
    __slots__ = ("limit", "prompt", "warn")

    def __init__(self, warn: float | None) -> None:
        self.warn = warn
        self.limit = self.prompt = 0  # of the last request in this lane

    def observe(self, event: ModelCall | ToolResults) -> Finding | None:
        if isinstance(event, ToolResults):
            return self._too_large(event) if self.limit else None
        limit, projected = event.context_limit, event.projected_tokens
        if limit is None or projected is None:
            self.limit = 0
            return None
        self.limit, self.prompt = limit, projected
        about = f"agent {event.agent}"
        if projected > limit:
            return Finding("context", Action.STOP, projected, limit, "tokens", "lane", "", event.agent, about)
        if self.warn is not None and projected >= self.warn * limit:
            return Finding("context", Action.WARN, projected, limit, "tokens", "lane", "", event.agent, about)
        return None

    @property
    def suspicious_chars(self) -> int:
        """Answers up to this size need no second look; 0 when there is nothing to compare with."""
        return self.limit * CHARS_PER_TOKEN // 2

    def _too_large(self, event: ToolResults) -> Finding | None:
        """An answer is refused when it does not fit beside the prompt and is itself the larger half of the window.

        A smaller one that does not fit either is not the culprit: the next request is stopped instead.
        """
        room = (self.limit - self.prompt) * CHARS_PER_TOKEN
        worst = 0
        tool = call = ""
        for a in event.answers:
            if a.chars > self.suspicious_chars and a.chars > room:
                a.too_large = True
                if a.chars > worst:
                    worst, tool, call = a.chars, a.tool, a.call.hex()
        if not worst:
            return None
        return Finding(
            "context",
            Action.BLOCK,
            worst // CHARS_PER_TOKEN,
            self.limit,
            "tokens",
            "call",
            tool,
            call,
            "",
            evidence_of(event),
        )
