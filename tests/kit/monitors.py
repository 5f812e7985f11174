"""Monitors and handlers for the tests of cumulative budgets."""

from types import SimpleNamespace

WRONG_COUNTS = [-1, True, 1.5, float("nan"), "1", None]


def handler(monitor):
    """A callback with an import path."""
    handled.append(monitor.current_tokens)


handled: list[int] = []


def response(prompt=None, output=None, *, partial=None, **counts):
    counts = {"prompt": prompt, "candidates": output, **counts}
    usage = SimpleNamespace(**{f"{name}_token_count": count for name, count in counts.items() if count is not None})
    return SimpleNamespace(usage_metadata=usage, partial=partial, content="words")
