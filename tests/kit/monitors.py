"""Monitors and handlers for the tests of cumulative budgets."""

from types import SimpleNamespace
from typing import Any

WRONG_COUNTS = [-1, True, 1.5, float("nan"), "1", None]


def handler(monitor: Any) -> None:
    """A callback with an import path."""
    handled.append(monitor.current_tokens)


handled: list[int] = []


def response(prompt: Any = None, output: Any = None, *, partial: Any = None, **counts: Any) -> Any:
    counts = {"prompt": prompt, "candidates": output, **counts}
    usage = SimpleNamespace(**{f"{name}_token_count": count for name, count in counts.items() if count is not None})
    return SimpleNamespace(usage_metadata=usage, partial=partial, content="words")
