"""A settlement and the next reservation in one step do what they do one after the other, on every store."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from runguard.core.money import Amount
from runguard.ledger.ledger import Balance, Line, SettledCall, StoreReply, StoreSession
from tests.kit.conformance import CALL, LONG_S, Connect, a_line, past, the

CAPS = {"a#": (300, 400, 40), "b#": (150, 10_000, 60)}
RECORD = ("call", "run-1", "{}")


class Twin:
    """One of two identical sets of accounts."""

    def __init__(self, session: StoreSession, name: str, *, at_once: bool) -> None:
        self.session, self.name, self.at_once = session, name, at_once

    def lines(self, keys: Sequence[str]) -> list[Line]:
        return [a_line(f"{self.name}{key}", CAPS[key], scope=f"user:{self.name}") for key in keys]

    def step(
        self,
        bill: tuple[str, Sequence[str], Amount],
        ask: tuple[str, float, Sequence[str], Amount, bool],
    ) -> tuple[bool, bool, list[Balance]]:
        old, billed_on, actual = bill
        new, ttl, asked_on, want, force = ask
        record = ("call", self.name, old)
        bill_lines, lines = self.lines(billed_on), self.lines(asked_on)
        if self.at_once:
            settled, reserved = self.session.settle_and_reserve(
                SettledCall(self.name + old, bill_lines, actual, record), self.name + new, ttl, lines, want, force=force
            )
        else:
            settled = self.session.settle(self.name + old, bill_lines, actual, record)
            reserved = self.session.reserve(self.name + new, ttl, lines, want, force=force)
        assert settled.ok
        return reserved.ok, reserved.stale, self._plain(reserved.balances)

    def books(self) -> tuple[list[Balance], list[str]]:
        return (
            self._plain(self.session.read(f"user:{self.name}")),
            [text for _, text in self.session.about("call", self.name)],
        )

    @staticmethod
    def _plain(balances: Sequence[Balance]) -> list[Balance]:
        return sorted((replace(b, key=b.key[1:], scope="") for b in balances), key=lambda balance: balance.key)


@pytest.mark.parametrize("seed", range(2))
def test_one_step_books_what_two_operations_book(session: StoreSession, seed: int) -> None:
    chance = random.Random(seed)
    apart, together = Twin(session, "x", at_once=False), Twin(session, "y", at_once=True)
    holds: list[tuple[str, Sequence[str]]] = [("unknown", ["a#"])]
    for number in range(40):
        name, keys = chance.choice(holds[-3:])
        bill = name, keys, (chance.randrange(30), chance.randrange(30), chance.randrange(2))
        new = chance.choice([f"h{number}", f"h{number}", name])  # also the id of a call that was made already
        asked_on = chance.choice([["a#"], ["a#"], ["a#", "b#"], ["b#"]])
        want = (chance.randrange(30), chance.randrange(60), 1)
        ask = new, LONG_S, asked_on, want, chance.random() < 0.1
        assert apart.step(bill, ask) == together.step(bill, ask)
        assert apart.books() == together.books()
        holds.append((new, asked_on))
        if chance.random() < 0.1:
            for twin in (apart, together):
                session.release(twin.name + new)


def test_a_repeated_step_changes_nothing(session: StoreSession, connect: Connect) -> None:
    """A connection may be lost before the answer arrives: the step is sent again."""
    line = a_line(caps=(100, 100, 9))
    session.reserve("first", LONG_S, [line], (10, 10, 1))
    bill = SettledCall("first", [line], (7, 8, 1), RECORD)
    for again in (session, session, connect()):
        settled, reserved = again.settle_and_reserve(bill, "second", LONG_S, [line], (20, 20, 1))
        assert settled.ok
        assert reserved.ok
    assert (the(session).spent, the(session).held) == ((7, 8, 1), (20, 20, 1))
    assert len(session.tail("call", 9)) == 1


def test_a_settlement_is_booked_beside_a_reservation_of_a_past_period(session: StoreSession) -> None:
    now = session.now()
    open_line = a_line("k#", ends=now + LONG_S)
    session.reserve("first", LONG_S, [open_line], CALL)
    over = replace(open_line, ends=now - 1)
    _, reserved = session.settle_and_reserve(SettledCall("first", [open_line], CALL), "second", LONG_S, [over], CALL)
    assert (reserved.ok, reserved.stale) == (False, True)
    assert (the(session).spent, the(session).held) == (CALL, (0, 0, 0))


def test_an_overdue_hold_of_another_call_is_charged(session: StoreSession) -> None:
    line = a_line(caps=(100, 100, 9))
    session.reserve("first", LONG_S, [line], (10, 10, 1))
    past(session, line, (5, 5, 1))
    _, reserved = session.settle_and_reserve(
        SettledCall("first", [line], (1, 1, 1)), "second", LONG_S, [line], (1, 1, 1)
    )
    assert reserved.ok
    assert _spent(reserved) == (6, 6, 2)


def _spent(reply: StoreReply) -> Amount:
    return reply.balances[0].spent
