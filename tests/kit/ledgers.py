"""Accounts for tests that ask every ledger the same."""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import Account, Hold, Ledger, Refusal, Stale
from tests.kit.waiting import PATIENCE_S

TTL_S = 300.0  # a hold that no test outlives


FREE: Amount = (UNLIMITED, UNLIMITED, UNLIMITED)


CALL: Amount = (0, 0, 1)


numbers = count(1)


def usd(cap: int) -> Amount:
    return (cap, UNLIMITED, UNLIMITED)


class Desk:
    """One test's own corner of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.name = ledger, f"d{next(numbers)}"
        self.scope = self.scope_of("ann")

    def scope_of(self, user: str) -> str:
        return f"user:{self.name}/{user}"

    def account(
        self,
        key: str = "k",
        caps: Amount = (100, UNLIMITED, UNLIMITED),
        *,
        user: str = "ann",
        begins: float | None = None,
        ends: float | None = None,
    ) -> Account:
        """As a guard asks for it: anew before every call."""
        return self.ledger.account(
            f"{self.name}/{key}#", self.scope_of(user), None if ends is None else "1h", ends, caps, begins
        )

    async def reserve(
        self, accounts: Sequence[Account], want: Amount, *, force: bool = False
    ) -> Hold | Refusal | Stale:
        return await self.ledger.reserve(accounts, want, force=force, ttl=TTL_S)

    async def held(self, accounts: Sequence[Account], want: Amount, *, force: bool = False) -> Hold:
        result = await self.reserve(accounts, want, force=force)
        assert isinstance(result, Hold), f"not held: {result}"
        return result

    async def refused(self, accounts: Sequence[Account], want: Amount) -> Refusal:
        result = await self.reserve(accounts, want)
        assert isinstance(result, Refusal), f"not refused: {result}"
        return result

    async def spend(self, accounts: Sequence[Account], amount: Amount) -> Hold:
        """One call that takes what it held."""
        hold = await self.held(accounts, amount)
        self.settle(hold, amount)
        return hold

    def settle(self, hold: Hold, actual: Amount) -> None:
        self.ledger.settle(hold, actual)
        self.flush()

    def release(self, hold: Hold) -> None:
        self.ledger.release(hold)
        self.flush()

    def first(
        self, account: Account, mark: str, percent: float = 0.5, limit: Amount = (100, UNLIMITED, UNLIMITED)
    ) -> bool | None:
        """Asked as thresholds are: once a settlement is booked."""
        answers: list[bool | None] = []
        self.ledger.settle(
            self.ledger.book([account]),
            NOTHING,
            lambda: answers.append(self.ledger.first(account, mark, percent, limit)),
        )
        self.flush()
        (answer,) = answers
        return answer

    def now(self) -> float:
        return self.ledger.now(time.time())  # noqa: TID251

    def flush(self) -> None:
        assert self.ledger.flush(PATIENCE_S)

    def find(self, key: str = "k", user: str = "ann") -> Account:
        """An account as anybody finds it."""
        (found,) = [
            account for account in self.ledger.find(self.scope_of(user)) if account.key == f"{self.name}/{key}#"
        ]
        return found

    def books(self, key: str = "k", user: str = "ann") -> tuple[Amount, Amount]:
        """Spent and held."""
        found = self.find(key, user)
        return found.spent, found.held


@dataclass
class Slip:
    """One call on paper: where it counts, what it holds, what it took."""

    keys: tuple[str, ...]
    holds: Amount
    took: Amount = NOTHING


@dataclass
class Page:
    """One account on paper. What is spent and held is in the slips."""

    cap: list[int]
    granted: list[int] = field(default_factory=lambda: [0, 0, 0])
    overrun: list[int] = field(default_factory=lambda: [0, 0, 0])
    closed: bool = False
    marks: dict[str, tuple[Fraction, Amount]] = field(default_factory=dict)


class Paper:
    """Accounts as one keeps them by hand: nothing is carried over, every sum is made anew from all slips."""

    def __init__(self, caps: dict[str, Amount]) -> None:
        self.pages = {key: Page(list(cap)) for key, cap in caps.items()}
        self.slips: list[Slip] = []

    def spent(self, key: str, unit: int) -> int:
        return sum(slip.took[unit] for slip in self.slips if key in slip.keys)

    def held(self, key: str, unit: int) -> int:
        return sum(slip.holds[unit] for slip in self.slips if key in slip.keys)

    def cap(self, key: str, unit: int) -> int:
        page = self.pages[key]
        return UNLIMITED if page.cap[unit] == UNLIMITED else page.cap[unit] + page.granted[unit]

    def above(self, key: str, unit: int) -> int:
        """How far spend and holds are above the cap; below zero there is room."""
        return self.spent(key, unit) + self.held(key, unit) - self.cap(key, unit)

    def room(self, key: str, unit: int) -> int:
        return 0 if self.pages[key].closed else max(-self.above(key, unit), 0)

    def refusing(self, key: str, want: Amount) -> int | None:
        """The first unit in which an account refuses."""
        page = self.pages[key]
        if page.closed:
            return next(unit for unit in range(3) if page.overrun[unit])  # what closed it
        return next((unit for unit in range(3) if self.above(key, unit) + want[unit] > 0), None)

    def settle(self, slip: Slip, took: Amount) -> None:
        # one of the two is nothing
        before = [max(held, paid) for held, paid in zip(slip.holds, slip.took, strict=True)]
        slip.holds, slip.took = NOTHING, took
        for key in slip.keys:
            page = self.pages[key]
            for unit in range(3):
                excess, above = took[unit] - before[unit], self.above(key, unit)
                if excess > 0 and above > 0:
                    page.closed = True
                    page.overrun[unit] = max(page.overrun[unit], min(above, page.overrun[unit] + excess))

    def extend(self, key: str, more: Amount) -> None:
        page = self.pages[key]
        page.granted = [had + new for had, new in zip(page.granted, more, strict=True)]
        page.closed = page.closed and any(self.above(key, unit) > 0 for unit in range(3))
        page.marks = {mark: entry for mark, entry in page.marks.items() if self.is_reached(key, *entry)}

    def is_reached(self, key: str, share: Fraction, limit: Amount) -> bool:
        granted = self.pages[key].granted
        return any(
            limit[u] < UNLIMITED and self.spent(key, u) >= math.ceil((limit[u] + granted[u]) * share) for u in range(3)
        )


KEYS = ("run", "user", "app")


SETS = st.lists(st.sampled_from(KEYS), min_size=1, unique=True)


AMOUNTS = st.tuples(st.integers(0, 40), st.integers(0, 30), st.integers(0, 2))


CAPS = st.tuples(
    st.sampled_from([0, 60, 100, UNLIMITED]), st.sampled_from([50, 80, UNLIMITED]), st.sampled_from([3, 6, UNLIMITED])
)


PICKS = st.integers(0, 99)


SHARES = {"30": 0.3, "50": 0.5, "100": 1.0}


class AgainstPaper(RuleBasedStateMachine):
    """``honest``: nobody billed more than it held, nobody was forced in, and no cap was lowered."""

    def __init__(self, desk: Desk, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.desk, self.loop = desk, loop
        self.caps: dict[str, Amount] = dict.fromkeys(KEYS, FREE)
        self.paper, self.holds, self.honest = Paper(self.caps), list[Hold](), True

    def accounts(self, keys: Sequence[str]) -> list[Account]:
        return [self.desk.account(key, self.caps[key]) for key in keys]

    def told(self, hold: Hold, took: Amount) -> None:
        """Settled, and booked when this returns."""
        booked = threading.Event()
        self.desk.ledger.settle(hold, took, booked.set)
        assert booked.wait(PATIENCE_S)

    @initialize(caps=st.tuples(CAPS, CAPS, CAPS))
    def begin(self, caps: tuple[Amount, Amount, Amount]) -> None:
        self.desk = Desk(self.desk.ledger)
        self.caps = dict(zip(KEYS, caps, strict=True))
        self.paper = Paper(self.caps)
        self.loop.run_until_complete(self.desk.held(self.accounts(KEYS), NOTHING))

    @rule(keys=SETS, want=AMOUNTS, force=st.sampled_from([False, False, False, False, True]))
    def reserve(self, keys: list[str], want: Amount, force: bool) -> None:
        refusing = {key: unit for key in keys if (unit := self.paper.refusing(key, want)) is not None}
        result = self.loop.run_until_complete(self.desk.reserve(self.accounts(keys), want, force=force))
        if refusing and not force:
            assert isinstance(result, Refusal)
            self.check_refusal(result, keys, want, refusing)
            return
        assert isinstance(result, Hold)
        self.honest = self.honest and not refusing
        self.holds.append(result)
        self.paper.slips.append(Slip(tuple(keys), want))

    def check_refusal(self, refusal: Refusal, keys: list[str], want: Amount, refusing: dict[str, int]) -> None:
        paper, key = self.paper, refusal.account.key.removeprefix(f"{self.desk.name}/").removesuffix("#")
        others_hold = [
            not paper.pages[k].closed and paper.held(k, u) > 0 and paper.spent(k, u) < paper.cap(k, u)
            for k, u in refusing.items()
        ]
        assert refusing.get(key) == refusal.unit
        assert (refusal.unit, paper.room(key, refusal.unit)) == min(
            (unit, paper.room(k, unit)) for k, unit in refusing.items()
        )
        assert refusal.room == tuple(min(paper.room(k, unit) for k in keys) for unit in range(3))
        assert refusal.wanted == want
        assert refusal.wait_helps is all(others_hold)

    @precondition(lambda self: self.holds)
    @rule(pick=PICKS, part=st.sampled_from([0, 1, 2]), more=st.one_of(st.just(NOTHING), AMOUNTS))
    def settle(self, pick: int, part: int, more: Amount) -> None:
        """An open call, or once more one that has ended."""
        hold, slip = self.holds[pick % len(self.holds)], self.paper.slips[pick % len(self.holds)]
        took = tuple(amount * part // 2 + extra for amount, extra in zip(hold.amount, more, strict=True))
        assert len(took) == 3
        if any(new > max(held, paid) for new, held, paid in zip(took, slip.holds, slip.took, strict=True)):
            self.honest = False
        self.told(hold, took)
        self.paper.settle(slip, took)

    @precondition(lambda self: self.holds)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        self.desk.release(self.holds[pick % len(self.holds)])
        self.paper.slips[pick % len(self.holds)].holds = NOTHING

    @rule(keys=SETS, took=AMOUNTS)
    def book(self, keys: list[str], took: Amount) -> None:
        hold, slip = self.desk.ledger.book(self.accounts(keys)), Slip(tuple(keys), NOTHING)
        self.told(hold, took)
        self.holds.append(hold)
        self.paper.slips.append(slip)
        self.paper.settle(slip, took)
        self.honest = self.honest and took == NOTHING

    @rule(key=st.sampled_from(KEYS), more=AMOUNTS)
    def extend(self, key: str, more: Amount) -> None:
        (account,) = self.accounts([key])
        self.desk.ledger.extend(account, more)
        self.paper.extend(key, more)

    @rule(key=st.sampled_from(KEYS), caps=CAPS)
    def change_the_policy(self, key: str, caps: Amount) -> None:
        self.honest = self.honest and all(new >= old for new, old in zip(caps, self.caps[key], strict=True))
        self.caps[key] = caps
        self.paper.pages[key].cap = list(caps)
        hold = self.loop.run_until_complete(self.desk.held(self.accounts([key]), NOTHING, force=True))
        self.desk.release(hold)

    @rule(key=st.sampled_from(KEYS), mark=st.sampled_from(sorted(SHARES)))
    def reach_a_mark(self, key: str, mark: str) -> None:
        page, (account,) = self.paper.pages[key], self.accounts([key])
        assert self.desk.first(account, mark, SHARES[mark], self.caps[key]) is (mark not in page.marks)
        page.marks.setdefault(mark, (Fraction(str(SHARES[mark])), self.caps[key]))

    @invariant()
    def the_books_say_what_is_on_paper(self) -> None:
        found = {
            account.key.removeprefix(f"{self.desk.name}/").removesuffix("#"): account
            for account in self.desk.ledger.find(self.desk.scope)
        }
        if not found:
            return  # not begun
        assert sorted(found) == sorted(KEYS)
        for key, account in found.items():
            page = self.paper.pages[key]
            assert account.spent == tuple(self.paper.spent(key, unit) for unit in range(3))
            assert account.held == tuple(self.paper.held(key, unit) for unit in range(3))
            assert account.caps == tuple(self.paper.cap(key, unit) for unit in range(3))
            assert (list(account.granted), list(account.overrun), account.closed) == (
                page.granted,
                page.overrun,
                page.closed,
            )
            if self.honest:
                assert all(self.paper.above(key, unit) <= 0 for unit in range(3))
                assert not account.closed
