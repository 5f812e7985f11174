"""Random operations on every ledger, compared with accounts that are kept by hand (``AgainstPaper``). The short form is
in ``tests/ledger/test_ledgers.py``.

Here there are many more operations, and on a store several ledgers take turns, as workers in different processes do.
"""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from runguard.ledger.ledger import Account, Ledger
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.remote import StoreLedger
from tests.kit.ledgers import AgainstPaper, Desk
from tests.kit.waiting import PATIENCE_S

EXAMPLES = {"memory": 500, "sqlite": 40, "redis": 80, "postgres": 40}
WORKERS = 3


class InTurn:
    """Several ledgers that look like one: each question goes to the next of them."""

    def __init__(self, ledgers: list[Ledger]) -> None:
        self._all, self._turns = ledgers, itertools.cycle(ledgers)

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._turns), name)

    def account(self, *facts: Any) -> Account:
        """All workers have the same policy: a changed cap reaches each of them."""
        return [ledger.account(*facts) for ledger in self._all][-1]

    def flush(self, seconds: float) -> bool:
        return all(ledger.flush(seconds) for ledger in self._all)


def stores(place: Any) -> Iterator[Ledger]:
    place.connect().close()  # the schema is made once
    for _ in range(WORKERS):
        yield StoreLedger(place.store(), PATIENCE_S)


def play(ledger: Any, examples: int) -> None:
    with asyncio.Runner() as runner:
        run_state_machine_as_test(
            lambda: AgainstPaper(Desk(ledger), runner.get_loop()),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                # a failure is reported as it was found: making it smaller takes minutes on a real store
                phases=[Phase.generate],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.timeout(1_800)
def test_many_random_operations_in_memory_agree_with_the_reference(is_long: bool) -> None:
    play(MemoryLedger(), EXAMPLES["memory"] if is_long else 10)


@pytest.mark.timeout(1_800)
def test_many_random_operations_of_several_workers_agree_with_the_reference(place: Any, is_long: bool) -> None:
    play(InTurn(list(stores(place))), EXAMPLES[place.kind] if is_long else 2)
