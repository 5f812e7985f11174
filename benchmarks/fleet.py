"""How many model calls one Valkey server books for a fleet of workers, and what a call costs the server.

    python benchmarks/fleet.py [--quick] [--json]

Workers are processes. Each plays runs of ten model calls: "one by one" reserves and settles every call by itself, "in
one step" settles a call together with the reservation of the next one, as a run does whose next call follows within 0.1
s. All workers share one account, or each run takes one of 1,000; or a call has three accounts, of its run, its user and
the app. Server and workers share this machine's cores: more cores for the workers mean more calls, until the server is
busy. What the server takes per call is its own CPU time. The best of several rounds is shown, because other work on the
machine makes all of them worse.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis

from runguard.core.money import UNLIMITED
from runguard.ledger.ledger import Line, SettledCall, StoreSession
from runguard.ledger.memory import store_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit.valkey_server import valkey_process

WANT, ACTUAL = (20_000, 1_250, 1), (15_000, 1_100, 1)
CALLS = 10  # of a run
FORK = multiprocessing.get_context("fork")
Lines = list[Line]


def line(scope: str) -> Line:
    return Line(scope, scope, None, None, None, (10**15, UNLIMITED, UNLIMITED))  # never reached


HOT = [line("app:fleet")]
SPREAD = [[line(f"user:u{n}")] for n in range(1_000)]
THREE = [[line(f"run:r{n}"), line(f"user:u{n}"), *HOT] for n in range(1_000)]
ACCOUNTS: dict[str, Callable[[], Lines]] = {
    "one hot account": lambda: HOT,
    "1,000 accounts": lambda: random.choice(SPREAD),
    "three accounts per call": lambda: random.choice(THREE),
}


def one_by_one(session: StoreSession, lines: Lines, names: Iterator[str]) -> Iterator[None]:
    for name in itertools.islice(names, CALLS):
        session.reserve(name, 900.0, lines, WANT)
        session.settle(name, lines, ACTUAL)
        yield


def in_one_step(session: StoreSession, lines: Lines, names: Iterator[str]) -> Iterator[None]:
    last = next(names)
    session.reserve(last, 900.0, lines, WANT)
    for name in itertools.islice(names, CALLS - 1):
        session.settle_and_reserve(SettledCall(last, lines, ACTUAL), name, 900.0, lines, WANT)
        last = name
        yield
    session.settle(last, lines, ACTUAL)
    yield


WAYS = {"one by one": one_by_one, "in one step": in_one_step}


def work(url: str, number: int, pipe: Connection) -> None:
    session, names = store_of(url).connect(30.0), (f"{number}-{n}" for n in itertools.count())
    random.seed(number)
    while (block := pipe.recv()) is not None:
        accounts, way, start, end = block
        took: list[float] = []
        time.sleep(max(start - time.monotonic(), 0))
        began = time.perf_counter()
        while time.monotonic() < end:
            for _ in WAYS[way](session, ACCOUNTS[accounts](), names):
                took.append((now := time.perf_counter()) - began)
                began = now
        pipe.send(took)
    os._exit(0)


def measure(workers: Sequence[int], rounds: int, seconds: float = 0.5) -> Iterator[dict[str, Any]]:
    with valkey_process() as server, redis.Redis.from_url(server.url) as desk:
        store_of(server.url).connect(30.0).close()

        def server_seconds() -> float:
            used: Any = desk.info("cpu")
            return float(used["used_cpu_user"] + used["used_cpu_sys"])

        for count in workers:
            pairs = [FORK.Pipe() for _ in range(count)]
            processes = [
                FORK.Process(target=work, args=(server.url, count * 1_000 + n, pair[1])) for n, pair in enumerate(pairs)
            ]
            for process in processes:
                process.start()
            pipes = [ours for ours, _ in pairs]
            rows: dict[tuple[str, str], list[tuple[float, float, float]]] = {
                (accounts, way): [] for accounts in ACCOUNTS for way in WAYS
            }
            for _ in range(rounds):
                for (accounts, way), found in rows.items():
                    start, busy = time.monotonic() + 0.05, server_seconds()
                    for pipe in pipes:
                        pipe.send((accounts, way, start, start + seconds))
                    took = sorted(itertools.chain.from_iterable(pipe.recv() for pipe in pipes))
                    found.append(
                        (len(took) / seconds, took[len(took) * 99 // 100], (server_seconds() - busy) / len(took))
                    )
            for (accounts, way), found in rows.items():
                rates, slowest, server_times = zip(*found, strict=True)
                yield {
                    "workers": count,
                    "accounts": accounts,
                    "way": way,
                    "calls_per_second": round(max(rates)),
                    "p99_ms": round(1e3 * min(slowest), 1),
                    "server_us": round(1e6 * min(server_times)),
                }
            for pipe in pipes:
                pipe.send(None)
            for process in processes:
                process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 16 workers, shorter")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    rows, load = [], os.getloadavg()[0]
    if not options.json:
        print(f"{os.cpu_count()} cores, load {load:.1f}\n")
        print("| workers | accounts | | calls per second | p99 | server CPU per call |\n|---|---|---|---|---|---|")
    for row in measure((1, 16) if options.quick else (1, 4, 16), 3 if options.quick else 12):
        rows.append(row)
        if not options.json:
            print(
                f"| {row['workers']} | {row['accounts']} | {row['way']} | {row['calls_per_second']:,} | "
                f"{row['p99_ms']} ms | {row['server_us']} µs |",
                flush=True,
            )
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "load": load, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
