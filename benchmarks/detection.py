"""Which runs are stopped: recorded ones and made-up ones, by RunGuard's defaults and by other detectors.

    python benchmarks/detection.py                                   # the made-up shapes only
    python benchmarks/detection.py RUNS                              # and a folder of recorded runs (*.jsonl.gz)
    python benchmarks/detection.py RUNS --rivals DIR                 # beside the detectors of a package
    python benchmarks/detection.py RUNS --without repetition         # what is lost when one rule is dropped; 'each' for all in turn

"hard" is a refused call or a stop; "ok" and "failed" are the recorded outcomes; "saved" is the share of all model turns (tokens) of
failed runs that come after the first hard action / after the stop. In brackets: Wilson 95 % intervals.
"""

import argparse
import gzip
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from math import sqrt
from pathlib import Path
from typing import Any

import shapes
from replays import Verdict, by_rival, by_runguard, steps_of, turn_tokens
from runguard.policy import RULES, Policy

OWN = "runguard"
LIMITS = {"tool_calls": "max_tool_calls", "depth": "max_delegation_depth"}  # rules that are switched off by a keyword
_judges: dict[str, Callable[[list[dict[str, Any]]], Verdict]] = {}


# ---- detectors ------------------------------------------------------------------------------------------------------


def policy(without: str = "", tools: dict[str, dict[str, bool]] | None = None) -> Policy:
    values: dict[str, Any] = {"tools": tools or {}}
    if without in LIMITS:
        values[LIMITS[without]] = None
    elif without:
        values["rules"] = {without: False}
    return Policy.validated(values, "")


