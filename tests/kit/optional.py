"""Values that may be missing by their type, and never are in a test."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value. Fails the test when it is None."""
    assert value is not None
    return value
