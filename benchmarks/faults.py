"""Do accounts stay true when everything fails? Workers are killed, servers crash, connections are cut, and the budget
runs out meanwhile.

    python benchmarks/faults.py [--seconds 20] [--seed 1] [--store sqlite|redis|postgres]

Eight processes share one budget through the whole ledger. Each call of a made-up provider bills a part of what was
reserved and writes that to a file of the worker's own, which a kill does not lose: that is the truth. At the end, after
the last hold has expired:

- overspend: billed above the cap. Must be 0.
- lost: settled, as the store confirmed, and not in its books. Must be 0 where the setting is durable.
- held: must be 0 after the time to live.
- over-count: booked and never billed. At most one call per killed worker; a server that crashes and an answer that is
  lost cost nothing.

Loopback only. The times of the faults follow from the seed, what they hit does not. Ends with 1 when something is
violated.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ledgers import FORK, postgres_cluster
from runguard.core.money import UNLIMITED, Amount
from runguard.ledger.ledger import Balance, Hold, StoreError, StoreOutage
from runguard.ledger.memory import store_of
from runguard.ledger.remote import StoreLedger

WORKERS = 8
WANT: Amount = (1_000, 1_250, 1)
TTL_S = 4.0
TIMEOUT_S = 1.0
WARM_S = 1.5
GOODBYE_S = 20.0
FAR = 10**15
logging.getLogger("runguard").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Setting:
    kind: str
    name: str
    durable: bool = True
    options: tuple[str, ...] = ()
    query: str = ""


SETTINGS = (
    Setting("sqlite", "SQLite, synchronous=full"),
    Setting("sqlite", "SQLite, synchronous=normal", query="?synchronous=normal"),
    Setting("redis", "Valkey, AOF always", options=("--appendonly", "yes", "--appendfsync", "always")),
    Setting("redis", "Valkey, AOF everysec", options=("--appendonly", "yes", "--appendfsync", "everysec")),
    Setting("redis", "Valkey, no AOF", durable=False),
    Setting("postgres", "Postgres, synchronous_commit=on"),
)


# ---- a worker -------------------------------------------------------------------------------------------------------


class Diary:
    """What a worker knows for certain. One write per line: it is with the system when the worker is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *facts: object) -> None:
        os.write(self._file, (" ".join(map(str, facts)) + "\n").encode())


async def work(url: str, folder: Path, slot: int, life: int, seed: int) -> None:
    chance = random.Random(f"{seed} {slot} {life}")
    diary = Diary(folder / f"{slot}.txt")
    ledger = StoreLedger(store_of(url), TIMEOUT_S)
    cap_file, stop_file = folder / "cap", folder / "stop"
    account, own, refused = (
        ledger.account("app:warm", "app:warm", None, None, (FAR, UNLIMITED, UNLIMITED)),
        False,
        False,
    )
    while not stop_file.exists():
        if not own and cap_file.exists():
            account, own = (
                ledger.account(
                    "app:faults", "app:faults", None, None, (int(cap_file.read_text()), UNLIMITED, UNLIMITED)
                ),
                True,
            )
        try:
            hold = await ledger.reserve((account,), WANT, ttl=TTL_S)
        except (StoreOutage, StoreError) as error:  # on_outage = "closed": no account, no call
            if own:
                diary.note("skipped" if "a moment ago" in str(error) else "unanswered")
            await asyncio.sleep(0.05)
            continue
        except Exception as error:  # nothing else may come
            diary.note("broken", type(error).__name__)
            await asyncio.sleep(0.05)
            continue
        if not isinstance(hold, Hold):
            if not refused:
                diary.note("refused")
            refused = True
            await asyncio.sleep(0.02)
            continue
        if own:
            diary.note("reserved", hold.id)
        await asyncio.sleep(chance.uniform(0.002, 0.02))  # the provider thinks
        bill = chance.randint(100, WANT[0])
        if own:
            diary.note("billed", hold.id, bill)
        await asyncio.sleep(chance.uniform(0.0, 0.005))
        ledger.settle(
            hold,
            (bill, 1_000, 1),
            (lambda told: lambda: diary.note("settled", *told))((hold.id, bill)) if own else None,
        )
    flushed = await asyncio.to_thread(ledger.flush, GOODBYE_S)
    diary.note("end", int(flushed), ledger.health()["lost"], ledger.link.outages)


