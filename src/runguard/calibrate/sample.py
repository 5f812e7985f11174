"""The numbers of every recording as long as there is room, a uniform sample of them beyond: memory does not grow with
their number.
"""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Final

from runguard.calibrate.meter import Took

KEPT: Final = 100_000  # recordings of one label and half
LABELS: Final = {True: "success", False: "failure", None: "unlabelled"}
HALVES: Final = (0, 1)
_WIDTH: Final = len(Took._fields)


def half_of(name: str) -> int:
    """Which half of the recordings one belongs to: by its id, so that neither order nor processes matter."""
    return blake2b(name.encode("utf-8", "replace"), digest_size=1).digest()[0] & 1


class Sample:
    """Numbers of recordings, each as likely to be kept as any other."""

    def __init__(self, most: int = KEPT) -> None:
        self.seen = self.runs = 0
        self._most, self._random, self._cells = most, Random(0), array("d")

    def __len__(self) -> int:
        return len(self._cells) // _WIDTH

    def add(self, took: Took, runs: int = 1) -> None:
        self.seen += 1
        self.runs += runs
        if len(self) < self._most:
            self._cells.extend(took)
        elif (place := self._random.randrange(self.seen)) < self._most:
            self._cells[place * _WIDTH : (place + 1) * _WIDTH] = array("d", took)

    def column(self, name: str) -> list[float]:
        """What is known of it."""
        return [value for value in self._cells[Took._fields.index(name) :: _WIDTH] if value == value]


@dataclass(slots=True)
class Basis:
    """The recordings that limits are drawn from."""

    kind: str  # "successful", "successful and unlabelled" or "unlabelled"
    samples: list[Sample]
    halves: tuple[int, ...]

    @property
    def recordings(self) -> int:
        return sum(sample.seen for sample in self.samples)

    @property
    def runs(self) -> int:
        return sum(sample.runs for sample in self.samples)

    @property
    def is_sampled(self) -> bool:
        return any(len(sample) < sample.seen for sample in self.samples)

    def column(self, name: str) -> list[float]:
        return [value for sample in self.samples for value in sample.column(name)]


@dataclass(slots=True)
class Samples:
    """By label and half."""

    by: dict[tuple[str, int], Sample] = field(
        default_factory=lambda: {(label, half): Sample() for label in LABELS.values() for half in HALVES}
    )

    def add(self, success: bool | None, half: int, took: Took, runs: int) -> None:
        self.by[LABELS[success], half].add(took, runs)

    def recordings(self, label: str) -> int:
        return sum(self.by[label, half].seen for half in HALVES)

    def runs(self, label: str) -> int:
        return sum(self.by[label, half].runs for half in HALVES)

    def basis(self, needed: int, halves: tuple[int, ...] = HALVES) -> Basis:
        """What went well; where too little is labelled, what is not known to have failed.

        Never what has failed: it may be a runaway.
        """
        successful, unlabelled = self.recordings("success"), self.recordings("unlabelled")
        if not successful:
            labels = ["unlabelled"]
        elif successful >= needed or successful + unlabelled < needed or not unlabelled:
            labels = ["success"]
        else:
            labels = ["success", "unlabelled"]
        kind = " and ".join("successful" if label == "success" else label for label in labels)
        return Basis(kind, [self.by[label, half] for label in labels for half in halves], halves)
