"""A cumulative token budget as a value: ``BudgetPolicy`` describes it, ``BudgetMonitor`` counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from runguard.accounting.cumulative import BudgetMonitor, whole_number
from runguard.core.errors import Checked, InvalidValueError
from runguard.core.money import Threshold, ThresholdAction


@dataclass(frozen=True, slots=True)
class BudgetPolicy(metaclass=Checked):
    """A token budget as a value: hashable, comparable, safe to share. Each ``build_monitor()`` counts for itself.

    It describes a ``BudgetMonitor``. To refuse calls before they are made, in dollars, tokens or calls per user and
    window, use ``Budget``.
    """

    max_tokens: int = 200_000
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        whole_number(self.max_tokens, "max_tokens", least=1)
        object.__setattr__(self, "thresholds", tuple(self.thresholds))  # a list would make it unhashable
        for threshold in self.thresholds:
            if not isinstance(threshold, Threshold):
                raise InvalidValueError(f"thresholds must be Threshold objects, not {threshold!r}")
            if threshold.model is not None:
                raise InvalidValueError("Threshold(model=…) belongs to a Budget: a BudgetPolicy only counts tokens")

    def build_monitor(self) -> BudgetMonitor:
        """A fresh count under this policy."""
        monitor = BudgetMonitor(self.max_tokens)
        for threshold in self.thresholds:
            monitor.add_threshold(threshold)
        return monitor

    def with_threshold(
        self,
        percent: float,
        callback: Callable[[Any], Any] | None = None,
        *,
        recurring: bool = False,
        action: ThresholdAction = "warn",
    ) -> "BudgetPolicy":
        """A copy with one threshold more."""
        return replace(self, thresholds=(*self.thresholds, Threshold(percent, callback, recurring, action)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Callbacks become import paths; a lambda or closure has none and is a ValueError."""
        return {"max_tokens": self.max_tokens, "thresholds": [threshold.to_dict() for threshold in self.thresholds]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The way back. It imports the modules that callbacks name: read only data that you trust."""
        if not isinstance(data, Mapping):
            raise InvalidValueError(f"a budget policy must be a mapping, not {data!r}")
        if unknown := sorted(str(key) for key in data if key not in ("max_tokens", "thresholds")):
            raise InvalidValueError(f"unknown in a budget policy: {', '.join(unknown)}")
        listed = data.get("thresholds") or ()
        if not isinstance(listed, list | tuple):
            raise InvalidValueError(f"thresholds must be a list, not {listed!r}")
        thresholds = []
        for number, entry in enumerate(listed):
            try:
                thresholds.append(Threshold.from_dict(entry))
            except ValueError as error:
                raise InvalidValueError(f"thresholds[{number}]: {error}") from error
        return cls(data.get("max_tokens", 200_000), tuple(thresholds))