def worker(url: str, folder: Path, slot: int, life: int, seed: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(work(url, folder, slot, life, seed))
    os._exit(0)


# ---- connections that are cut ---------------------------------------------------------------------------------------


class Proxy:
    """Passes bytes on. SIGUSR1: answers of the server get lost for a moment, then every connection is reset."""

    def __init__(self, target: int) -> None:
        self.target, self.losing, self.links = target, False, set[asyncio.StreamWriter]()

    async def serve(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(self.cut()))
        server = await asyncio.start_server(self.link, sock=listener)
        await server.serve_forever()

    async def cut(self) -> None:
        self.losing = True
        await asyncio.sleep(0.02)
        for writer in list(self.links):
            writer.transport.abort()
        self.losing = False

    async def link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self.links |= {writer, back}
        try:
            await asyncio.gather(self.copy(reader, back, False), self.copy(there, writer, True))
        finally:
            self.links -= {writer, back}

    async def copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if not (answers and self.losing):
                    target.write(data)
                    await target.drain()
        target.close()


@contextlib.contextmanager
def proxied(url: str) -> Iterator[tuple[str, int]]:
    """The same URL through a proxy, and the proxy's process."""
    port = urlsplit(url).port
    assert port is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = FORK.Process(target=lambda: asyncio.run(Proxy(port).serve(listener)), daemon=True)
        process.start()
        assert process.pid is not None
        try:
            yield url.replace(f":{port}", f":{listener.getsockname()[1]}"), process.pid
        finally:
            process.kill()
            process.join()


# ---- a run ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """All that happened, and the verdict."""

    setting: Setting
    cap: int = 0
    kills: int = 0
    crashes: int = 0
    cuts: int = 0
    stalls: int = 0
    billed: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    unanswered: int = 0
    ran_out: bool = False
    untold: int = 0
    broken: list[str] = field(default_factory=list)
    balance: Balance | None = None

    def read(self, folder: Path) -> None:
        for path in folder.glob("*.txt"):
            for line in path.read_text().splitlines():
                match line.split():
                    case ["billed", hold, bill]:
                        self.billed[hold] = int(bill)
                    case ["settled", hold, bill]:
                        self.settled[hold] = int(bill)
                    case ["reserved", hold]:
                        self.reserved.add(hold)
                    case ["unanswered"]:
                        self.unanswered += 1
                    case ["broken", error]:
                        self.broken.append(error)
                    case ["refused"]:
                        self.ran_out = True
                    case ["end", flushed, lost, _]:
                        self.untold += int(lost) + (flushed == "0")

    @property
    def bill(self) -> int:
        return sum(self.billed.values())

    @property
    def overspend(self) -> int:
        return max(self.bill - self.cap, 0)

    @property
    def lost(self) -> int:
        """What was confirmed, less what the books say was told: settlements alone, without what was charged for expired
        holds.
        """
        assert self.balance is not None
        return max(sum(self.settled.values()) - (self.balance.spent[0] - self.balance.expired[0]), 0)

    @property
    def over_count(self) -> int:
        assert self.balance is not None
        return self.balance.spent[0] - self.bill

    @property
    def most_over_count(self) -> int:
        return self.kills * WANT[0]

    def violations(self) -> list[str]:
        assert self.balance is not None
        found = {
            "the budget did not run out": not self.ran_out,
            "holds are left": self.balance.held[0] != 0,
            f"the ledger raised {len(self.broken)} x {', '.join(sorted(set(self.broken)))}": bool(self.broken),
        }
        if self.setting.durable:
            found |= {
                "overspend": self.overspend > 0,
                "settled spend was lost": self.lost > 0 or self.over_count < 0,
                "over-counted more than one call per killed worker": self.over_count > self.most_over_count,
                "facts were not told": self.untold > 0,
            }
        return [name for name, is_so in found.items() if is_so]


class Crew:
    """Eight workers; one that is killed comes back as another process."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self._facts, self.lives = (url, folder, seed), 0
        self.slots = [self._start(slot) for slot in range(WORKERS)]

    def _start(self, slot: int) -> Any:
        url, folder, seed = self._facts
        self.lives += 1
        process = FORK.Process(target=worker, args=(url, folder, slot, self.lives, seed), daemon=True)
        process.start()
        return process

    def kill(self, slot: int) -> None:
        self.slots[slot].kill()
        self.slots[slot].join()
        self.slots[slot] = self._start(slot)

    def stall(self, slot: int, seconds: float) -> None:
        os.kill(self.slots[slot].pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.slots[slot].pid, signal.SIGCONT)

    def end(self) -> None:
        for process in self.slots:
            process.join(GOODBYE_S + 10)
            if process.is_alive():
                process.kill()
                process.join()


def read_balance(url: str, key: str) -> Balance | None:
    session = store_of(url).connect(10.0)
    try:
        return next((balance for balance in session.read(key) if balance.key == key), None)
    finally:
        session.close()


@contextlib.contextmanager
def running(setting: Setting, folder: Path) -> Iterator[tuple[str, Any]]:
    """A URL without a proxy, and the server, if there is one."""
    if setting.kind == "sqlite":
        yield f"sqlite:///{folder}/accounts.db{setting.query}", None
    elif setting.kind == "redis":
        from tests.kit import valkey_server

        with valkey_server.valkey_process(*setting.options) as server:
            yield server.url, server
    else:
        with postgres_cluster() as cluster:
            yield cluster.url, cluster


def crash(kind: str, server: Any) -> None:
    server.stop("immediate") if kind == "postgres" else server.stop()
    time.sleep(0.2)
    server.start()


def faults(setting: Setting, seconds: float, chance: random.Random) -> list[tuple[float, str, int]]:
    """When, what, to whom: about one worker killed per second, a crash and a cut every five."""
    kinds = ["kill"] * max(round(seconds), 2) + ["stall"] * max(round(seconds / 10), 1)
    if setting.kind != "sqlite":
        kinds += ["crash", "cut"] * max(round(seconds / 5), 1)
    return sorted((chance.uniform(0.0, seconds), kind, chance.randrange(WORKERS)) for kind in kinds)


def one_run(setting: Setting, seconds: float, seed: int) -> Run:
    run, chance = Run(setting), random.Random(f"{seed} {setting.name}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runguard-faults-")))
        direct, server = stack.enter_context(running(setting, folder))
        store_of(direct).connect(10.0).close()
        url, proxy = stack.enter_context(proxied(direct)) if server is not None else (direct, 0)
        crew = Crew(url, folder, seed)
        try:
            time.sleep(WARM_S)
            warm = read_balance(direct, "app:warm")
            pace = warm.spent[0] / WARM_S if warm is not None else 0.0
            run.cap = max(int(pace * seconds * 0.4), 20 * WANT[0])
            (folder / "cap.new").write_text(str(run.cap))
            (folder / "cap.new").rename(folder / "cap")
            began = time.monotonic()
            for at, what, slot in faults(setting, seconds, chance):
                time.sleep(max(began + at - time.monotonic(), 0))
                match what:
                    case "kill":
                        crew.kill(slot)
                        run.kills += 1
                    case "stall":
                        crew.stall(slot, 1.5 * TIMEOUT_S)
                        run.stalls += 1
                    case "crash":
                        crash(setting.kind, server)
                        run.crashes += 1
                    case "cut":
                        os.kill(proxy, signal.SIGUSR1)
                        run.cuts += 1
            while time.monotonic() < began + 3 * seconds and not any(
                "refused" in path.read_text() for path in folder.glob("*.txt")
            ):
                time.sleep(0.2)
            time.sleep(0.5)
        finally:
            (folder / "stop").touch()
            crew.end()
        time.sleep(TTL_S + 0.2)
        run.balance = read_balance(direct, "app:faults") or Balance(
            "app:faults", "app:faults", None, None, (run.cap, 0, 0)
        )
        run.read(folder)
    return run


def show(run: Run) -> None:
    balance = run.balance
    assert balance is not None
    stranded = len(run.reserved - run.settled.keys())
    print(f"\n{run.setting.name}{'' if run.setting.durable else ' (not durable: shown, not judged)'}")
    print(
        f"  calls billed {len(run.billed):,}, cap {run.cap:,}, billed {run.bill:,}, booked "
        f"{balance.spent[0]:,}, of which expired {balance.expired[0]:,}"
    )
    print(
        f"  workers killed {run.kills} ({stranded} between reserve and settle), stalled {run.stalls}; server "
        f"crashes {run.crashes}, connections cut {run.cuts}"
    )
    print(f"  reservations without an answer {run.unanswered}; facts not told {run.untold}")
    print(f"  overspend {run.overspend}, settled spend lost {run.lost}, held at the end {balance.held[0]}")
    print(f"  over-count {run.over_count:,} = {run.over_count / WANT[0]:.1f} calls, at most {run.kills} allowed")
    print(f"  {'; '.join(run.violations()).upper() or ('no violation' if run.setting.durable else 'not judged')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of faults, per store; 2 to 600")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=["sqlite", "redis", "postgres"])
    options = parser.parse_args()
    seconds = min(max(options.seconds, 2.0), 600.0)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the run; {WORKERS} workers, {seconds:g} "
        f"s of faults each, seed {options.seed}",
        flush=True,
    )
    violated = False
    for setting in SETTINGS:
        if options.store and setting.kind != options.store:
            continue
        run = one_run(setting, seconds, options.seed)
        show(run)
        sys.stdout.flush()
        violated |= bool(run.violations())
    return int(violated)


if __name__ == "__main__":
    sys.exit(main())
