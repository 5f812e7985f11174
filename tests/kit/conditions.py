"""Events, and the conditions that the tests apply to them."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from runguard.termination import (
    TerminationCondition,
)

NAN = math.nan


PRICES = {"toy": {"input": 1, "output": 2}}  # USD per million tokens


def event(*parts: Any, author: str = "a", **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(author=author, content=SimpleNamespace(parts=list(parts)), **fields)


def say(*texts: str, author: str = "a", **fields: Any) -> SimpleNamespace:
    return event(*(SimpleNamespace(text=text) for text in texts), author=author, **fields)


def call(name: str, number: int, **args: Any) -> SimpleNamespace:
    return event(SimpleNamespace(function_call=SimpleNamespace(name=name, args=args, id=f"c{number}")), id=f"e{number}")


def answer(name: str, number: int, response: Any) -> SimpleNamespace:
    return event(SimpleNamespace(function_response=SimpleNamespace(name=name, response=response, id=f"c{number}")))


def took(prompt: int, output: int, **fields: Any) -> SimpleNamespace:
    usage = SimpleNamespace(prompt_token_count=prompt, candidates_token_count=output, total_token_count=prompt + output)
    return say("x", usage_metadata=usage, **fields)


def does(**actions: Any) -> SimpleNamespace:
    return event(actions=SimpleNamespace(**actions))


def fires_at(condition: TerminationCondition, *deltas: Sequence[Any]) -> int | None:
    """Which delta, counted from one, makes it fire."""
    return next((number for number, delta in enumerate(deltas, 1) if condition.check(delta, now=0.0)), None)


def top_level_function(events: Sequence[Any]) -> bool:
    return any(e.author == "boss" for e in events)


class Holder:
    def method(self, events: Sequence[Any]) -> bool:
        return True


class OwnTermination(TerminationCondition):
    """What a user writes."""

    def __init__(self, author: str) -> None:
        self.author, self.seen = author, 0

    def judge(self, events: Sequence[Any], now: float) -> str | None:
        self.seen += sum(e.author == self.author for e in events)
        return f"{self.author} twice" if self.seen >= 2 else None

    def clear(self, now: float) -> None:
        self.seen = 0

    def settings(self) -> dict[str, Any]:
        return {"author": self.author}


class AsyncCallable:
    async def __call__(self, events: Sequence[Any]) -> bool:
        return True


def rounds(
    count: int,
    *,
    response: Any = {"rows": [1, 2]},  # noqa: B006
    tool: str = "t",
    start: int = 0,
    branch: str | None = None,
    **args: Any,
) -> list[Any]:
    events = []
    for number in range(start, start + count):
        for one in (
            call(tool, number, **{k: v(number) if callable(v) else v for k, v in args.items()}),
            answer(tool, number, response),
        ):
            one.branch = branch
            events.append(one)
    return events


def each(events: Sequence[Any]) -> list[list[Any]]:
    return [[one] for one in events]