def rival_detectors(folder: str | None) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, class, keywords) of every variant that the modules of a package list."""
    if not folder:
        return
    package = Path(folder).resolve()
    if str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))
    for path in sorted(package.glob("[a-z]*.py")):
        module = importlib.import_module(f"{package.name}.{path.stem}")
        for variant, keywords in getattr(module, "VARIANTS", {}).items():
            yield f"{path.stem}/{variant}", module.Detector, keywords


def prepare(rivals: str | None, without: Iterable[str]) -> None:
    """In every worker: one judge per detector. Each run meets a fresh one."""
    own = {OWN: policy(), **{f"{OWN} without {rule}": policy(rule) for rule in without}}
    for name, values in own.items():
        _judges[name] = lambda steps, values=values: by_runguard(values, steps)
    for name, kind, keywords in rival_detectors(rivals):
        _judges[name] = lambda steps, kind=kind, keywords=keywords: by_rival(kind(**keywords), steps)


# ---- recorded runs --------------------------------------------------------------------------------------------------


def judge(line: bytes) -> dict[str, Any]:
    run = json.loads(line)
    steps = steps_of(run)
    tokens = turn_tokens(steps)
    row = {key: run.get(key) for key in ("id", "source", "success", "capped")}
    row |= {"turns": len(tokens), "tokens": sum(tokens), "verdicts": {}}
    for name, ask in _judges.items():
        verdict = ask(steps)
        row["verdicts"][name] = {
            "nudge": verdict.nudge,
            "hard": verdict.hard,
            "stop": verdict.stop,
            "tokens_after_hard": 0 if verdict.hard is None else sum(tokens[verdict.hard :]),
            "tokens_after_stop": 0 if verdict.stop is None else sum(tokens[verdict.stop :]),
            "story": verdict.story if name.startswith(OWN) else verdict.story[-1:],
        }
    return row


def lines(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rb") as file:
            yield from file


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    if not total:
        return 0.0, 1.0
    share, spread = hits / total, z * z / total
    middle, half = share + spread / 2, z * sqrt(share * (1 - share) / total + spread / total / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """One line of a table."""
    out: dict[str, Any] = {}
    groups = {"ok": [r for r in rows if r["success"] is True], "failed": [r for r in rows if r["success"] is False]}
    for group, members in groups.items():
        for what in ("stop", "hard", "nudge"):
            hits = sum(r["verdicts"][name][what] is not None for r in members)
            out[f"{group}_{what}"] = {"hits": hits, "of": len(members), "interval": wilson(hits, len(members))}
    failed = groups["failed"]
    for what in ("hard", "stop"):
        turns = sum(r["turns"] - r["verdicts"][name][what] for r in failed if r["verdicts"][name][what] is not None)
        out[f"turns_saved_{what}"] = turns / max(1, sum(r["turns"] for r in failed))
        out[f"tokens_saved_{what}"] = sum(r["verdicts"][name][f"tokens_after_{what}"] for r in failed) / max(1, sum(r["tokens"] for r in failed))
    return out


GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all runs": lambda r: True,
    "without InterCode": lambda r: r["source"] != "intercode",
    "InterCode alone": lambda r: r["source"] == "intercode",
    "capped failures, without InterCode": lambda r: r["success"] is False and r["capped"] is True and r["source"] != "intercode",
    "capped failures, InterCode alone": lambda r: r["success"] is False and r["capped"] is True and r["source"] == "intercode",
}


def rate(cell: dict[str, Any]) -> str:
    if not cell["of"]:
        return "-"
    low, high = cell["interval"]
    return f"{cell['hits']} = {100 * cell['hits'] / cell['of']:.1f} % [{100 * low:.1f}-{100 * high:.1f}]"


def table(title: str, rows: list[dict[str, Any]], summaries: dict[str, dict[str, Any]]) -> None:
    counts = {kind: sum(r["success"] is kind for r in rows) for kind in (True, False)}
    print(f"\n## {title}: {len(rows)} runs, {counts[True]} ok, {counts[False]} failed, {sum(r['turns'] for r in rows)} model turns")
    columns = [*(["ok_stop", "ok_hard", "ok_nudge"] if counts[True] else []), "failed_stop", "failed_hard"]
    print(f"| detector | {' | '.join(c.replace('_', ' ') for c in columns)} | turns saved hard / stop | tokens saved hard / stop |")
    print("|---" * (len(columns) + 3) + "|")
    for name, s in summaries.items():
        cells = [rate(s[column]) for column in columns]
        saved = [f"{100 * s[f'{unit}_saved_hard']:.1f} / {100 * s[f'{unit}_saved_stop']:.1f} %" for unit in ("turns", "tokens")]
        print(f"| {' | '.join([name, *cells, *saved])} |")


def recorded(folder: Path, rivals: str | None, without: list[str], as_json: bool) -> dict[str, Any]:
    with ProcessPoolExecutor(initializer=prepare, initargs=(rivals, without)) as pool:
        rows = list(pool.map(judge, lines(folder), chunksize=16))
    if not rows:
        raise SystemExit(f"{folder}: no *.jsonl.gz with runs in it")
    tables = {}
    for title, belongs in GROUPS.items():
        members = [r for r in rows if belongs(r)]
        if members:
            tables[title] = {name: summary(members, name) for name in rows[0]["verdicts"]}
            if not as_json:
                table(title, members, tables[title])
    touched = [r for r in rows if r["success"] is True and r["verdicts"][OWN]["hard"] is not None]
    labels = hand_labels(folder, rows)
    if not as_json:
        print("\n## Successful runs that RunGuard would stop (or refuse a call of): read each before calling it a false stop")
        for r in touched:
            print(f"- {r['id']}, {r['turns']} turns: {'; '.join(r['verdicts'][OWN]['story'])}")
        show_labels(labels)
    return {"tables": tables, "successful_runs_touched": touched, "hand_labels": labels}


def hand_labels(folder: Path, rows: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """verdict of a human reader -> detector -> [runs, hard, any action]; from manual_labels.json, if it is there."""
    path = folder / "manual_labels.json"
    if not path.is_file():
        return {}
    said = {entry["id"]: entry["verdict"] for entry in json.loads(path.read_text(encoding="utf-8"))}
    out: dict[str, dict[str, list[int]]] = {}
    for r in rows:
        if r["id"] in said:
            for name, v in r["verdicts"].items():
                cell = out.setdefault(said[r["id"]], {}).setdefault(name, [0, 0, 0])
                cell[0] += 1
                cell[1] += v["hard"] is not None
                cell[2] += v["hard"] is not None or v["nudge"] is not None
    return out


def show_labels(labels: dict[str, dict[str, list[int]]]) -> None:
    if not labels:
        return
    print("\n## Hand-labelled runs: hard action (any action)")
    print(f"| detector | {' | '.join(f'{word} ({next(iter(cells.values()))[0]})' for word, cells in labels.items())} |")
    print("|---" * (len(labels) + 1) + "|")
    for name in next(iter(labels.values())):
        print(f"| {name} | {' | '.join(f'{cells[name][1]} ({cells[name][2]})' for cells in labels.values())} |")


# ---- made-up runs ---------------------------------------------------------------------------------------------------


def letter(verdict: Verdict) -> str:
    """S stopped (or handed to a human), b refused a call, n nudged, . left alone."""
    return "S" if verdict.stop is not None else "b" if verdict.hard is not None else "n" if verdict.nudge is not None else "."


def synthetic(rivals: str | None, without: list[str], as_json: bool) -> dict[str, Any]:
    kinds = {"loops": shapes.LOOPS, "healthy": shapes.HEALTHY}
    out: dict[str, Any] = {"shapes": {}, "detectors": {}}
    for kind, members in kinds.items():
        if not as_json:
            print(f"\n## Made-up {kind}: what RunGuard does")
        for number, (name, make) in enumerate(members.items(), 1):
            verdict = by_runguard(policy(tools=shapes.DECLARED.get(name)), list(make()))
            out["shapes"][name] = {"kind": kind, "letter": letter(verdict), "story": verdict.story}
            if not as_json:
                print(f"{number:3} {letter(verdict)} {name}{': ' if verdict.story else ''}{'; '.join(verdict.story)}")
    detectors: dict[str, Callable[[list[dict[str, Any]], str], Verdict]] = {
        OWN: lambda steps, name: by_runguard(policy(tools=shapes.DECLARED.get(name)), steps)
    }
    for rule in without:
        detectors[f"{OWN} without {rule}"] = lambda steps, name, rule=rule: by_runguard(policy(rule, shapes.DECLARED.get(name)), steps)
    for label, cls, keywords in rival_detectors(rivals):
        detectors[label] = lambda steps, name, cls=cls, keywords=keywords: by_rival(cls(**keywords), steps)
    if not as_json:
        print(f"\n## Made-up runs, one letter each in the order above ({letter.__doc__})")
        print("| detector | loops | S / b / n | loop turns saved by S | healthy | S / b / n |\n|---|---|---|---|---|---|")
    turns = {name: sum(step["kind"] == "model" for step in make()) for name, make in shapes.LOOPS.items()}
    for label, ask in detectors.items():
        verdicts = {kind: {name: ask(list(make()), name) for name, make in members.items()} for kind, members in kinds.items()}
        words = {kind: "".join(letter(v) for v in found.values()) for kind, found in verdicts.items()}
        saved = sum(turns[name] - v.stop for name, v in verdicts["loops"].items() if v.stop is not None) / sum(turns.values())
        out["detectors"][label] = {**words, "loop_turns_saved": saved}
        if not as_json:
            cells = [f"`{word}` | {word.count('S')} / {word.count('b')} / {word.count('n')}" for word in words.values()]
            print(f"| {label} | {cells[0]} | {100 * saved:.0f} % | {cells[1]} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, help="folder of *.jsonl.gz")
    parser.add_argument("--rivals", metavar="DIR", help="package of detectors: one module each, with Detector and VARIANTS")
    parser.add_argument("--without", metavar="RULE", action="append", default=[], choices=[*RULES, *LIMITS, "each"], help="drop a rule; may be repeated")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    without = list(RULES) if "each" in options.without else options.without
    result = {"synthetic": synthetic(options.rivals, without, options.json)}
    if options.runs:
        result["recorded"] = recorded(options.runs, options.rivals, without, options.json)
    if options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
