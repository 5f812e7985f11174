"""The figures that a gate compares with: those of an earlier gate, kept in a small JSON file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from runguard.core.exceptions import RunGuardError
from runguard.gate.cost_per_success import Cost, Sums, interval
from runguard.replay.results import RunResult

FORMAT: Final = 1
_LISTED: Final = 10_000  # runs whose figures are kept one by one
_UNITS: Final = ("usd", "tokens")


class BaselineError(RunGuardError):
    """A baseline file cannot be used; the message says why."""


@dataclass(slots=True)
class Baseline:
    """Sums in both units, and the figures of each run while there are few.

    A run counts with what it spends up to the stop that the policy would make.
    """

    usd: Sums = field(default_factory=Sums)  # in nano-USD
    tokens: Sums = field(default_factory=Sums)
    unpriced: int = 0  # model calls without a price
    listed: dict[str, tuple[int, int, bool]] | None = field(default_factory=dict)  # id: nano-USD, tokens, success

    def add(self, run: RunResult, is_success: bool) -> None:
        """Add a run; ``is_success`` is false for a run that the policy would have stopped."""
        nano, tokens = run.nano - run.saved.nano, run.tokens - run.saved.tokens
        self.usd.add(nano, is_success)
        self.tokens.add(tokens, is_success)
        self.unpriced += run.unpriced
        if self.listed is not None:
            if run.id in self.listed or len(self.listed) >= _LISTED:
                self.listed = None  # too many, or ids that name no run: compare sums only
            else:
                self.listed[run.id] = (nano, tokens, is_success)

    @property
    def unit(self) -> str:
        """The unit to compare: dollars, unless a call has no price or nothing has a cost."""
        return "tokens" if self.unpriced or not self.usd.cost else "usd"

    def sums(self, unit: str) -> Sums:
        return self.usd if unit == "usd" else self.tokens

    def costs(self, unit: str) -> Mapping[str, Cost]:
        """Return the cost of each run by its id; empty if they are not kept."""
        place = _UNITS.index(unit)
        return {name: (figures[place], figures[2]) for name, figures in (self.listed or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        sums = self.sums(self.unit)
        low, high = interval(sums) if sums.cost and sums.successes else (None, None)
        return {
            "runguard_gate": FORMAT,
            "unit": self.unit,
            "runs": sums.runs,
            "successes": sums.successes,
            "per_success": _shown(sums.per_success if sums.successes else None, self.unit),
            "interval": [_shown(low, self.unit), _shown(high, self.unit)],
            "sums": {"usd": asdict(self.usd), "tokens": asdict(self.tokens), "unpriced": self.unpriced},
            "listed": self.listed and {name: list(figures) for name, figures in sorted(self.listed.items())},
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8", errors="replace")

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read a file that ``write`` wrote; raise BaselineError for anything else."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BaselineError(f"{path}: no such file; create it with --update-baseline") from None
        except (OSError, ValueError) as error:
            raise BaselineError(f"{path}: cannot be read: {error}") from None
        try:
            if data["runguard_gate"] != FORMAT:
                raise BaselineError(
                    f"{path}: format {data['runguard_gate']!r}, this version reads {FORMAT}; "
                    "create it again with --update-baseline"
                )
            sums, listed = data["sums"], data["listed"]
            found = cls(
                Sums(**{name: _whole(value) for name, value in sums["usd"].items()}),
                Sums(**{name: _whole(value) for name, value in sums["tokens"].items()}),
                _whole(sums["unpriced"]),
                {name: (_whole(usd), _whole(tokens), bool(ok)) for name, (usd, tokens, ok) in listed.items()}
                if listed is not None
                else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BaselineError(f"{path}: not a baseline of runguard gate; create it with --update-baseline") from None
        if not found.sums(found.unit).successes:
            raise BaselineError(f"{path}: contains no successful run; create it again with --update-baseline")
        return found


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _shown(value: float | None, unit: str) -> float | None:
    """Return a readable figure: dollars to six digits, or whole tokens."""
    if value is None:
        return None
    return float(f"{value / 1e9:.6g}") if unit == "usd" else float(round(value))
