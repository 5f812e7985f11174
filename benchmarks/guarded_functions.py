"""What ``guard`` adds to a function: Python calls and CPU time of one guarded call, above the bare function.

    python benchmarks/guarded_functions.py [--quick] [--json]

The calls do not move with the load of the machine, unlike every time; so compare times with those of another version
taken in turns. The time is that of the fastest of many blocks.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import runguard

GOALS = {"cost known": 6, "usage in a dict": 8, "chat completion with a price": 12, "the same with loop=": 18}
BLOCK = 200  # calls measured in one go
REQUEST: dict[str, Any] = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "hi there"}],
    "max_tokens": 100,
}
USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
MESSAGE = {"role": "assistant", "content": "hello"}
CHOICES = [{"index": 0, "finish_reason": "stop", "message": MESSAGE}]
logging.getLogger("runguard").setLevel(logging.ERROR)


def known(**_: Any) -> dict[str, Any]:
    return {"text": "hello"}


def with_usage(**_: Any) -> dict[str, Any]:
    return {"model": "gpt-4o", "usage": USAGE}


def chat(**_: Any) -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion", "model": "gpt-4o", "choices": CHOICES, "usage": USAGE}


def cases() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    budget = {"max_usd": 10**6}
    yield "cost known", known, runguard.guard(known, budget=budget, cost=0.001)
    yield "usage in a dict", with_usage, runguard.guard(with_usage, budget=budget)
    yield "chat completion with a price", chat, runguard.guard(chat, budget=budget)
    yield "the same with loop=", chat, runguard.guard(chat, budget=budget, loop={"repeats": 10**6})


def python_calls(function: Callable[..., Any], calls: int = 40) -> float:
    total = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal total
        total += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(calls):
            function(**REQUEST)
    finally:
        sys.setprofile(None)
    return total / calls


def fastest(function: Callable[..., Any], blocks: int) -> float:
    """CPU microseconds of one call."""
    best = float("inf")
    for _ in range(blocks):
        start = time.thread_time()
        for _ in range(BLOCK):
            function(**REQUEST)
        best = min(best, time.thread_time() - start)
    return 1e6 * best / BLOCK


def measure(blocks: int) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for name, bare, guarded in cases():
        for _ in range(300):  # the first calls of unknown cost are queued
            guarded(**REQUEST)
        out[name] = {
            "calls": python_calls(guarded) - python_calls(bare),
            "us": fastest(guarded, blocks) - fastest(bare, blocks),
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    result = measure(20 if options.quick else 60)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print("| | Python calls | µs | goal, µs |\n|---|---|---|---|")
    for name, row in result.items():
        print(f"| {name} | {row['calls']:.0f} | {row['us']:.1f} | {GOALS[name]} |")


if __name__ == "__main__":
    main()
