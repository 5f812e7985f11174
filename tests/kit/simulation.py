"""A deterministic simulation: workers, a bad network and a store, on a virtual clock and one seed.

Workers do what ``StoreLedger`` does: reserve, make the call, settle; repeat a fact until it is acknowledged; give back
a reservation whose answer comes too late. Messages are delayed, lost, delivered twice and out of order. Workers crash
or lose the connection, and their clocks are wrong. Holds expire, periods end. Every answer of the store is compared
with ``StoreModel``, and at the end of each episode the books with what the provider billed.

``python -m tests.kit.simulation STEPS [SEED]`` prints what happened. The same seed gives the same run.
"""

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from time import monotonic
from typing import Any

from runguard.core.money import UNLIMITED, Amount
from runguard.ledger.ledger import Line
from tests.kit.simulated_store import VirtualTime, simulated_store
from tests.kit.store_model import StoreModel, book_of

TTL_S, TIMEOUT_S, REPEAT_S, PERIOD_S = 60.0, 5.0, 8.0, 400.0
DELAYS = (0.01, 0.01, 0.05, 0.2, 1.0, 4.0, 20.0, 90.0)
CAPS: dict[str, Amount] = {
    "app": (400, UNLIMITED, UNLIMITED),
    "user": (150, 300, 40),
    "tool": (UNLIMITED, UNLIMITED, 12),
}


@dataclass
class Worker:
    number: int
    skew: float  # of its clock
    life: int = 0  # raised by a crash
    cut_off_until: float = 0.0


