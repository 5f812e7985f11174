"""How far the forecasts of a run are off, on recorded runs.

    python benchmarks/forecast.py RUNS          # a folder of recorded runs (*.jsonl or *.jsonl.gz)

At the half of each run, the forecast says how many calls fit until the run has cost what it really cost in the end
(cap), and until the prompts of its agent are as large as the last one really was (window). The error is the difference
to the calls that were really made, divided by them. All tokens have the price of one model, without a cache.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from runguard.core.money import CALLS_KEPT, calls_until_size, calls_within, trend_of, was_cut
from runguard.replay.sources import run_of
from runguard.replay.steps import Asked, Faults, lines_of

INPUT, OUTPUT = 300, 2_500  # nano-USD per token
Call = tuple[str, int, int]  # agent, tokens in and out


def runs_in(folder: Path) -> Iterator[tuple[str, list[Call]]]:
    """The source and the model calls of each run."""
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        for _, line in lines_of(path, Faults()):
            run = run_of(json.loads(line), "", Faults())
            asked = [step for step in run.steps if isinstance(step, Asked)]
            yield run.source, [(step.agent, step.usage.input, step.usage.output) for step in asked if step.usage]


def cap_error(calls: list[Call]) -> float | None:
    """The error of the calls until the run's real cost; None where there is no forecast."""
    half = len(calls) // 2
    costs = [tokens_in * INPUT + tokens_out * OUTPUT for _, tokens_in, tokens_out in calls]
    prompts = prompts_by_agent(calls[max(half - CALLS_KEPT, 0) : half])
    trend = trend_of(costs[max(half - CALLS_KEPT, 0) : half], is_flat=any(map(was_cut, prompts.values())))
    left = calls_within(trend, sum(costs[half:])) if trend is not None else None
    real = len(calls) - half
    return None if left is None else abs(left - real) / real


def window_error(prompts: list[int]) -> float | None:
    """The error of the calls until the size of the last prompt; None where there is no forecast."""
    half, last = len(prompts) // 2, prompts[-1]
    left = calls_until_size(prompts[max(half - CALLS_KEPT, 0) : half], last)
    if left is None or last <= prompts[half - 1]:
        return None
    real = next(number for number, size in enumerate(prompts[half:], 1) if size >= last)
    return abs(left - real) / real


def prompts_by_agent(calls: list[Call]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for agent, tokens_in, _ in calls:
        found[agent].append(tokens_in)
    return found


def quantile(errors: list[float], share: float) -> float:
    return sorted(errors)[min(int(share * len(errors)), len(errors) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of recorded runs")
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for source, calls in runs_in(parser.parse_args().runs):
        found = [("cap", cap_error(calls))]
        found += [("window", window_error(prompts)) for prompts in prompts_by_agent(calls).values()]
        for what, error in found:
            if error is not None:
                errors[what, "all"].append(error)
                errors[what, source].append(error)
    print(f"{'until':8} {'source':18} {'forecasts':>9} {'median':>7} {'90 %':>7}")
    for (what, source), of_one in sorted(errors.items()):
        print(f"{what:8} {source:18} {len(of_one):9} {quantile(of_one, 0.5):7.1%} {quantile(of_one, 0.9):7.1%}")


if __name__ == "__main__":
    main()
