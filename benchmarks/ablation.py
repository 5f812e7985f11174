"""What each detector is good for: the benchmark once more without it.

    python benchmarks/ablation.py RUNS              # a table for benchmarks/ablation.md
    python benchmarks/ablation.py RUNS --workers 2

A detector is switched off by itself, also where several share the rungs of one rule. Detectors that are off by default
are not tried: they act only under a keyword that a user gives.
"""

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detection import _lines
from made_up import HEALTHY, LOOPS
from replays import Run, Verdict, by_runguard, turn_tokens
from runguard.core.rules import agents, failures, repetition
from runguard.policy import Policy
from runguard.replay.player import Judge

_NEVER = 10**9
_MODULES = (repetition, failures, agents)
# off by default, and the keyword that asks for each
ASKED_FOR = {
    "Cycle": "cycle_repeats",
    "HandOffRounds": "cycle_repeats",
    "EqualAnswers": "max_identical_tool_results",
    "ReEntry": "max_reentries",
}


def detectors() -> dict[str, type]:
    """The detectors of loops and failures that a default policy has, by name."""
    return {
        name: kind
        for module in _MODULES
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and hasattr(kind, "observe")
        and kind.__module__ == module.__name__
        and name not in ASKED_FOR
    }


@contextmanager
def without(kind: Any) -> Iterator[None]:
    """Let one detector see everything and find nothing."""
    if kind is None:
        yield
        return
    is_inherited, before = "observe" not in vars(kind), kind.observe
    heirs: list[Any] = [heir for heir in kind.__subclasses__() if "observe" not in vars(heir)]
    for heir in heirs:
        heir.observe = before
    kind.observe = lambda self, event: None
    try:
        yield
    finally:
        for heir in heirs:
            del heir.observe
        if is_inherited:
            del kind.observe
        else:
            kind.observe = before


@dataclass(slots=True)
class Outcome:
    """What one set of detectors did to all runs."""

    ok: dict[str, set[str]] = field(default_factory=lambda: {"S": set(), "b": set(), "n": set(), ".": set()})
    failed: dict[str, set[str]] = field(default_factory=lambda: {"S": set(), "b": set(), "n": set(), ".": set()})
    tokens: int = 0
    saved: int = 0
    letters: dict[str, str] = field(default_factory=dict)  # made-up runs
    turns: dict[str, int] = field(default_factory=dict)  # of a loop, until the first word about it

    def add(self, run: Run, verdict: Verdict) -> None:
        if run.get("success") is None:
            return
        (self.ok if run["success"] else self.failed)[verdict.letter].add(run["id"])
        if not run["success"]:
            tokens = turn_tokens(run)
            self.tokens += sum(tokens)
            self.saved += 0 if verdict.hard is None else sum(tokens[verdict.hard :])

    def count(self, group: str, letters: str) -> int:
        return sum(len(getattr(self, group)[letter]) for letter in letters)


def outcome(name: str, folder: Path) -> Outcome:
    kind = detectors().get(name)
    found = Outcome()
    with without(kind):
        judge = Judge(Policy.validated({}, ""))
        for line in _lines(folder):
            run = json.loads(line)
            found.add(run, by_runguard(judge, run))
        for shape in (*LOOPS.values(), *HEALTHY.values()):
            verdict = by_runguard(Judge(Policy.validated({"tools": shape.tools}, "")), shape.run())
            found.letters[shape.name] = verdict.letter
            found.turns[shape.name] = min((turn for turn in (verdict.nudge, verdict.hard) if turn), default=_NEVER)
    return found


def table(found: dict[str, Outcome]) -> str:
    whole = found[""]
    heads = ["without", "ok: touched / nudged", "failed: touched / noticed", "% of failed tokens saved"]
    heads += ["made-up loops that come off weaker", "noticed later", "look-alikes left in peace"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, one in found.items():
        weaker = [shape for shape in LOOPS_NAMES if _rank(one.letters[shape]) < _rank(whole.letters[shape])]
        calmer = sum(_rank(one.letters[shape]) < _rank(whole.letters[shape]) for shape in HEALTHY_NAMES)
        later = sum(one.turns[shape] > whole.turns[shape] for shape in LOOPS_NAMES)
        told = "; ".join(f"{shape} {whole.letters[shape]}→{one.letters[shape]}" for shape in weaker[:_SHOWN])
        cells = [
            name or "**nothing**",
            f"{one.count('ok', 'Sb')} / {one.count('ok', 'n')}",
            f"{one.count('failed', 'Sb')} / {one.count('failed', 'Sbn')}",
            f"{100 * one.saved / max(one.tokens, 1):.2f}",
            f"{len(weaker)}: {told}{', …' if len(weaker) > _SHOWN else ''}" if weaker else "none",
            str(later),
            str(calmer),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


_SHOWN = 4
LOOPS_NAMES = [shape.name for shape in LOOPS.values()]
HEALTHY_NAMES = [shape.name for shape in HEALTHY.values()]


def _rank(letter: str) -> int:
    return ".nbS".index(letter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of recorded runs")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    names = ["", *detectors()]
    with ProcessPoolExecutor(options.workers) as pool:
        found = dict(zip(names, pool.map(outcome, names, [options.runs] * len(names)), strict=True))
    print(table(found))
    off = "; ".join(f"{name} (`{keyword}=`)" for name, keyword in ASKED_FOR.items())
    print(f"\nOff by default, so nothing here depends on them: {off}.")


if __name__ == "__main__":
    main()