@dataclass
class Episode:
    """One run of a few hundred events on an empty store.

    ``honest``: no call bills more than it reserved, and none is made without a reservation.
    """

    time: VirtualTime
    store: Any
    random: Random
    honest: bool
    happened: Counter[str]
    model: StoreModel = field(default_factory=StoreModel)

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers, self.steps = count(), 0
        self.is_ending = self.crashed = False
        self.least: dict[str, list[Amount]] = {}  # by account: what was billed for each call at least
        self.most: dict[str, list[Amount]] = {}
        self.workers = [Worker(n, self.random.choice([0, 0, -30, 30])) for n in range(4)]

    # ---- the clock and the network ----------------------------------------------------------------------------------

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.time.now + seconds, next(self.numbers), what))

    def send(self, worker: Worker, request: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        """Deliver a request to the store, perhaps twice, late or never; and its answer, unless it gets lost."""
        life, chance = worker.life, self.random.random

        def deliver() -> None:
            answer = request()
            self.happened["delivered"] += 1
            if chance() < 0.08 or self.is_cut_off(worker):
                self.happened["lost answer"] += 1
                return
            self.later(self.random.choice(DELAYS), lambda: answered(answer) if worker.life == life else None)

        if chance() < 0.08 or self.is_cut_off(worker):
            self.happened["lost request"] += 1
        else:
            self.later(self.random.choice(DELAYS), deliver)
        if chance() < 0.08:
            self.happened["duplicate"] += 1
            self.later(self.random.choice(DELAYS), deliver)

    def is_cut_off(self, worker: Worker) -> bool:
        return not self.is_ending and self.time.now < worker.cut_off_until

    # ---- the store, beside its model --------------------------------------------------------------------------------

    def reserve(self, name: str, lines: Sequence[Line], want: Amount) -> str:
        expected = self.model.reserve(name, TTL_S, lines, want, self.time.now)
        reply = self.store.reserve(name, TTL_S, lines, want)
        found = "stale" if reply.stale else "ok" if reply.ok else "refused"
        assert found == expected, f"reserve {name}: the store says {found}, its rules say {expected}"
        self.happened[found] += 1
        if self.honest:
            for balance in reply.balances:
                for unit in range(3):
                    taken = balance.spent[unit] + balance.held[unit]
                    assert taken <= balance.caps[unit] + balance.granted[unit], f"{balance.key} is above its cap"
        return found

    def settle(self, name: str, lines: Sequence[Line], actual: Amount) -> None:
        self.model.settle(name, lines, actual, self.time.now)
        self.store.settle(name, lines, actual)

    def release(self, name: str) -> None:
        self.model.release(name, self.time.now)
        self.store.release(name)

    def extend(self) -> None:
        (line,) = self.lines(["user"], 0.0)
        self.model.extend(line, (20, 30, 2))
        self.store.extend(line, (20, 30, 2))

    def compare(self) -> None:
        self.model.expire(self.time.now)
        found = {balance.key: book_of(balance) for balance in self.store.read()}
        assert found == self.model.books()

    # ---- workers ----------------------------------------------------------------------------------------------------

    def lines(self, names: Sequence[str], skew: float) -> list[Line]:
        period = (self.time.now + skew) // PERIOD_S
        begins, ends = period * PERIOD_S, (period + 1) * PERIOD_S
        return [
            Line(f"tool@{period:.0f}", "tool:t", "1h", begins, ends, CAPS[name])
            if name == "tool"
            else Line(name, f"{name}:x", None, None, None, CAPS[name])
            for name in names
        ]

    def call(self, worker: Worker) -> None:
        """One call of a worker, from its reservation to the acknowledged settlement."""
        if self.is_ending:
            return
        random, life = self.random, worker.life
        name = f"w{worker.number}-{next(self.numbers)}"
        lines = self.lines(random.sample(list(CAPS), random.choice([1, 1, 2, 3])), worker.skew)
        want: Amount = (random.randrange(1, 30), random.randrange(40), 1)
        waits = [True]

        def fact(request: Callable[[], None]) -> None:
            """Repeat it until it is acknowledged, or the worker is gone."""
            is_known = [False]

            def again() -> None:
                if worker.life == life and not is_known[0]:
                    self.send(worker, request, lambda _: is_known.__setitem__(0, True))
                    self.later(REPEAT_S, again)

            again()

        def paid() -> None:
            if worker.life == life:
                fact(lambda: self.settle(name, lines, took))

        def answered(verdict: str) -> None:
            if not waits[0]:
                return
            waits[0] = False
            if verdict == "ok":
                self.billed(lines, took)
                self.later(random.choice([0.5, 2.0, 10.0, TTL_S + 20]), paid)

        def too_late() -> None:
            if not waits[0] or worker.life != life:
                return
            waits[0] = False
            self.happened["too late"] += 1
            fact(lambda: self.release(name))
            if not self.honest and random.random() < 0.2:  # the call left all the same
                self.billed(lines, took)
                self.later(2.0, paid)

        share = random.choice([0, 1, 2, 4]) / 4
        took: Amount = (int(want[0] * share), int(want[1] * share), 1)
        if not self.honest and random.random() < 0.2:
            took = (want[0] + 25, want[1] + 10, 1)
        self.possible(lines, took, want)
        self.send(worker, lambda: self.reserve(name, lines, want), answered)
        self.later(TIMEOUT_S, too_late)
        self.later(random.choice([0.5, 3.0, 9.0]), lambda: self.call(worker) if worker.life == life else None)

    def billed(self, lines: Sequence[Line], took: Amount) -> None:
        for line in lines:
            self.least.setdefault(line.key, []).append(took)

    def possible(self, lines: Sequence[Line], took: Amount, want: Amount) -> None:
        for line in lines:
            self.most.setdefault(line.key, []).append((max(took[0], want[0]), max(took[1], want[1]), 1))

    def disturb(self) -> None:
        worker, kind = self.random.choice(self.workers), self.random.random()
        if kind < 0.3:
            self.happened["crash"] += 1
            self.crashed = True
            worker.life += 1
            self.later(1.0, lambda: self.call(worker))
        elif kind < 0.7:
            self.happened["partition"] += 1
            worker.cut_off_until = self.time.now + self.random.choice([5.0, 30.0, 120.0])
        else:
            self.happened["extension"] += 1
            self.extend()
        if not self.is_ending:
            self.later(self.random.choice([10.0, 40.0, 80.0]), self.disturb)

    # ---- one episode ------------------------------------------------------------------------------------------------

    def play(self, steps: int) -> int:
        for worker in self.workers:
            self.later(self.random.random(), lambda worker=worker: self.call(worker))  # type: ignore[misc]
        self.later(15.0, self.disturb)
        while self.events:
            at, _, event = heapq.heappop(self.events)
            self.time.now = max(self.time.now, at)
            event()
            self.steps += 1
            if self.steps % 25 == 0:
                self.compare()
            self.is_ending = self.steps >= steps
        self.time.now += 2 * TTL_S
        self.compare()
        self.reconcile()
        self.happened["expired"] += self.model.expiries
        return self.steps

    def reconcile(self) -> None:
        """Compare the books with the bills, without the model: nothing is lost, and nothing is counted twice."""
        for balance in self.store.read():
            assert balance.held == (0, 0, 0), f"{balance.key} holds {balance.held} for ever"
            least, most = self.least.get(balance.key, []), self.most.get(balance.key, [])
            for unit in range(3):
                low, high = sum(amount[unit] for amount in least), sum(amount[unit] for amount in most)
                assert balance.spent[unit] <= high, f"{balance.key} was charged twice"
                if not self.crashed:
                    assert balance.spent[unit] >= low, f"{balance.key} lost a bill"
                    if not self.model.expiries:
                        assert balance.spent[unit] == low, f"{balance.key} says {balance.spent[unit]}, billed {low}"


def simulate(steps: int, seed: int = 0, changes: Sequence[tuple[str, str]] = ()) -> Counter[str]:
    """Play episodes until there were so many steps; return what happened. Raise at the first wrong answer."""
    time, happened, episode = VirtualTime(), Counter[str](), 0
    store = simulated_store(time, changes)
    while happened["steps"] < steps:
        random = Random(f"{seed}/{episode}")
        try:
            played = Episode(time, store, random, honest=episode % 3 != 2, happened=happened)
            happened["steps"] += played.play(random.choice([60, 150, 400]))
        except Exception as error:
            error.add_note(f"simulation of seed {seed}, episode {episode}")
            raise
        happened["episodes"] += 1
        episode += 1
        store.empty()
        time.now += 10_000
    return happened


if __name__ == "__main__":
    began = monotonic()
    found = simulate(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(", ".join(f"{name} {number:,}" for name, number in sorted(found.items())))
    print(f"{found['steps']:,} steps agree with the rules, {monotonic() - began:.0f} s")
