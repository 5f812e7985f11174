"""From judged runs to figures: rates with Wilson intervals,
token shares with a bootstrap over the runs of each source.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from typing import Any

from replays import Verdict

OWN = "RunGuard"
DRAWS = 1_000
SEED = 20_261_115
Interval = tuple[float, float]


@dataclass(slots=True)
class Judged:
    """One recorded run and what every detector would have done to it."""

    id: str
    source: str
    success: bool | None
    capped: bool | None
    tokens: list[int]  # per model turn
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def after(self, name: str, what: str) -> int:
        """Tokens spent after the first ``hard`` action, or after the ``stop``, of a detector."""
        turn = getattr(self.verdicts[name], what)
        return 0 if turn is None else sum(self.tokens[turn:])


@dataclass(frozen=True, slots=True)
class Rate:
    hits: int
    of: int
    interval: Interval


@dataclass(frozen=True, slots=True)
class Share:
    """A share of all tokens of the failed runs, and how much less that is than RunGuard's."""

    value: float
    interval: Interval
    own_minus_this: Interval


@dataclass(frozen=True, slots=True)
class Line:
    """One detector on one group of runs."""

    rates: dict[str, Rate]  # "ok stop", "ok hard", "ok nudge", "failed stop", "failed hard", "failed nudge"
    shares: dict[str, Share]  # "hard", "stop"


GROUPS: dict[str, Callable[[Judged], bool]] = {
    "all runs": lambda run: True,
    "without InterCode": lambda run: run.source != "intercode",
    "InterCode alone": lambda run: run.source == "intercode",
    "capped failures, without InterCode": lambda run: (
        run.success is False and run.capped is True and run.source != "intercode"
    ),
    "capped failures, InterCode alone": lambda run: (
        run.success is False and run.capped is True and run.source == "intercode"
    ),
}


def wilson(hits: int, total: int, z: float = 1.96) -> Interval:
    if not total:
        return 0.0, 1.0
    share, spread = hits / total, z * z / total
    middle, half = share + spread / 2, z * sqrt(share * (1 - share) / total + spread / total / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def lines(runs: Sequence[Judged], draws: int = DRAWS) -> dict[str, Line]:
    """Every detector on these runs."""
    names = list(runs[0].verdicts)
    shares = _shares([run for run in runs if run.success is False], names, draws)
    return {name: Line(_rates(runs, name), shares[name]) for name in names}


def _rates(runs: Iterable[Judged], name: str) -> dict[str, Rate]:
    members: dict[str, list[Judged]] = {"ok": [], "failed": []}
    for run in runs:
        if run.success is not None:
            members["ok" if run.success else "failed"].append(run)
    rates = {}
    for group, its in members.items():
        for what in ("stop", "hard", "nudge"):
            hits = sum(getattr(run.verdicts[name], what) is not None for run in its)
            rates[f"{group} {what}"] = Rate(hits, len(its), wilson(hits, len(its)))
    return rates


def _shares(failed: Sequence[Judged], names: list[str], draws: int) -> dict[str, dict[str, Share]]:
    whats = ("hard", "stop")
    saved = {
        (name, what): {at: after for at, run in enumerate(failed) if (after := run.after(name, what))}
        for name in names
        for what in whats
    }
    spent = [sum(run.tokens) for run in failed]
    drawn: dict[tuple[str, str], list[float]] = {key: [] for key in saved}
    for times in _draws(failed, draws):
        total = sum(spent[at] * count for at, count in times.items()) or 1
        for key, by_run in saved.items():
            drawn[key].append(sum(tokens * times[at] for at, tokens in by_run.items()) / total)
    total = sum(spent) or 1
    out: dict[str, dict[str, Share]] = {}
    for name in names:
        out[name] = {}
        for what in whats:
            differences = [own - this for own, this in zip(drawn[OWN, what], drawn[name, what], strict=True)]
            out[name][what] = Share(
                sum(saved[name, what].values()) / total, _middle(drawn[name, what]), _middle(differences)
            )
    return out


def _draws(runs: Sequence[Judged], draws: int) -> Iterable[Counter[int]]:
    """So many samples with replacement, each source as large as it is; the same ones for every detector, so that
    differences are paired.
    """
    by_source: dict[str, list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        by_source[run.source].append(at)
    chance = Random(SEED)
    for _ in range(draws):
        yield Counter(at for members in by_source.values() for at in chance.choices(members, k=len(members)))


def _middle(values: list[float]) -> Interval:
    """The middle 95 %."""
    ordered = sorted(values)
    if not ordered:
        return 0.0, 0.0
    return ordered[int(0.025 * (len(ordered) - 1))], ordered[int(0.975 * (len(ordered) - 1))]


def better_rivals(found: dict[str, Line], what: str) -> dict[str, list[str]]:
    """Rivals that touch no more successful runs than RunGuard, ``what`` being the touch,
    and which of them save more.
    """
    own = found[OWN]
    as_careful = [
        n
        for n, line in found.items()
        if not n.startswith(OWN) and line.rates[f"ok {what}"].hits <= own.rates[f"ok {what}"].hits
    ]
    return {
        "as careful": as_careful,
        "save more": [n for n in as_careful if found[n].shares[what].value > own.shares[what].value],
    }


def hand_labelled(runs: Iterable[Judged], labels: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """What a human reader said of a run -> detector -> [runs, touched by a hard action, by any action]."""
    said = {entry["id"]: entry["verdict"] for entry in labels}
    out: dict[str, dict[str, list[int]]] = {}
    for run in runs:
        if run.id in said:
            for name, verdict in run.verdicts.items():
                cell = out.setdefault(said[run.id], {}).setdefault(name, [0, 0, 0])
                cell[0] += 1
                cell[1] += verdict.hard is not None
                cell[2] += verdict.letter != "."
    return out
