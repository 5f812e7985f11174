"""Accounts for tests that ask every ledger the same."""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
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
from runguard.ledger.ledger import Account, Hold, Ledger, Line, Refusal, Stale
from tests.kit.examples import play_machine
from tests.kit.store_model import StoreModel
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


class Paper(StoreModel):
    """Accounts as one keeps them by hand. A release takes back what was charged for a hold that outlived its time."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[tuple[str, str], tuple[Fraction, Amount]] = {}

    def room(self, key: str, unit: int) -> int:
        return 0 if self.accounts[key].closed else max(-self.due(key, unit), 0)

    def release(self, name: str, now: float = 0.0) -> None:
        hold = self.holds[name]
        if hold.state != "settled":
            hold.state, hold.amount = "released", NOTHING

    def extend(self, line: Line, more: Amount) -> None:
        super().extend(line, more)
        self.marks = {
            mark: entry
            for mark, entry in self.marks.items()
            if mark[0] != line.key or self.is_reached(line.key, *entry)
        }

    def is_reached(self, key: str, share: Fraction, limit: Amount) -> bool:
        granted, spent = self.accounts[key].granted, self.sum_of(key, "settled", "expired")
        return any(limit[u] < UNLIMITED and spent[u] >= math.ceil((limit[u] + granted[u]) * share) for u in range(3))


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
        self.paper, self.holds, self.honest = Paper(), list[Hold](), True

    def accounts(self, keys: Sequence[str]) -> list[Account]:
        return [self.desk.account(key, self.caps[key]) for key in keys]

    def lines(self, keys: Sequence[str]) -> list[Line]:
        return [Line(key, self.desk.scope, None, None, None, self.caps[key]) for key in keys]

    def told(self, hold: Hold, took: Amount) -> None:
        """Settled, and booked when this returns."""
        booked = threading.Event()
        self.desk.ledger.settle(hold, took, booked.set)
        assert booked.wait(PATIENCE_S)

    def key_of(self, account: Account) -> str:
        return account.key.removeprefix(f"{self.desk.name}/").removesuffix("#")

    @initialize(caps=st.tuples(CAPS, CAPS, CAPS))
    def begin(self, caps: tuple[Amount, Amount, Amount]) -> None:
        self.desk = Desk(self.desk.ledger)
        self.caps = dict(zip(KEYS, caps, strict=True))
        self.paper.touch(self.lines(KEYS))
        self.loop.run_until_complete(self.desk.held(self.accounts(KEYS), NOTHING))

    @rule(
        keys=SETS,
        want=AMOUNTS,
        force=st.sampled_from([False, False, False, False, True]),
        outlives=st.sampled_from([False, False, False, True]),
    )
    def reserve(self, keys: list[str], want: Amount, force: bool, outlives: bool) -> None:
        refusing = {key: unit for key in keys if (unit := self.paper.refusing(key, want)) is not None}
        ttl = 0.001 if outlives else TTL_S
        result = self.loop.run_until_complete(self.desk.ledger.reserve(self.accounts(keys), want, force=force, ttl=ttl))
        if refusing and not force:
            assert isinstance(result, Refusal)
            self.check_refusal(result, keys, want, refusing)
            return
        assert isinstance(result, Hold)
        self.honest = self.honest and not refusing
        name = f"{len(self.holds)}"
        self.holds.append(result)
        assert self.paper.reserve(name, 0.0 if outlives else TTL_S, self.lines(keys), want, 0.0, force=force) == "ok"
        if outlives:
            time.sleep(0.003)
            self.paper.expire(0.0)

    def check_refusal(self, refusal: Refusal, keys: list[str], want: Amount, refusing: dict[str, int]) -> None:
        paper = self.paper
        others_hold = [
            not paper.accounts[k].closed
            and paper.sum_of(k, "open")[u] > 0
            and paper.due(k, u) - paper.sum_of(k, "open")[u] < 0
            for k, u in refusing.items()
        ]
        assert refusing.get(self.key_of(refusal.account)) == refusal.unit
        assert (refusal.unit, paper.room(self.key_of(refusal.account), refusal.unit)) == min(
            (unit, paper.room(k, unit)) for k, unit in refusing.items()
        )
        assert refusal.room == tuple(min(paper.room(k, unit) for k in keys) for unit in range(3))
        assert refusal.wanted == want
        assert refusal.wait_helps is all(others_hold)
        assert str(refusal).startswith(f"{self.desk.scope} has no room for {want[refusal.unit]} ")

    @precondition(lambda self: self.holds)
    @rule(pick=PICKS, part=st.sampled_from([0, 1, 2]), more=st.one_of(st.just(NOTHING), AMOUNTS))
    def settle(self, pick: int, part: int, more: Amount) -> None:
        """An open call, or once more one that has ended."""
        number = pick % len(self.holds)
        hold, known = self.holds[number], self.paper.holds[f"{number}"]
        usd, tokens, calls = (amount * part // 2 + extra for amount, extra in zip(hold.amount, more, strict=True))
        took = usd, tokens, calls
        self.honest = self.honest and not any(new > before for new, before in zip(took, known.amount, strict=True))
        self.told(hold, took)
        self.paper.settle(f"{number}", (), took, 0.0)
        assert (hold.booked, hold.is_open) == (took, False)

    @precondition(lambda self: self.holds)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        self.desk.release(self.holds[pick % len(self.holds)])
        self.paper.release(f"{pick % len(self.holds)}")

    @rule(keys=SETS, took=AMOUNTS)
    def book(self, keys: list[str], took: Amount) -> None:
        hold = self.desk.ledger.book(self.accounts(keys))
        self.told(hold, took)
        self.paper.settle(f"{len(self.holds)}", self.lines(keys), took, 0.0)
        self.holds.append(hold)
        self.honest = self.honest and took == NOTHING

    @rule(key=st.sampled_from(KEYS), more=AMOUNTS)
    def extend(self, key: str, more: Amount) -> None:
        (account,) = self.accounts([key])
        self.desk.ledger.extend(account, more)
        self.paper.extend(self.lines([key])[0], more)

    @rule(key=st.sampled_from(KEYS), caps=CAPS)
    def change_the_policy(self, key: str, caps: Amount) -> None:
        self.honest = self.honest and all(new >= old for new, old in zip(caps, self.caps[key], strict=True))
        self.caps[key] = caps
        self.paper.touch(self.lines([key]))
        hold = self.loop.run_until_complete(self.desk.held(self.accounts([key]), NOTHING, force=True))
        self.desk.release(hold)

    @rule(key=st.sampled_from(KEYS), mark=st.sampled_from(sorted(SHARES)))
    def reach_a_mark(self, key: str, mark: str) -> None:
        (account,) = self.accounts([key])
        is_first = self.desk.first(account, mark, SHARES[mark], self.caps[key])
        assert is_first is ((key, mark) not in self.paper.marks)
        self.paper.marks.setdefault((key, mark), (Fraction(str(SHARES[mark])), self.caps[key]))

    @invariant()
    def the_books_say_what_is_on_paper(self) -> None:
        found = {self.key_of(account): account for account in self.desk.ledger.find(self.desk.scope)}
        if not found:
            return  # not begun
        assert sorted(found) == sorted(KEYS)
        for key, (caps, spent, held, _, granted, overrun, closed) in self.paper.books().items():
            account = found[key]
            with_granted = tuple(c if c == UNLIMITED else c + g for c, g in zip(caps, granted, strict=True))
            assert (account.spent, account.held, account.caps) == (spent, held, with_granted)
            assert (account.granted, account.overrun, account.closed) == (granted, overrun, closed)
            if self.honest:
                assert all(self.paper.due(key, unit) <= 0 for unit in range(3))
                assert not account.closed


def agree_with_paper(ledger: Ledger, examples: int, steps: int) -> None:
    """Play operations in any order on a ledger and on paper."""
    with asyncio.Runner() as runner:
        play_machine(lambda: AgainstPaper(Desk(ledger), runner.get_loop()), examples, steps)
