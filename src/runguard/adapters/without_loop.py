"""For callers without an event loop: whether there is one, and how they wait for the answer of all layers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from runguard.adapters.ending_conditions import EndingConditions
from runguard.adapters.layers import Layer
from runguard.functions.sync import drive

_T = TypeVar("_T")


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def drive_layers(
    layers: tuple[Layer, ...],
    ending: EndingConditions,
    make: Callable[[], Coroutine[Any, Any, _T]],
    lost: Callable[[_T], None],
) -> _T:
    """Run what ``make`` gives to its end. ``lost`` takes a result that came after its caller was interrupted."""
    waits = any(layer.guard.accounts.ledger.is_shared for layer in layers)
    return drive(make, waits or ending.needs_await, lost)
