"""What an account costs: reserve and settle in memory, beside a lock and an add and beside a plugin that does nothing.

    python benchmarks/accounting.py [--quick] [--json]

All in one run, interleaved, medians of CPU time; a ratio to the thing next to it says more than a microsecond. "at the
end" is the same operation after the first 100,000 (10,000 with --quick) calls of one run: cost must not depend on the
length of the run.
"""

import argparse
import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.plugin_manager import PluginManager

from runguard import Budget
from runguard.core.events import ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.engine.money import Accounts
from runguard.ledger.ledger import Hold
from runguard.ledger.memory import MemoryLedger
from runguard.policy import Policy
from runguard.pricing.rates import Usage

GOAL_US = 3.0
BLOCK = 2_000
PRICES = {"scripted-1": {"input": 10, "output": 40}}
FAR = 10**9  # dollars: never reached
THREE = [Budget(usd=FAR, per="user", window="1d"), Budget(usd=FAR, tokens=10**15, per="app")]
logging.getLogger("runguard").setLevel(logging.ERROR)


class NoOpPlugin(BasePlugin):
    """Takes part and does nothing."""

    async def before_model_callback(self, **_: Any) -> None:
        return None

    async def after_model_callback(self, **_: Any) -> None:
        return None


def lock_and_add() -> Callable[[], Awaitable[None]]:
    lock, total = threading.Lock(), [0]

    async def once() -> None:
        with lock:
            total[0] += 1_000
        with lock:
            total[0] -= 500

    return once


def noop_plugin() -> Callable[[], Awaitable[None]]:
    manager = PluginManager([NoOpPlugin(name="noop")])

    async def once() -> None:
        await manager.run_before_model_callback(callback_context=None, llm_request=None)  # type: ignore[arg-type]
        await manager.run_after_model_callback(callback_context=None, llm_response=None)  # type: ignore[arg-type]

    return once


def ledger(scopes: int) -> Callable[[], Awaitable[None]]:
    book = MemoryLedger()
    accounts = tuple(book.account(f"k{n}", f"k{n}", None, None, (FAR * 10**9, 10**15, 10**15)) for n in range(scopes))

    async def once() -> None:
        hold = await book.reserve(accounts, (20_000_000, 1_250, 1))
        assert isinstance(hold, Hold)
        book.settle(hold, (15_000_000, 1_100, 1))

    return once


def accounts(**policy: Any) -> Callable[[], Awaitable[None]]:
    """With prices, thresholds and the figures per agent, model and tool."""
    book = Accounts(Policy.validated({"prices": PRICES, **policy}, ""), time.time)  # noqa: TID251
    run_costs = book.spending.begin(RunInfo("run", "app", "user", "session"))

    async def once() -> None:
        charge = book.open_now(run_costs, ModelCall("run", "", "agent", 1e9, "scripted-1", 1_000, 0, 250))
        assert charge is not None
        book.settle(charge, Usage(1_000, 250))

    return once


def guard(**policy: Any) -> Callable[[], Awaitable[None]]:
    """All of a model call: rules, a place in flight, the account."""
    whole = Guard(Policy.validated({"prices": PRICES, "max_model_calls": 10**9, **policy}, ""))
    run = whole.start(RunInfo("run", "app", "user", "session"))

    async def once() -> None:
        event = ModelCall("run", "", "agent", 1e9, "scripted-1", 1_000, 0, 250)
        whole.check(event)
        await whole.reserve(event)
        whole.settle(event.charge, Usage(1_000, 250))
        task = asyncio.current_task()
        assert task is not None
        run.slots.give_back(task)

    return once


CASES: dict[str, Callable[[], Callable[[], Awaitable[None]]]] = {
    "lock and add, twice": lock_and_add,
    "no-op plugin, both hooks": noop_plugin,
    "ledger, 1 scope": lambda: ledger(1),
    "ledger, 3 scopes": lambda: ledger(3),
    "accounts, no budget": accounts,
    "accounts, max_usd": lambda: accounts(max_usd=FAR),
    "accounts, 3 budgets": lambda: accounts(max_usd=FAR, budgets=THREE),
    "guard, max_usd": lambda: guard(max_usd=FAR),
}


async def _block(once: Callable[[], Awaitable[None]], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        await once()
    return (time.process_time() - began) / count * 1e6


async def measure(rounds: int, length: int) -> dict[str, dict[str, float]]:
    once = {name: make() for name, make in CASES.items()}
    first: dict[str, list[float]] = {name: [] for name in CASES}
    last: dict[str, list[float]] = {name: [] for name in CASES}
    for figures in (first, last):
        for _ in range(rounds):
            for name, step in once.items():
                figures[name].append(await _block(step, BLOCK))
        if figures is first:
            for step in once.values():
                await _block(step, length)
    return {
        name: {"us": round(median(first[name]), 2), "at_the_end_us": round(median(last[name]), 2)} for name in CASES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = asyncio.run(measure(5 if options.quick else 15, 10_000 if options.quick else 100_000))
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    base, plugin = figures["lock and add, twice"]["us"], figures["no-op plugin, both hooks"]["us"]
    print(f"{'':26}{'us':>8}{'at the end':>12}{'x lock+add':>12}{'x no-op plugin':>16}")
    for name, figure in figures.items():
        print(
            f"{name:26}{figure['us']:8.2f}{figure['at_the_end_us']:12.2f}"
            f"{figure['us'] / base:12.1f}{figure['us'] / plugin:16.1f}"
        )
    reached = all(figures[f"ledger, {n}"]["us"] <= GOAL_US for n in ("1 scope", "3 scopes"))
    print(f"reserve + settle in memory: goal {GOAL_US:g} us, {'reached' if reached else 'NOT reached'}")


if __name__ == "__main__":
    main()
