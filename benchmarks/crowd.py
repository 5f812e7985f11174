"""Sixty-four workers on a budget of five calls: is there ever a sixth?

    python benchmarks/crowd.py [--rounds 100] [--workers 64] [--seconds 180] [--store memory|sqlite|redis|postgres]

Each round is a budget of its own. All workers ask in the same moment, each through a whole ledger: in memory they are
threads, on a store processes. Whoever is refused waits as long as waiting can help; one in eight who got leave gives it
back, and another takes the place. Per round exactly five calls must have been made, and the store must have five booked
and nothing held. No round begins after --seconds, per store; how many were made is told. Ends with 1 when something is
violated.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ledgers import FORK, postgres_cluster
from runguard.core.money import NOTHING, UNLIMITED
from runguard.ledger.ledger import Hold, Ledger, Refusal
from runguard.ledger.memory import MemoryLedger, store_of
from runguard.ledger.remote import StoreLedger

BUDGET = 5
PATIENCE_S = 60.0
TTL_S = 900.0


@dataclass(frozen=True)
class Setting:
    kind: str
    name: str
    options: tuple[str, ...] = ()
    query: str = ""


SETTINGS = (
    Setting("memory", "memory, threads"),
    Setting("sqlite", "SQLite, synchronous=full"),
    Setting("sqlite", "SQLite, synchronous=normal", query="?synchronous=normal"),
    Setting("redis", "Valkey, AOF always", options=("--appendonly", "yes", "--appendfsync", "always")),
    Setting("redis", "Valkey, AOF everysec", options=("--appendonly", "yes", "--appendfsync", "everysec")),
    Setting("postgres", "Postgres, synchronous_commit=on"),
)


@contextlib.contextmanager
def running(setting: Setting, workers: int) -> Iterator[str]:
    """The URL of an empty store."""
    if setting.kind == "memory":
        yield "memory"
    elif setting.kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="runguard-crowd-") as folder:
            yield f"sqlite:///{folder}/accounts.db{setting.query}"
    elif setting.kind == "redis":
        from tests.kit import valkey_server

        with valkey_server.valkey_process(*setting.options) as server:
            yield server.url
    else:
        with postgres_cluster(6 * workers + 20) as cluster:  # each ledger has up to five
            yield cluster.url


# ---- a worker -------------------------------------------------------------------------------------------------------


@dataclass
class Diary:
    """What one worker did: per round the calls it made, how often it asked, and how long it took until it knew."""

    made: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    waits: "array[float]" = field(default_factory=lambda: array("d"))
    errors: list[str] = field(default_factory=list)


async def one_round(ledger: Ledger, turn: int, fickle: bool, diary: Diary) -> None:
    began, asked, made = time.perf_counter(), 0, 0
    while True:
        account = ledger.account(f"app:crowd/{turn}#", f"app:crowd/{turn}", None, None, (UNLIMITED, UNLIMITED, BUDGET))
        result = await ledger.reserve((account,), (0, 0, 1), ttl=TTL_S)
        asked += 1
        if isinstance(result, Refusal) and result.wait_helps:
            await ledger.changed(result, 1.0)
            continue
        diary.waits.append(time.perf_counter() - began)
        if isinstance(result, Hold):
            await asyncio.sleep(0)
            if fickle:
                ledger.release(result)
            else:
                ledger.settle(result, (0, 0, 1))
                made = 1
        diary.made.append(made)
        diary.asked.append(asked)
        return


def work(ledger: Ledger, number: int, together: Any, goes_on: Callable[[], bool]) -> Diary:
    diary, turn = Diary(), 0
    try:
        with asyncio.Runner() as runner:
            while True:
                together.wait(PATIENCE_S)
                if not goes_on():
                    break
                runner.run(one_round(ledger, turn, (number + turn) % 8 == 0, diary))
                turn += 1
        if not ledger.flush(PATIENCE_S) or (isinstance(ledger, StoreLedger) and ledger.health()["lost"]):
            diary.errors.append("settlements were not told")
    except BaseException as error:
        diary.errors.append(repr(error))
        together.abort()
    return diary


class Starter:
    """Run by the last who comes to the barrier: is there a next round?"""

    def __init__(self, rounds: int, seconds: float, left: Any) -> None:
        self.left, self.rounds, self.end = left, rounds, time.monotonic() + seconds
        self.left.value = rounds + 1

    def __call__(self) -> None:
        self.left.value = self.left.value - 1 if time.monotonic() < self.end or self.left.value > self.rounds else 0

    def goes_on(self) -> bool:
        return bool(self.left.value > 0)


def in_threads(workers: int, starter: Starter) -> tuple[list[Diary], Ledger]:
    ledger, diaries = MemoryLedger(), list[Diary]()
    together = threading.Barrier(workers, starter)
    threads = [
        threading.Thread(target=lambda n=n: diaries.append(work(ledger, n, together, starter.goes_on)))
        for n in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return diaries, ledger


def in_processes(url: str, workers: int, starter: Starter) -> tuple[list[Diary], Ledger]:
    store_of(url).connect(PATIENCE_S).close()  # the schema is made once
    together, pipes, processes = FORK.Barrier(workers, starter), [], []

    def live(number: int, pipe: Any) -> None:
        pipe.send(work(StoreLedger(store_of(url), PATIENCE_S), number, together, starter.goes_on))
        os._exit(0)

    for number in range(workers):
        ours, theirs = FORK.Pipe()
        processes.append(FORK.Process(target=live, args=(number, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return [pipe.recv() for pipe in pipes], StoreLedger(store_of(url), PATIENCE_S)
    finally:
        for process in processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()


# ---- the verdict ----------------------------------------------------------------------------------------------------


def one_run(setting: Setting, workers: int, rounds: int, seconds: float) -> bool:
    """Whether everything held."""
    with running(setting, workers) as url:
        starter = Starter(rounds, seconds, FORK.Value("i", 0))
        began = time.monotonic()
        diaries, ledger = in_threads(workers, starter) if url == "memory" else in_processes(url, workers, starter)
        took = time.monotonic() - began
        booked = [(account.spent[2], account.held == NOTHING) for account in ledger.accounts()]
    errors = [error for diary in diaries for error in diary.errors]
    if errors:
        print(f"\n{setting.name}\n  FAILED: {errors[0]} ({len(errors)} workers)")
        return False
    calls = [sum(of_round) for of_round in zip(*(diary.made for diary in diaries), strict=True)]
    asked = [sum(of_round) for of_round in zip(*(diary.asked for diary in diaries), strict=True)]
    waits = sorted(wait for diary in diaries for wait in diary.waits)
    good = calls == [BUDGET] * len(calls) and booked == [(BUDGET, True)] * len(calls)
    print(f"\n{setting.name}")
    print(
        f"  {len(calls)} rounds in {took:.1f} s; calls per round {min(calls)} to {max(calls)}, booked "
        f"{min(booked)[0]} to {max(booked)[0]}"
    )
    print(
        f"  held at the end: {'nothing' if all(free for _, free in booked) else 'SOMETHING'}; asked per round "
        f"{median(asked):.0f} times (median)"
    )
    print(
        f"  until a worker knew: p50 {waits[len(waits) // 2] * 1e3:.0f} ms, p99 "
        f"{waits[int(len(waits) * 0.99)] * 1e3:.0f} "
        f"ms, longest {waits[-1] * 1e3:.0f} ms"
    )
    print(f"  {'never a sixth call, exactly five every round' if good else 'VIOLATED'}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180.0, help="per store, after which no round begins")
    parser.add_argument("--store", choices=["memory", "sqlite", "redis", "postgres"])
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the run; {options.workers} workers, a "
        f"budget of {BUDGET} calls",
        flush=True,
    )
    chosen = [setting for setting in SETTINGS if options.store in (None, setting.kind)]
    # each is run, whatever the others say
    held = [one_run(setting, options.workers, options.rounds, options.seconds) for setting in chosen]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
