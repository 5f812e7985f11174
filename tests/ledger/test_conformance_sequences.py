"""Any sequence of operations, compared with a model."""

import time
from collections.abc import Sequence
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import Line, StoreReply, StoreSession
from tests.kit.conformance import LONG_S, SHORT_S, a_line, an_id
from tests.kit.examples import play_machine
from tests.kit.store_model import StoreModel, book_of


def _total(amounts: Sequence[Amount]) -> list[int]:
    return [sum(parts) for parts in zip(*amounts, strict=True)]


AMOUNTS = st.tuples(*[st.integers(0, 6)] * 2, st.integers(0, 3))


CAPS = st.tuples(*[st.sampled_from([0, 5, 10, 20, UNLIMITED])] * 3)


HOLDS = st.integers(0, 9)  # few, so that ids come again


SETS = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 0), (2, 1, 0), ()])


_examples = count()


class AgainstPaper(RuleBasedStateMachine):
    def __init__(self, session: StoreSession) -> None:
        super().__init__()
        self.session, self.model, self.example = session, StoreModel(), next(_examples)
        self.scope = f"user:a/{self.example}"
        self.caps: list[Amount] = [(10, 10, 10)] * 3

    def lines(self, which: Sequence[int]) -> list[Line]:
        return [a_line(f"{self.example}.{i}#", self.caps[i], scope=self.scope) for i in which]

    def hold(self, number: int) -> str:
        return f"{self.example}.{number}"

    def check(self, reply: StoreReply) -> None:
        assert not reply.stale
        books = self.model.books()
        for balance in reply.balances:
            told, known = book_of(balance), books[balance.key]
            assert (told[0], told[4:]) == (known[0], known[4:])
            assert _total(told[1:3]) == _total(known[1:3])

    def may(self, number: int, ttl: float, lines: Sequence[Line], want: Amount, force: bool = False) -> bool:
        return self.model.reserve(self.hold(number), ttl, lines, want, 0.0, force=force) == "ok"

    @initialize(caps=st.tuples(CAPS, CAPS, CAPS))
    def begin(self, caps: tuple[Amount, Amount, Amount]) -> None:
        self.caps = list(caps)

    @rule(number=HOLDS, which=SETS, want=AMOUNTS, force=st.sampled_from([False, False, False, True]))
    def reserve(self, number: int, which: Sequence[int], want: Amount, force: bool) -> None:
        lines = self.lines(which)
        reply = self.session.reserve(self.hold(number), LONG_S, lines, want, force=force)
        assert reply.ok is self.may(number, LONG_S, lines, want, force)
        self.check(reply)

    @rule(number=HOLDS, which=SETS, want=AMOUNTS)
    def die_with_a_hold(self, number: int, which: Sequence[int], want: Amount) -> None:
        lines, is_new = self.lines(which), self.hold(number) not in self.model.holds
        reply = self.session.reserve(self.hold(number), SHORT_S, lines, want)
        assert reply.ok is self.may(number, 0.0, lines, want)
        if is_new and reply.ok:
            time.sleep(0.003)
            self.model.expire(0.0)

    @rule(number=HOLDS, which=SETS, actual=AMOUNTS)
    def settle(self, number: int, which: Sequence[int], actual: Amount) -> None:
        lines = self.lines(which)
        reply = self.session.settle(self.hold(number), lines, actual)
        self.model.settle(self.hold(number), lines, actual, 0.0)
        assert reply.ok
        self.check(reply)

    @rule(number=HOLDS)
    def release(self, number: int) -> None:
        assert self.session.release(self.hold(number)).ok
        self.model.release(self.hold(number), 0.0)

    @rule(which=st.integers(0, 2), more=AMOUNTS)
    def extend(self, which: int, more: Amount) -> None:
        (line,) = self.lines([which])
        balance = self.session.extend(line, more)
        self.model.extend(line, more)
        assert book_of(balance) == self.model.books()[line.key]

    @rule(which=st.integers(0, 2), caps=CAPS)
    def change_the_policy(self, which: int, caps: Amount) -> None:
        self.caps[which] = caps
        lines, hold = self.lines([which]), an_id()
        reply = self.session.reserve(hold, LONG_S, lines, NOTHING)
        assert reply.ok is (self.model.reserve(hold, LONG_S, lines, NOTHING, 0.0) == "ok")

    @invariant()
    def the_store_has_what_is_on_paper(self) -> None:
        assert {balance.key: book_of(balance) for balance in self.session.read(self.scope)} == self.model.books()


def test_whatever_happens_in_whatever_order_the_store_has_what_is_on_paper(session: StoreSession) -> None:
    play_machine(lambda: AgainstPaper(session), 25, 30)
