"""Guarded functions and the models behind them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from runguard import (
    RunStoppedError,
)
from tests.kit.waiting import PATIENCE_S

DIME = Decimal("0.1")


class Model:
    """A provider that counts: how often it was called, and how many at once."""

    def __init__(self, *answers: Any, takes: float = 0.0) -> None:
        self.answers, self.takes = answers or ({"usd": 0.10},), takes
        self.calls = self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def _enter(self) -> Any:
        with self._lock:
            answer = self.answers[min(self.calls, len(self.answers) - 1)]
            self.calls += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        return answer

    def _leave(self, answer: Any) -> Any:
        with self._lock:
            self.at_once -= 1
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._enter()
        if self.takes:
            time.sleep(self.takes)
        return self._leave(answer)

    async def asynchronous(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._enter()
        try:
            await asyncio.sleep(self.takes)
        except BaseException:
            self._leave(None)
            raise
        return self._leave(answer)


def swallowing(call: Callable[..., Any], times: int, *args: Any) -> list[Any]:
    """Call again and again as a careless loop does: whatever is raised is kept and ignored."""
    results: list[Any] = []
    for _ in range(times):
        try:
            results.append(call(*args))
        except Exception as error:
            results.append(error)
    return results


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """All at once; a job that does not come back fails the test instead of hanging it."""
    results: list[Any] = [None] * len(jobs)

    def work(place: int) -> None:
        try:
            results[place] = jobs[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a guarded call never came back"
    return results


def in_time(job: Callable[[], Any]) -> Any:
    [result] = in_threads([job])
    if isinstance(result, BaseException):
        raise result
    return result


def held(guarded: Any) -> Decimal:
    return sum((status.reserved for status in guarded.budgets()), Decimal(0))


def refused(results: Iterable[Any]) -> int:
    return sum(isinstance(result, RunStoppedError) for result in results)


class Status(Exception):  # noqa: N818 - as the providers' libraries name theirs
    def __init__(self, status_code: int) -> None:
        super().__init__(status_code)
        self.status_code = status_code


async def caught(call: Callable[..., Any]) -> Any:
    try:
        return await call()
    except RunStoppedError as error:
        return error


def _stopped(call: Callable[..., Any], *args: Any) -> RunStoppedError:
    return next(result for result in swallowing(call, 9, *args) if isinstance(result, RunStoppedError))
