"""What a durable ledger costs: reserve and settle on one hot budget, beside the store's own cheapest operation.

    python benchmarks/ledgers.py [--quick] [--json] [--store sqlite|redis|postgres]

The ratio is what counts: operations per second of RunGuard to those of a PING (Valkey), of a one-row UPDATE (Postgres),
of a transaction with a one-row UPDATE (SQLite), in the same processes, in blocks that take turns; medians over the
blocks. "in one step" is how a run does it whose next call follows: the settlement of a call goes to the store together
with the reservation of the next. That is two operations. Workers are processes, all on the same budget; with one worker
also the whole ledger, in which an event loop hands the work to threads, in both ways. Servers are started for the run,
on the loopback, and share the processor with the workers.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import secrets
import shutil
import sqlite3
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from runguard.core.money import UNLIMITED
from runguard.ledger.ledger import Hold, Line, SettledCall, Store
from runguard.ledger.memory import store_of
from runguard.ledger.remote import StoreLedger

sys.path.insert(0, str(Path(__file__).parents[1]))

PATIENCE_S = 30.0
STARVED_S = 1.0
LINE = Line("app:bench", "app:bench", None, None, None, (10**15, UNLIMITED, UNLIMITED))  # never reached
WANT, ACTUAL = (20_000, 1_250, 1), (15_000, 1_100, 1)
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Variant:
    """A store as it is set up for a measurement."""

    kind: str
    name: str
    goal: float | None  # of the ratio
    raw: str
    options: tuple[str, ...] = ()
    query: str = ""


VARIANTS = (
    Variant("sqlite", "SQLite, synchronous=full", 0.8, "UPDATE"),
    Variant("sqlite", "SQLite, synchronous=normal", None, "UPDATE", query="?synchronous=normal"),
    Variant("redis", "Valkey, no AOF", 0.8, "PING"),
    Variant("redis", "Valkey, AOF everysec", None, "PING", ("--appendonly", "yes", "--appendfsync", "everysec")),
    Variant("redis", "Valkey, AOF always", None, "PING", ("--appendonly", "yes", "--appendfsync", "always")),
    Variant("postgres", "Postgres, synchronous_commit=on", 0.85, "UPDATE"),
    Variant(
        "postgres", "Postgres, synchronous_commit=off", None, "UPDATE", query="?options=-c%20synchronous_commit%3Doff"
    ),
)
LENGTHS = {  # is it SQLite, quick: rounds, seconds of a block; nobody is seen to starve for longer than a block lasts
    (False, False): (11, 0.4),
    (False, True): (3, 0.3),
    (True, False): (5, 2.5),
    (True, True): (2, 1.5),
}
QUICK = ("SQLite, synchronous=full", "Valkey, no AOF", "Postgres, synchronous_commit=on")


# ---- servers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def postgres_cluster(connections: int = 200) -> Iterator[Any]:
    """The tests' Postgres, with room for more connections."""
    from tests.kit import postgres_server

    folder = Path(tempfile.mkdtemp(prefix="runguard-pg-"))
    try:
        cluster = postgres_server.Server(folder, connections)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(variant: Variant) -> Iterator[str]:
    """The URL of an empty store of this kind."""
    if variant.kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="runguard-bench-") as folder:
            yield f"sqlite:///{folder}/accounts.db{variant.query}"
    elif variant.kind == "redis":
        from tests.kit import valkey_server

        with valkey_server.valkey_process(*variant.options) as server:
            yield server.url
    else:
        with postgres_cluster() as cluster:
            yield cluster.url + variant.query


# ---- the raw operations ---------------------------------------------------------------------------------------------


