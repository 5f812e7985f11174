"""What replaying costs: runs through ``runguard.replay``, beside a bare parse of the same files.

    python benchmarks/replay.py            # 1 GB of made-up runs
    python benchmarks/replay.py --mb 64    # smaller
    python benchmarks/replay.py RUNS       # recorded runs: a file, or a folder with *.jsonl and *.jsonl.gz

CPU time per step, on one core and over all of them, and the most memory that any process held. Unpacking is part of
it. The made-up runs are four fifths healthy (new arguments, new answers of about a kilobyte, growing prompts) and one
fifth stuck in the ways the rules know.
"""

import argparse
import gzip
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.replay.results import Totals

STEPS = 60  # tool calls of a run
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
)


def made_up(number: int, dice: random.Random) -> dict[str, Any]:
    """One run: question, then model, call and answer in turn."""
    stuck = number % 5 == 0
    steps: list[dict[str, Any]] = [{"kind": "message", "agent": "user", "text": "please look into it"}]
    prompt, clock = 1_200, 1_700_000_000 + number * 3_600
    for turn in range(STEPS):
        clock += 3
        prompt += 300
        words = " ".join(dice.choices(WORDS, k=20))
        steps.append(
            {
                "kind": "model",
                "agent": "worker",
                "text": words,
                "input_tokens": prompt,
                "output_tokens": 80,
                "ts": clock,
            }
        )
        args = {"query": "the same" if stuck and turn > 20 else f"{words} {turn}", "page": 0}
        call = f"c{number}-{turn}"
        steps.append(
            {"kind": "tool_call", "agent": "worker", "tool": "search", "args": args, "call_id": call, "ts": clock}
        )
        answer = "nothing new" if stuck and turn > 20 else " ".join(dice.choices(WORDS, k=220)) + f" {number} {turn}"
        steps.append(
            {
                "kind": "tool_result",
                "agent": "worker",
                "tool": "search",
                "result": answer,
                "call_id": call,
                "ts": clock + 1,
            }
        )
    return {
        "id": f"run-{number}",
        "source": "made up",
        "model": "gpt-4o",
        "success": not stuck,
        "capped": stuck,
        "steps": steps,
    }


def write(path: Path, megabytes: int) -> None:
    dice = random.Random(7)
    number = 0
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            for _ in range(20):
                number += 1
                file.write(json.dumps(made_up(number, dice)) + "\n")


def files_of(path: Path) -> list[Path]:
    """The recordings in a folder, or the file itself."""
    return sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]


def parse(path: str) -> dict[str, float]:
    """Nothing but reading lines and parsing them."""
    steps = 0
    begin = time.process_time()
    for each in files_of(Path(path)):
        with gzip.open(each) if each.suffix == ".gz" else each.open("rb") as file:
            for line in file:
                steps += len(json.loads(line)["steps"])
    return {"cpu": time.process_time() - begin, "steps": steps, "rss_mb": _rss(resource.RUSAGE_SELF)}


def play(path: str, workers: int) -> dict[str, float]:
    begin, wall = _cpu(), time.monotonic()
    totals = Totals("")
    for batch in replay(open_sources(path), [Policy.validated({}, "")], workers=workers):
        for (result,) in batch.results:
            totals.add(result)
    rss = max(_rss(resource.RUSAGE_SELF), _rss(resource.RUSAGE_CHILDREN))
    return {
        "cpu": _cpu() - begin,
        "wall": time.monotonic() - wall,
        "steps": totals.all.steps,
        "runs": totals.all.runs,
        "stopped": totals.all.stopped,
        "rss_mb": rss,
    }


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _rss(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 1024


def apart(function: Any, *args: Any) -> dict[str, float]:
    """In a process of its own: memory is measured from nothing."""
    with get_context("spawn").Pool(1) as pool:
        found: dict[str, float] = pool.apply(function, args)
        return found


def serial(path: str) -> dict[str, float]:
    return play(path, 1)


def rows(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    yield "bare parse", apart(parse, str(path))
    yield "replay, one core", apart(serial, str(path))
    cores = os.cpu_count() or 1
    if cores > 1:
        yield f"replay, {cores} cores", play(str(path), cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="recorded runs; without it, runs are made up")
    parser.add_argument("--mb", type=int, default=1_000, help="size of the made-up runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.runs or Path(folder) / "runs.jsonl"
        if options.runs is None:
            write(path, options.mb)
        size = sum(each.stat().st_size for each in files_of(path)) / 1e6
        print(f"{path.name}: {size:.0f} MB, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for name, found in rows(path):
            wall = (
                f", {found['wall']:.1f} s by the clock, {found['runs']:.0f} runs of which "
                f"{found['stopped']:.0f} stopped"
                if "wall" in found
                else ""
            )
            print(
                f"{name:<18} {found['cpu'] / found['steps'] * 1e6:6.2f} µs of CPU per step "
                f"({found['steps']:.0f} steps){wall}; {found['rss_mb']:.0f} MB at most"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
