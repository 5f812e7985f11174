"""Tables of examples as one test, and how many examples a property is tried on."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def examples(number: int, **more: Any) -> settings:
    """Return the settings of a property that ``make faults`` tries on so many examples, ``make test`` on a quarter."""
    return settings(
        max_examples=number if os.environ.get("RUNGUARD_FAULTS") == "long" else max(20, number // 4),
        deadline=None,
        **more,
    )


def play_machine(make: Callable[[], RuleBasedStateMachine], number: int, steps: int) -> None:
    """Play so many examples of a state machine.

    A failure is told as it was found: to make it smaller takes minutes on a real store.
    """
    run_state_machine_as_test(
        make,  # type: ignore[arg-type]  # whatever makes a machine
        settings=settings(
            max_examples=number,
            stateful_step_count=steps,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def each_row(names: str | Sequence[str], table: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Play a test on every row, like ``parametrize``, as one case: for rows that take no time and need no fixture.

    What a row raises says which row it was.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    single, kept = isinstance(names, str) and len(listed) == 1, list(table)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def play(**others: Any) -> None:
            for row in kept:
                given = dict(zip(listed, [row] if single else row, strict=True))
                try:
                    test(**given, **others)
                except Exception as error:
                    error.add_note(f"in the row {given}")
                    raise

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name not in listed]
        play.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # pytest asks for it
        return play

    return decorate
