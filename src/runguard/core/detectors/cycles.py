"""Full rounds of a cycle of calls."""

import json
from collections import deque
from typing import ClassVar

from runguard.core.decision import Finding, Rungs
from runguard.core.detectors.evidence import evidence_of, swap
from runguard.core.events import ToolResults


class Rounds:
    """Counts full rounds of a circle of at most ``max_len`` steps."""

    __slots__ = ("_names", "_recent", "_same", "max_len")

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self._recent: deque[object] = deque(maxlen=max_len)
        self._names: deque[str] = deque(maxlen=max_len)
        self._same = [0] * (max_len + 1)  # _same[p]: steps in a row equal to the one p before

    def add(self, step: object, name: str) -> tuple[int, list[str]]:
        """How many rounds end with this step, and the names of one round; no rounds where nothing repeats."""
        rounds, length = 0, 0
        for period in range(1, self.max_len + 1):
            same = len(self._recent) >= period and self._recent[-period] == step
            self._same[period] = self._same[period] + 1 if same else 0
            if self._same[period] >= period and self._same[period] // period + 1 > rounds:
                rounds, length = self._same[period] // period + 1, period
        self._recent.append(step)
        self._names.append(name)
        return rounds, list(self._names)[-length:] if length else []

    def clear(self) -> None:
        if self._recent:
            self._recent.clear()
            self._names.clear()
            self._same = [0] * (self.max_len + 1)


class Cycle:
    """Full rounds of a circle of at most ``max_len`` observations.

    Off unless asked for: ``NoNews`` sees circles too.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_rounds", "rungs")

    def __init__(self, rungs: Rungs, max_len: int = 4) -> None:
        self.rungs, self._rounds = rungs, Rounds(max_len)

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.pairs:
            return None
        rounds, pattern = self._rounds.add(event.pairs, "+".join(sorted({a.tool for a in event.answers if a.counted})))
        reached = self.rungs.at(rounds)
        if reached is None or rounds < 2:
            return None
        length = len(pattern)
        evidence = evidence_of(event)
        evidence[0]["pattern"] = json.dumps(pattern)
        detail = f"of {length} calls: {'→'.join(pattern)}" if length > 1 else "of one call"
        return Finding(
            "cycle",
            *swap(reached, rounds),
            unit="rounds",
            detail=detail,
            tool=event.answers[0].tool,
            evidence=evidence,
        )

    def clear(self) -> None:
        self._rounds.clear()
