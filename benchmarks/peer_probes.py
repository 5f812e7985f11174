"""One provider, three probes and a stopwatch for any guard. Standard library only: also run by the interpreters of the
peers.

Every call really costs ten cents. A: fifty at once on a dollar, 50 ms each. B: thirty one after the other by a caller
who swallows what is raised. C: the same by one who stops at the first exception. The provider counts what reached it;
the guard says what it believes was spent.
"""

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

CALL_USD, CAP_USD = 0.10, 1.00
MODEL, INPUT, OUTPUT = "gpt-4o", 20_000, 5_000  # at the list price of $2.50 and $10 per million: ten cents
AT_ONCE, IN_A_ROW = 50, 30
LATENCY_S = 0.05
FAR_USD = 10**6  # never reached
OPS, AGE, AGED_OPS = 1_000, 5_000, 100


class Provider:
    """A model that answers after some time and knows how often it was asked."""

    def __init__(self, latency_s: float = 0.0, answer: Callable[[int], Any] | None = None) -> None:
        self.calls, self._latency_s, self._lock = 0, latency_s, threading.Lock()
        self._answer = answer or chat_completion

    def create(self, *_: Any, **__: Any) -> Any:
        with self._lock:
            self.calls += 1
            number = self.calls
        if self._latency_s:
            time.sleep(self._latency_s)
        return self._answer(number)

    async def acreate(self, *_: Any, **__: Any) -> Any:
        with self._lock:
            self.calls += 1
            number = self.calls  # of this answer: calls that run at once must not look like repeats of one
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        return self._answer(number)

    @property
    def usd(self) -> float:
        return self.calls * CALL_USD


_CHAT = SimpleNamespace(
    model=MODEL,
    usage=SimpleNamespace(prompt_tokens=INPUT, completion_tokens=OUTPUT, total_tokens=INPUT + OUTPUT),
    choices=[
        SimpleNamespace(
            index=0, finish_reason="stop", message=SimpleNamespace(role="assistant", content="done", tool_calls=None)
        )
    ],
)


def chat_completion(_: int) -> Any:
    return _CHAT


@dataclass
class Guarded:
    """A provider behind a guard: called without an event loop, or on one, or either way."""

    call: Callable[[], Any] | None
    acall: Callable[[], Awaitable[Any]] | None
    reported: Callable[[], Any]  # dollars, as the guard tells them
    close: Callable[[], Any] = lambda: None


def around(
    provider: Provider, before: Callable[[], Any], after: Callable[[Any, Any], Any], reported: Callable[[], Any]
) -> Guarded:
    """For a guard that is asked before a call and told after it:
    ``after`` gets what ``before`` gave, and the response.
    """

    def call() -> Any:
        leave = before()
        response = provider.create()
        after(leave, response)
        return response

    async def acall() -> Any:
        leave = before()
        response = await provider.acreate()
        after(leave, response)
        return response

    return Guarded(call, acall, reported)


Make = Callable[[Provider, float], Guarded]  # with a cap in dollars


@dataclass
class Case:
    make: Make
    answer: Callable[[int], Any] | None = None  # what the provider gives back
    is_async: bool = False  # measured on an event loop, although there is a way without
    in_dollars: bool = True  # False: counts something else, so only its overhead is measured


# ---- the probes -----------------------------------------------------------------------------------------------------


def dollars(value: Any) -> float | None:
    return None if value is None else round(float(value), 6)


async def _all_at_once(acall: Callable[[], Awaitable[Any]]) -> None:
    await asyncio.gather(*(acall() for _ in range(AT_ONCE)), return_exceptions=True)


