"""A value that holds itself many times is read as often as any other: a bounded number of its entries."""

import sys
from typing import Any

import pytest

from runguard.core.identity import MAX_NODES, bounded_text


class Node:
    pass


def wide_dict() -> Any:
    value: dict[str, Any] = {}
    value.update({f"key {n}": value for n in range(400)})
    return value


def wide_list() -> Any:
    value: list[Any] = []
    value.extend([value] * 400)
    return value


def wide_object() -> Any:
    value = Node()
    for n in range(60):
        setattr(value, f"field{n}", value)
    return value


@pytest.mark.parametrize("make", [wide_dict, wide_list, wide_object])
def test_the_entries_of_all_containers_together_are_bounded(make: Any) -> None:
    calls, value = 0, make()

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        text = bounded_text(value)
    finally:
        sys.setprofile(None)
    assert calls < 16 * MAX_NODES
    assert len(text) < 64 * MAX_NODES
    assert text == bounded_text(make())


def test_every_entry_of_a_value_within_the_bound_is_read() -> None:
    rows = [{"id": n, "tags": {n}} for n in range(MAX_NODES // 4)]  # a set is told by the bounded text
    changed = [*rows[:-1], {"id": -1, "tags": {0}}]
    assert bounded_text(rows) != bounded_text(changed)
