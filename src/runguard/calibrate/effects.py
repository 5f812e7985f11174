"""The effects of policies on the recordings: by label, by limit, and on the half that they were not fitted to."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from runguard.calibrate.measuring import RecordingOutcome
from runguard.calibrate.samples import LABELS
from runguard.replay.totals import wilson

_SHOWN: Final = 5
_SOURCES: Final = 1_000


@dataclass(slots=True)
class Share:
    """Recordings with one label under one policy."""

    recordings: int = 0
    nudged: int = 0
    refused: int = 0
    stopped: int = 0
    tokens: int = 0
    nano: int = 0

    def add(self, outcome: RecordingOutcome) -> None:
        self.recordings += 1
        self.nudged += outcome.nudged
        self.refused += outcome.refused
        self.stopped += outcome.stopped
        self.tokens += outcome.tokens
        self.nano += outcome.nano

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("recordings", "nudged", "refused", "stopped")}
        return counts | {
            "stopped_interval": [round(end, 4) for end in wilson(self.stopped, self.recordings)],
            "tokens_after": self.tokens,
            "usd_after": self.nano / 1e9,
        }


@dataclass(slots=True)
class Effect:
    """The effect of a whole policy, by label."""

    by_label: dict[str, Share] = field(default_factory=lambda: {label: Share() for label in LABELS.values()})

    def add(self, success: bool | None, outcome: RecordingOutcome) -> None:
        self.by_label[LABELS[success]].add(outcome)

    def to_dict(self) -> dict[str, Any]:
        return {label: share.to_dict() for label, share in self.by_label.items()}


@dataclass(slots=True)
class LimitEffect:
    """The effect of one limit added to the current rules: recordings that it stops, or whose answers it shortens."""

    by_label: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LABELS.values(), 0))
    tokens: int = 0  # after its stops
    nano: int = 0
    successes: list[str] = field(default_factory=list)  # the first ones
    stopped_by_source: Counter[str] = field(default_factory=Counter)  # successful ones
    by_source: Counter[str] = field(default_factory=Counter)  # all successful ones, affected or not

    def add(self, name: str, source: str, success: bool | None, outcome: RecordingOutcome) -> None:
        if success and (source in self.by_source or len(self.by_source) < _SOURCES):
            self.by_source[source] += 1
            self.stopped_by_source[source] += outcome.acted
        if not outcome.acted:
            return
        self.by_label[LABELS[success]] += 1
        self.tokens += outcome.its_tokens
        self.nano += outcome.its_nano
        if success and len(self.successes) < _SHOWN:
            self.successes.append(name)

    @property
    def recordings(self) -> int:
        return sum(self.by_label.values())

    @property
    def apart(self) -> list[str]:
        """Sources in which it affects most successful recordings: another kind of work than the rest."""
        hit = self.stopped_by_source
        return [
            source
            for source, many in self.by_source.items()
            if len(self.by_source) > 1 and hit[source] > 1 and 2 * hit[source] > many
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "apart": self.apart,
            "recordings": self.by_label,
            "tokens_after": self.tokens,
            "usd_after": self.nano / 1e9,
            "successful": self.successes,
        }


@dataclass(slots=True)
class HeldOut:
    """Stops on the half of the recordings that a setting was not fitted to, both ways.

    Counts only runs that should not be stopped: successful, or else unlabelled.
    """

    fitted: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # settings for which half of the runs were too few
    # recordings, stopped, stopped before
    by_label: dict[str, list[int]] = field(default_factory=lambda: {label: [0, 0, 0] for label in LABELS.values()})

    @classmethod
    def of(cls, halves: list[dict[str, Any]], whole: dict[str, Any]) -> "HeldOut":
        return cls(halves, [name for name in whole if name != "rules" and any(name not in half for half in halves)])

    def add(self, success: bool | None, now: RecordingOutcome, outcome: RecordingOutcome) -> None:
        counts = self.by_label[LABELS[success]]
        counts[0] += 1
        counts[1] += outcome.stopped
        counts[2] += now.stopped

    def words(self) -> str:
        label = "success" if self.by_label["success"][0] else "unlabelled"
        runs, stopped, before = self.by_label[label]
        low, high = wilson(stopped, runs)
        named = "successful" if label == "success" else "unlabelled"
        text = (
            f"of {runs} held-out {named} recordings {stopped} would have been stopped ({low:.1%} to {high:.1%}); "
            f"{before} with the present settings"
        )
        if self.missing:
            text += f". Not checked, half of the runs are too few: {', '.join(self.missing)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        by_label = {
            label: {"recordings": counts[0], "stopped": counts[1], "stopped_now": counts[2]}
            for label, counts in self.by_label.items()
        }
        return {**by_label, "fitted_on_halves": self.fitted, "not_checked": self.missing}
