"""Which runs are stopped: made-up ones and recorded ones, by RunGuard's defaults and by the loop detectors of other
agents.

    python benchmarks/detection.py                            # the made-up runs only
    python benchmarks/detection.py RUNS                       # and a folder of recorded runs (*.jsonl or *.jsonl.gz)
    python benchmarks/detection.py RUNS --without stall       # what is lost without one rule; 'each' for all in turn
    python benchmarks/detection.py RUNS --curve FILE.svg      # other limits, drawn into a file
    python benchmarks/detection.py RUNS --page                # the figures written into the two pages

"hard" is a refused call or a stop; "ok" and "failed" are the recorded outcomes; "saved" is the share of all tokens of
failed runs that come after the first hard action / after the stop. In brackets: 95 % intervals, Wilson's for rates, a
bootstrap over the runs of each source for shares.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from detection_curve import SETTINGS, draw
from detection_figures import GROUPS, OWN, Judged, hand_labelled, lines
from detection_page import write
from detection_report import Report
from made_up import HEALTHY, LOOPS
from replays import Run, Verdict, by_rival, by_runguard, turn_tokens
from rivals import RIVALS
from runguard.policy import Policy
from runguard.policy.settings import RULES
from runguard.replay.player import Judge
from runguard.replay.steps import Faults, lines_of
from shapes import Declared

LIMITS = {"tool_calls": "max_tool_calls", "depth": "max_delegation_depth"}  # rules that are switched off by a keyword
VERDICTS = Path(__file__).with_name("verdicts.toml")
Settings = dict[str, dict[str, Any]]  # name -> keywords of a policy
_detectors: dict[str, Callable[[Run], Verdict]] = {}


def settings(without: list[str], curve: bool) -> Settings:
    """RunGuard's defaults, and what they are compared with."""
    named: Settings = {OWN: {}}
    for rule in RULES if "each" in without else without:
        named[f"{OWN} without {rule}"] = {LIMITS[rule]: None} if rule in LIMITS else {"rules": {rule: False}}
    return named | (SETTINGS if curve else {})


def detectors(named: Settings, tools: Declared | None = None) -> dict[str, Callable[[Run], Verdict]]:
    """Each run meets a fresh guard, or a fresh rival."""
    out: dict[str, Callable[[Run], Verdict]] = {}
    for name, values in named.items():
        out[name] = partial(by_runguard, Judge(Policy.validated({**values, "tools": tools or {}}, "")))
    for name, make in RIVALS.items():
        out[name] = lambda run, make=make: by_rival(make(), run)  # type: ignore[misc]
    return out


def made_up(named: Settings) -> dict[str, dict[str, dict[str, Verdict]]]:
    """kind -> shape -> detector -> verdict."""
    found: dict[str, dict[str, dict[str, Verdict]]] = {}
    for kind, shapes in {"loops": LOOPS, "look-alikes": HEALTHY}.items():
        found[kind] = {}
        for shape in shapes.values():
            run = shape.run()
            found[kind][shape.name] = {name: ask(run) for name, ask in detectors(named, shape.tools).items()}
    return found


def recorded(folder: Path, named: Settings, workers: int) -> list[Judged]:
    if workers == 1:
        _prepare(named)
        runs = [_judge(line) for line in _lines(folder)]
    else:
        with ProcessPoolExecutor(workers, initializer=_prepare, initargs=(named,)) as pool:
            runs = list(pool.map(_judge, _lines(folder), chunksize=16))
    if not runs:
        raise SystemExit(f"{folder}: no *.jsonl or *.jsonl.gz with runs in it; give the folder that holds them")
    return runs


def _lines(folder: Path) -> Iterator[bytes]:
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        for _, line in lines_of(path, Faults()):
            yield line


def _prepare(named: Settings) -> None:
    _detectors.clear()
    _detectors.update(detectors(named))


def _judge(line: bytes) -> Judged:
    run = json.loads(line)
    facts = (run.get("source") or "", run.get("success"), run.get("capped"))
    return Judged(run["id"], *facts, turn_tokens(run), {name: ask(run) for name, ask in _detectors.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, help="folder of recorded runs")
    parser.add_argument(
        "--without",
        metavar="RULE",
        action="append",
        default=[],
        choices=[*RULES, *LIMITS, "each"],
        help="drop a rule; may be repeated",
    )
    parser.add_argument(
        "--curve",
        metavar="SVG",
        nargs="?",
        const="",
        help="other rungs of repetition and stall, beside the defaults; drawn into this file",
    )
    parser.add_argument("--page", action="store_true", help="write the figures into the pages")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    told = parser.add_mutually_exclusive_group()
    told.add_argument("--json", action="store_true", help="machine-readable")
    told.add_argument("--markdown", action="store_true", help="tables for a page")
    options = parser.parse_args()
    if options.curve is not None and options.runs is None:
        parser.error("--curve needs a folder of recorded runs")
    named = settings(options.without, options.curve is not None)
    report = Report(markdown=options.markdown)
    runs = recorded(options.runs, named, options.workers) if options.runs is not None else []
    shapes = made_up(named)
    report.made_up(shapes)
    result: dict[str, Any] = {
        "made_up": {
            kind: {s: {n: v.letter for n, v in by.items()} for s, by in found.items()} for kind, found in shapes.items()
        },
        "soon": _soon(by[OWN] for by in shapes["loops"].values()),
    }
    if options.runs is not None:
        result |= report_recorded(report, runs, options.runs)
        if options.curve:
            Path(options.curve).write_text(draw(lines(runs, 1)), encoding="utf-8")
        if options.page:
            write(result)
    print(json.dumps(result, indent=1) if options.json else report.text())


def _soon(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """At which step half of the loops had the first word, and half of those that were stopped had ended."""
    found = list(verdicts)
    words = [min(turn for turn in (one.nudge, one.hard) if turn is not None) for one in found if one.letter != "."]
    return {"word": int(median(words)), "stop": int(median([one.stop for one in found if one.stop is not None]))}


def report_recorded(report: Report, runs: list[Judged], folder: Path) -> dict[str, Any]:
    groups = {}
    for title, belongs in GROUPS.items():
        members = [run for run in runs if belongs(run)]
        if members:
            groups[title] = lines(members)
            report.group(title, members, groups[title])
    read = tomllib.loads(VERDICTS.read_text(encoding="utf-8"))
    touched = [run for run in runs if run.success is True and run.verdicts[OWN].hard is not None]
    report.touched(touched, read)
    labels = folder / "manual_labels.json"
    by_hand = hand_labelled(runs, json.loads(labels.read_text(encoding="utf-8"))) if labels.is_file() else {}
    report.by_hand(by_hand)
    return {
        "groups": {title: {name: asdict(line) for name, line in found.items()} for title, found in groups.items()},
        "successful_runs_touched": [
            {"id": r.id, "story": r.verdicts[OWN].story, "read": read.get(r.id)} for r in touched
        ],
        "successful_runs_nudged": [
            {"id": r.id, "story": r.verdicts[OWN].story}
            for r in runs
            if r.success is True and r.verdicts[OWN].nudge is not None
        ],
        "hand_labels": by_hand,
    }


if __name__ == "__main__":
    main()
