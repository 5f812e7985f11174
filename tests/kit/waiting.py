"""Waiting for another thread or process, and many threads at once."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

PATIENCE_S = 20.0  # far beyond anything that works


def eventually(holds: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    """Whether the condition becomes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return bool(holds())
        time.sleep(0.005)
    return True


def until(holds: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait for a condition; the test fails if it never becomes true."""
    assert eventually(holds, seconds), "it never happened"


async def until_async(holds: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """``until`` for a test that runs in the same event loop as what it waits for."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - models, stores and snapshots have no event to wait for
            await asyncio.sleep(0.002)


async def turns(number: int) -> None:
    """Give the other tasks of the event loop so many turns."""
    for _ in range(number):
        await asyncio.sleep(0)


async def forever() -> None:
    """A call that never returns."""
    await asyncio.Event().wait()


def at_once(work: Callable[[int], Any], threads: int = 16, seconds: float = 2 * PATIENCE_S) -> list[Any]:
    """The results of threads that start together. The first error is raised; a thread that hangs fails the test."""
    start, results, errors = threading.Barrier(threads), [None] * threads, list[BaseException]()

    def run(number: int) -> None:
        try:
            start.wait(PATIENCE_S)
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in running), "a thread still waits"
    if errors:
        raise errors[0]
    return results


def loops_at_once(mains: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    """Each coroutine in a thread with its own event loop, all started together."""
    at_once(lambda number: asyncio.run(asyncio.wait_for(mains[number](), 2 * PATIENCE_S)), len(mains), 3 * PATIENCE_S)