def _in_threads(call: Callable[[], Any]) -> None:
    together = threading.Barrier(AT_ONCE)

    def one() -> None:
        together.wait()
        with suppress(Exception):
            call()

    threads = [threading.Thread(target=one) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def probe_a(case: Case) -> dict[str, Any]:
    provider = Provider(LATENCY_S, case.answer)
    guarded = case.make(provider, CAP_USD)
    threads = guarded.acall is None
    if guarded.acall is not None:
        asyncio.run(_all_at_once(guarded.acall))
    elif guarded.call is not None:
        _in_threads(guarded.call)
    figures = {"real": dollars(provider.usd), "reported": dollars(guarded.reported()), "threads": threads}
    guarded.close()
    return figures


def _in_a_row(case: Case, *, swallows: bool) -> dict[str, Any]:
    provider = Provider(0.0, case.answer)
    guarded = case.make(provider, CAP_USD)
    tripped: int | None = None
    error = ""

    async def calls() -> None:
        nonlocal tripped, error
        for _ in range(IN_A_ROW):
            try:
                if guarded.call is not None:
                    guarded.call()
                elif guarded.acall is not None:
                    await guarded.acall()
            except Exception as raised:
                if tripped is None:
                    tripped, error = provider.calls, type(raised).__name__
                if not swallows:
                    break

    if guarded.call is None:
        asyncio.run(calls())
    else:
        with suppress(StopIteration):
            calls().send(None)  # awaits nothing: no loop, as its users have none
    figures = {
        "calls": provider.calls,
        "tripped": tripped,
        "real": dollars(provider.usd),
        "reported": dollars(guarded.reported()),
        "error": error,
    }
    guarded.close()
    return figures


# ---- the stopwatch --------------------------------------------------------------------------------------------------


def _block(call: Callable[[], Any], ops: int) -> float:
    began = time.process_time()
    for _ in range(ops):
        call()
    return (time.process_time() - began) / ops * 1e6


async def _ablock(call: Callable[[], Awaitable[Any]], ops: int) -> float:
    began = time.process_time()
    for _ in range(ops):
        await call()
    return (time.process_time() - began) / ops * 1e6


def lock_and_add() -> Callable[[], None]:
    lock, total = threading.Lock(), 0

    def once() -> None:
        nonlocal total
        with lock:
            total += 1

    return once


def overhead(case: Case, repeats: int, seconds: float) -> dict[str, Any]:
    """CPU microseconds that a guard adds to a call: fresh ones, each for OPS calls, and one that has seen AGE.

    Measured in turns with the bare function and with a lock and an add, so that other work on the machine meets
    them alike. No repeat begins after ``seconds``, but three are made.
    """
    bare = Provider(0.0, case.answer)
    unguarded, base = Guarded(bare.create, bare.acreate, lambda: None), lock_and_add()
    with asyncio.Runner() as runner:

        def timed(guarded: Guarded, ops: int) -> float:
            if guarded.acall is not None and (case.is_async or guarded.call is None):
                return runner.run(_ablock(guarded.acall, ops))
            assert guarded.call is not None
            return _block(guarded.call, ops)

        def rows(guarded: Guarded | None, ops: int) -> list[tuple[float, float, float]]:
            """Lock and add, bare, guarded; without a guard, a fresh one each time."""
            found: list[tuple[float, float, float]] = []
            end = time.monotonic() + seconds
            while len(found) < repeats and (len(found) < 3 or time.monotonic() < end):
                one = guarded or case.make(Provider(0.0, case.answer), FAR_USD)
                found.append((_block(base, OPS), timed(unguarded, OPS), timed(one, ops)))
                if guarded is None:
                    one.close()
            return found

        warm = case.make(Provider(0.0, case.answer), FAR_USD)
        timed(warm, OPS)
        warm.close()
        gc.collect()
        gc.freeze()  # what was imported is not walked again and again
        fresh = rows(None, OPS)
        old = case.make(Provider(0.0, case.answer), FAR_USD)
        timed(old, AGE)
        aged = rows(old, AGED_OPS)
        old.close()
    above, aged_above = (
        [guarded - plain for _, plain, guarded in fresh],
        [guarded - plain for _, plain, guarded in aged],
    )
    return {
        "lock": median(lock for lock, _, _ in fresh),
        "bare": median(plain for _, plain, _ in fresh),
        "guarded": median(guarded for _, _, guarded in fresh),
        "above": median(above),
        "fastest": min(above),
        "p90": sorted(above)[len(above) * 9 // 10],
        "aged": median(aged_above),
        "x_lock": median((guarded - plain) / lock for lock, plain, guarded in fresh),
        "aged_x_lock": median((guarded - plain) / lock for lock, plain, guarded in aged),
        "repeats": len(fresh),
    }


# ---- one process, one case ------------------------------------------------------------------------------------------


def _no_network(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise OSError("nothing here talks to a network")


def measure(case: Case, repeats: int, seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if case.in_dollars:
        figures["A"] = probe_a(case)
        figures["B"] = _in_a_row(case, swallows=True)
        figures["C"] = _in_a_row(case, swallows=False)
    figures["overhead"] = overhead(case, repeats, seconds)
    return figures


def run_case(case: Case, repeats: int, seconds: float) -> None:
    """Measure, and print the figures as the last line; what a guard prints goes elsewhere."""
    sys.addaudithook(_no_network)
    with redirect_stdout(sys.stderr):
        figures = measure(case, repeats, seconds)
    print(json.dumps(figures))
