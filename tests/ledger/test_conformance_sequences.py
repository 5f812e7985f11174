"""Any sequence of operations, compared with a model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import Balance, Line, StoreReply, StoreSession
from tests.kit.conformance import LONG_S, SHORT_S, WORKERS, a_line, an_id


@dataclass
class OnPaper:
    """A hold as one would write it down."""

    keys: tuple[str, ...]
    state: str
    holds: Amount
    took: Amount = NOTHING


@dataclass
class AccountOnPaper:
    caps: Amount
    granted: Amount = NOTHING
    overrun: Amount = NOTHING
    closed: bool = False


@dataclass
class Paper:
    """The accounts without any cleverness: every hold is kept, and every balance is added up anew."""

    holds: dict[str, OnPaper] = field(default_factory=dict)
    accounts: dict[str, AccountOnPaper] = field(default_factory=dict)

    def touch(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.accounts.setdefault(line.key, AccountOnPaper(line.caps)).caps = line.caps

    def balance(self, key: str, scope: str) -> Balance:
        mine, account = [hold for hold in self.holds.values() if key in hold.keys], self.accounts[key]
        spent = _total(hold.took for hold in mine)
        held = _total(hold.holds for hold in mine if hold.state == "open")
        expired = _total(hold.took for hold in mine if hold.state == "expired")
        return Balance(
            key, scope, None, None, account.caps, spent, held, account.granted, account.overrun, expired, account.closed
        )

    def beyond(self, key: str) -> Amount:
        """How far above the cap spend and holds stand; negative where there is room."""
        b = self.balance(key, "")
        return tuple(b.spent[i] + b.held[i] - b.caps[i] - b.granted[i] for i in range(3))  # type: ignore[return-value]

    def reserve(self, hold: str, lines: Sequence[Line], want: Amount, force: bool) -> bool:
        if (known := self.holds.get(hold)) is not None:
            return known.state == "open"
        self.touch(lines)
        for line in lines:
            if not force and (
                self.accounts[line.key].closed
                or any(b + w > 0 for b, w in zip(self.beyond(line.key), want, strict=True))
            ):
                return False
        self.holds[hold] = OnPaper(tuple(line.key for line in lines), "open", want)
        return True

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount) -> None:
        if hold not in self.holds:
            self.touch(lines)
            self.holds[hold] = OnPaper(tuple(line.key for line in lines), "unknown", NOTHING)
        known = self.holds[hold]
        if known.state == "released" and not known.keys:  # released before it was made: nobody knew its accounts
            self.touch(lines)
            known.keys = tuple(line.key for line in lines)
        expected = known.holds if known.state == "open" else known.took
        known.state, known.took = "settled", actual
        for account, over in ((self.accounts[key], self.beyond(key)) for key in known.keys):
            old = account.overrun
            excess = [actual[i] - expected[i] for i in range(3)]
            broke = [excess[i] > 0 and over[i] > 0 for i in range(3)]
            account.overrun = tuple(
                max(old[i], min(over[i], old[i] + excess[i])) if broke[i] else old[i] for i in range(3)
            )  # type: ignore[assignment]
            account.closed = account.closed or any(broke)

    def end(self, hold: str, state: str) -> None:
        known = self.holds.setdefault(hold, OnPaper((), state, NOTHING))
        if known.state == "open":
            known.state = state
            known.took = known.holds if state == "expired" else NOTHING

    def extend(self, line: Line, more: Amount) -> None:
        self.touch([line])
        account = self.accounts[line.key]
        account.granted = _total([account.granted, more])
        account.closed = account.closed and any(over > 0 for over in self.beyond(line.key))


def _total(amounts: Any) -> Amount:
    return tuple(map(sum, zip(NOTHING, *amounts, strict=True)))  # type: ignore[return-value]


AMOUNTS = st.tuples(*[st.integers(0, 6)] * 2, st.integers(0, 3))


CAPS = st.tuples(*[st.sampled_from([0, 5, 10, 20, UNLIMITED])] * 3)


HOLDS = st.integers(0, 9)  # few, so that ids come again


SETS = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 0), (2, 1, 0), ()])


_examples = count()


class AgainstPaper(RuleBasedStateMachine):
    def __init__(self, session: StoreSession) -> None:
        super().__init__()
        self.session, self.paper, self.example = session, Paper(), next(_examples)
        self.scope = f"user:a/{self.example}"
        self.caps: list[Amount] = [(10, 10, 10)] * 3

    def lines(self, which: Sequence[int]) -> list[Line]:
        return [a_line(f"{self.example}.{i}#", self.caps[i], scope=self.scope) for i in which]

    def hold(self, number: int) -> str:
        return f"{self.example}.{number}"

    def check(self, reply: StoreReply) -> None:
        assert not reply.stale
        for balance in reply.balances:
            told = self.paper.balance(balance.key, self.scope)
            assert (balance.caps, balance.granted, balance.overrun, balance.closed) == (
                told.caps,
                told.granted,
                told.overrun,
                told.closed,
            )
            assert _total([balance.spent, balance.held]) == _total([told.spent, told.held])

    @initialize(caps=st.tuples(CAPS, CAPS, CAPS))
    def begin(self, caps: tuple[Amount, Amount, Amount]) -> None:
        self.caps = list(caps)

    @rule(number=HOLDS, which=SETS, want=AMOUNTS, force=st.sampled_from([False, False, False, True]))
    def reserve(self, number: int, which: Sequence[int], want: Amount, force: bool) -> None:
        lines = self.lines(which)
        reply = self.session.reserve(self.hold(number), LONG_S, lines, want, force=force)
        assert reply.ok is self.paper.reserve(self.hold(number), lines, want, force)
        self.check(reply)

    @rule(number=HOLDS, which=SETS, want=AMOUNTS)
    def die_with_a_hold(self, number: int, which: Sequence[int], want: Amount) -> None:
        lines, is_new = self.lines(which), self.hold(number) not in self.paper.holds
        reply = self.session.reserve(self.hold(number), SHORT_S, lines, want)
        assert reply.ok is self.paper.reserve(self.hold(number), lines, want, force=False)
        if is_new and reply.ok:
            time.sleep(0.003)
            self.paper.end(self.hold(number), "expired")

    @rule(number=HOLDS, which=SETS, actual=AMOUNTS)
    def settle(self, number: int, which: Sequence[int], actual: Amount) -> None:
        lines = self.lines(which)
        reply = self.session.settle(self.hold(number), lines, actual)
        self.paper.settle(self.hold(number), lines, actual)
        assert reply.ok
        self.check(reply)

    @rule(number=HOLDS)
    def release(self, number: int) -> None:
        assert self.session.release(self.hold(number)).ok
        self.paper.end(self.hold(number), "released")

    @rule(which=st.integers(0, 2), more=AMOUNTS)
    def extend(self, which: int, more: Amount) -> None:
        (line,) = self.lines([which])
        balance = self.session.extend(line, more)
        self.paper.extend(line, more)
        told = self.paper.balance(line.key, self.scope)
        assert (balance.caps, balance.granted, balance.closed) == (told.caps, told.granted, told.closed)

    @rule(which=st.integers(0, 2), caps=CAPS)
    def change_the_policy(self, which: int, caps: Amount) -> None:
        self.caps[which] = caps
        lines, hold = self.lines([which]), an_id()
        reply = self.session.reserve(hold, LONG_S, lines, NOTHING)
        assert reply.ok is self.paper.reserve(hold, lines, NOTHING, force=False)

    @invariant()
    def the_store_has_what_is_on_paper(self) -> None:
        told = {balance.key: balance for balance in self.session.read(self.scope)}
        assert told == {key: self.paper.balance(key, self.scope) for key in self.paper.accounts}


def test_whatever_happens_in_whatever_order_the_store_has_what_is_on_paper(session: StoreSession) -> None:
    run_state_machine_as_test(
        lambda: AgainstPaper(session),  # type: ignore[arg-type]  # whatever makes a machine
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            # a failure is told as it was found: making it smaller takes minutes on a real store
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


WORKERS.set_forkserver_preload(
    ["runguard.ledger.sqlite", "runguard.ledger.redis", "redis", "runguard.ledger.postgres", "psycopg", "pytest"]
)
