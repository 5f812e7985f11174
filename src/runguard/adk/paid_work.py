"""Waiting for paid work: model calls that are in flight when a run must be ended from outside."""

import asyncio
from collections.abc import Callable
from typing import Final

_LOOK_S: Final = 0.05
_LOOKS: Final = 600  # half a minute


async def until_done(is_done: Callable[[], bool]) -> bool:
    """Wait, at most half a minute, until the paid calls beside a stopped one have their answers.

    Returns whether there was anything to wait for.
    """
    for look in range(_LOOKS):
        if is_done():
            return look > 0
        await asyncio.sleep(_LOOK_S)
    return True