def raw_sqlite(store: Any, make: bool) -> Callable[[], object]:
    """A file of its own beside the accounts, no queue of writers."""
    db = sqlite3.connect(store.path.with_name("raw.db"), timeout=PATIENCE_S, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={store.synchronous}")
    if make:
        db.execute("CREATE TABLE raw (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)")
        db.execute("INSERT INTO raw VALUES (1, 0)")

    def once() -> None:
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE raw SET n = n + 1 WHERE id = 1")
        db.execute("COMMIT")

    return once


def raw_redis(url: str, bare: bool = False) -> Callable[[], object]:
    """As programs do it, or past the client's pool of connections."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    client = redis.Redis.from_url(
        url,
        socket_timeout=PATIENCE_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        decode_responses=True,
        protocol=2,
    )
    if not bare:
        return lambda: client.execute_command("PING")  # type: ignore[no-untyped-call]
    link = client.connection_pool.get_connection()

    def once() -> None:
        link.send_command("PING")  # type: ignore[no-untyped-call]
        link.read_response()

    return once


def raw_postgres(url: str, make: bool) -> Callable[[], object]:
    import psycopg

    db = psycopg.connect(url, autocommit=True).cursor()
    if make:
        db.execute("CREATE TABLE public.raw (id int PRIMARY KEY, n bigint NOT NULL)")
        db.execute("INSERT INTO public.raw VALUES (1, 0)")
    return lambda: db.execute("UPDATE public.raw SET n = n + 1 WHERE id = 1", prepare=True)


def raw_operation(kind: str, url: str, store: Store, make: bool = False) -> Callable[[], object]:
    return {
        "sqlite": lambda: raw_sqlite(store, make),
        "redis": lambda: raw_redis(url),
        "postgres": lambda: raw_postgres(url, make),
    }[kind]()


# ---- a worker -------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    Floats = array[float]
else:
    Floats = array  # cannot be subscripted before Python 3.12

Times = tuple[float, Floats, Floats]  # seconds it took, seconds of each first and each second operation


class Worker:
    """One process with its own connection."""

    def __init__(self, kind: str, url: str, with_ledger: bool) -> None:
        self.store = store_of(url)
        self.raw = raw_operation(kind, url, self.store)
        self.bare = raw_redis(url, bare=True) if kind == "redis" else self.raw
        self.session = self.store.connect(PATIENCE_S)
        self.loop = asyncio.new_event_loop()
        self.ledger = StoreLedger(self.store, PATIENCE_S) if with_ledger else None
        self.prefix, self.count, self.open = f"{secrets.token_hex(8)}-", 0, ""

    def block(self, what: str, start: float, end: float) -> Times:
        first, second = array("d"), array("d")
        time.sleep(max(start - time.monotonic(), 0))
        step = {
            "raw": self._raw,
            "bare": self._bare,
            "session": self._session,
            "step": self._step,
            "ledger": self._ledger,
            "run": self._run,
        }[what]
        began = time.perf_counter()
        while time.monotonic() < end:
            step(first, second)
        return time.perf_counter() - began, first, second

    def _raw(self, first: Floats, _: Floats) -> None:
        began = time.perf_counter()
        self.raw()
        first.append(time.perf_counter() - began)

    def _bare(self, first: Floats, _: Floats) -> None:
        began = time.perf_counter()
        self.bare()
        first.append(time.perf_counter() - began)

    def _session(self, first: Floats, second: Floats) -> None:
        self.count += 1
        hold = f"{self.prefix}{self.count}"
        began = time.perf_counter()
        reply = self.session.reserve(hold, 900.0, (LINE,), WANT)
        first.append((between := time.perf_counter()) - began)
        self.session.settle(hold, (LINE,), ACTUAL)
        second.append(time.perf_counter() - between)
        assert reply.ok

    def _step(self, first: Floats, second: Floats) -> None:
        """Two operations, which both take until the one answer arrives."""
        if not self.open:
            self.count += 1
            self.open = f"{self.prefix}{self.count}"
            self.session.reserve(self.open, 900.0, (LINE,), WANT)
        self.count += 1
        hold = f"{self.prefix}{self.count}"
        began = time.perf_counter()
        _, reply = self.session.settle_and_reserve(SettledCall(self.open, (LINE,), ACTUAL), hold, 900.0, (LINE,), WANT)
        first.append(took := time.perf_counter() - began)
        second.append(took)
        self.open = hold
        assert reply.ok

    def _ledger(self, first: Floats, second: Floats) -> None:
        self.loop.run_until_complete(self._cycles(first, second, 20))

    async def _cycles(self, first: Floats, second: Floats, count: int) -> None:
        ledger = self.ledger
        assert ledger is not None
        accounts = (ledger.account(LINE.key, LINE.scope, None, None, LINE.caps),)
        for _ in range(count):
            began = time.perf_counter()
            hold = await ledger.reserve(accounts, WANT)
            assert isinstance(hold, Hold)
            first.append((between := time.perf_counter()) - began)
            booked = self.loop.create_future()

            def done(booked: asyncio.Future[None] = booked) -> None:
                self.loop.call_soon_threadsafe(booked.set_result, None)

            ledger.settle(hold, ACTUAL, done)
            await booked
            second.append(time.perf_counter() - between)

    def _run(self, first: Floats, second: Floats) -> None:
        self.loop.run_until_complete(self._calls(first, second, 20))

    async def _calls(self, first: Floats, second: Floats, count: int) -> None:
        """Reserve and settle as a run does: nobody waits for a settlement, and the next reservation takes it along."""
        ledger = self.ledger
        assert ledger is not None
        accounts = (ledger.account(LINE.key, LINE.scope, None, None, LINE.caps),)
        for _ in range(count):
            began = time.perf_counter()
            hold = await ledger.reserve(accounts, WANT)
            assert isinstance(hold, Hold)
            ledger.settle(hold, ACTUAL, may_wait=True)
            first.append(took := time.perf_counter() - began)
            second.append(took)


def work(kind: str, url: str, blocks: list[str], seconds: float, pipe: Connection) -> None:
    worker = Worker(kind, url, "ledger" in blocks)
    pipe.send("ready")
    start = pipe.recv()
    for number, what in enumerate(blocks):
        pipe.send(worker.block(what, start + number * (seconds + 0.1), start + number * (seconds + 0.1) + seconds))
    pipe.close()
    os._exit(0)  # the ledger's threads have nothing left to tell


def measure(kind: str, url: str, workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    bare, ledger = ["bare"] if kind == "redis" else [], ["ledger", "run"] if workers == 1 else []
    turn = ["raw", *bare, "session", "step", *ledger]
    # the first round warms up
    blocks = [what for number in range(rounds + 1) for what in (turn if number % 2 else turn[::-1])]
    pairs = [FORK.Pipe() for _ in range(workers)]
    processes = [FORK.Process(target=work, args=(kind, url, blocks, seconds, theirs)) for _, theirs in pairs]
    for process in processes:
        process.start()
    try:
        for ours, theirs in pairs:
            theirs.close()
            assert ours.recv() == "ready"
        start = time.monotonic() + 0.2
        for ours, _ in pairs:
            ours.send(start)
        found = [(what, [ours.recv() for ours, _ in pairs]) for what in blocks][len(turn) :]
    finally:
        for process in processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
    rates: dict[str, list[float]] = {what: [] for what in turn}
    firsts: dict[str, list[float]] = {what: [] for what in turn}
    seconds_: dict[str, list[float]] = {what: [] for what in turn}
    for what, times in found:
        rates[what].append(sum((len(first) + len(second)) / took for took, first, second in times))
        for _, first, second in times:
            firsts[what].extend(first)
            seconds_[what].extend(second)
    figures: dict[str, Any] = {"workers": workers}
    for what in turn:
        figures[what] = {
            "per_second": round(median(rates[what])),
            "longest_wait_ms": round(max(*firsts[what], *seconds_[what], 0.0) * 1e3, 1),
        }
        figures[what]["ratio"] = round(median(a / b for a, b in zip(rates[what], rates["raw"], strict=True)), 3)
        for name, all_of_them in (
            ("raw_us" if what in ("raw", "bare") else "reserve_us", firsts[what]),
            ("settle_us", seconds_[what]),
        ):
            if all_of_them:
                all_of_them.sort()
                figures[what][name] = [round(all_of_them[int(len(all_of_them) * share)] * 1e6) for share in (0.5, 0.99)]
    return figures


# ---- the table ------------------------------------------------------------------------------------------------------


def verdict(variant: Variant, figures: list[dict[str, Any]]) -> str | None:
    if variant.goal is None:
        return None
    worst = min(figure["step"]["ratio"] for figure in figures)
    said = (
        f"{variant.name}: goal {variant.goal:g} x {variant.raw}, "
        f"{'reached' if worst >= variant.goal else 'NOT reached'} "
        f"(least {worst:.2f})"
    )
    if variant.kind == "sqlite":
        wait = max(figure["session"]["longest_wait_ms"] for figure in figures)
        said += (
            f"; nobody waits over {STARVED_S:g} s, {'reached' if wait <= STARVED_S * 1e3 else 'NOT reached'} "
            f"(longest {wait:.0f} ms)"
        )
    return said


def show(variant: Variant, figures: list[dict[str, Any]]) -> None:
    print(
        f"\n{variant.name}\n{'workers':>9}  {'':22}{'op/s':>8}{'ratio':>7}  "
        f"{'reserve p50/p99 us':>20}{'settle p50/p99 us':>20}{'longest ms':>12}"
    )
    for figure in figures:
        for what, title in (
            ("raw", variant.raw),
            ("bare", "PING, bare connection"),
            ("session", "reserve, settle"),
            ("step", "the same in one step"),
            ("ledger", "whole ledger"),
            ("run", "the same in one step"),
        ):
            if what not in figure:
                continue
            row = figure[what]
            first, second = row.get("raw_us") or row["reserve_us"], row.get("settle_us")
            times = f"{first[0]:>11,} /{first[1]:>7,}{f'{second[0]:>11,} /{second[1]:>7,}' if second else '':>20}"
            print(
                f"{figure['workers']:9}  {title:22}{row['per_second']:8,}{row['ratio']:7.2f}  "
                f"{times}{row['longest_wait_ms']:12.1f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 8 workers, each store as it is by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store", choices=["sqlite", "redis", "postgres"])
    options = parser.parse_args()
    results: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "stores": {},
        "goals": [],
    }
    if not options.json:
        print(f"{results['cores']} cores, load {results['load_before']} before the run")
    for variant in VARIANTS:
        if (options.store and variant.kind != options.store) or (options.quick and variant.name not in QUICK):
            continue
        with running(variant) as url:
            store = store_of(url)
            store.connect(PATIENCE_S).close()
            raw_operation(variant.kind, url, store, make=True)
            rounds, seconds = LENGTHS[variant.kind == "sqlite", options.quick]
            figures = [
                measure(variant.kind, url, workers, rounds, seconds)
                for workers in ((1, 8) if options.quick else (1, 8, 64))
            ]
        results["stores"][variant.name] = figures
        if said := verdict(variant, figures):
            results["goals"].append(said)
        if not options.json:
            show(variant, figures)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print("\n" + "\n".join(results["goals"]))


if __name__ == "__main__":
    main()
