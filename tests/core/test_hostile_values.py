"""No value can make a fingerprint fail or cost more than a bounded walk."""

import sys
from collections.abc import Callable
from datetime import datetime, tzinfo
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core.identity import (
    MAX_CHARS,
    MAX_NODES,
    AnswerBook,
    answer_text,
    bounded_text,
    call_fingerprint,
    size_of,
    snapshot,
)
from runguard.core.outcomes import classify
from tests.kit.fingerprints import GENEROUS_S, cpu_seconds, cyclic_list, keys, scalars


def hostile(base: type) -> type:
    """A subclass of ``base`` every method of which raises; building one is all that works."""

    def boom(*_: Any, **__: Any) -> Any:
        raise AssertionError("foreign code was run")

    names = (
        *(
            "__str__",
            "__repr__",
            "__format__",
            "__eq__",
            "__ne__",
            "__lt__",
            "__gt__",
            "__hash__",
            "__bool__",
            "__len__",
            "__iter__",
            "__contains__",
        ),
        *(
            "__getitem__",
            "__getattr__",
            "__getattribute__",
            "__reduce__",
            "__reduce_ex__",
            "__int__",
            "__float__",
            "__index__",
            "__bytes__",
            "__dir__",
        ),
        *(
            "utcoffset",
            "tzname",
            "dst",
            "fromutc",
            "keys",
            "values",
            "items",
            "get",
            "copy",
            "encode",
            "split",
            "strip",
            "is_integer",
            "bit_length",
            "hex",
        ),
    )
    return type("Hostile", (base,), dict.fromkeys(names, boom))


class ArmedKey:
    """Usable as a key until armed, then hostile: a key has to be hashed once to be one."""

    armed = False

    def __hash__(self) -> int:
        assert not self.armed, "foreign code was run"
        return 5

    def __eq__(self, other: object) -> bool:
        raise AssertionError("foreign code was run")

    def __len__(self) -> int:
        raise AssertionError("foreign code was run")


def a_dict_with_an_armed_key(others: int) -> dict[Any, Any]:
    key = ArmedKey()
    answer: dict[Any, Any] = {key: 1, **{f"key {n}": n for n in range(others)}}
    key.armed = True
    return answer


class LyingDict:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("foreign code was run")


HOSTILES: list[Any] = [
    pytest.param(hostile(object)(), id="object"),
    pytest.param(hostile(str)("text"), id="str"),
    pytest.param(hostile(dict)(a=1), id="dict"),
    pytest.param(hostile(list)([1, 2]), id="list"),
    pytest.param(hostile(tuple)((1, 2)), id="tuple"),
    pytest.param(hostile(int)(5), id="int"),
    pytest.param(hostile(float)(5.0), id="float"),
    pytest.param(hostile(bytes)(b"raw"), id="bytes"),
    pytest.param(hostile(set)({1, 2}), id="set"),
    pytest.param(a_dict_with_an_armed_key(0), id="key"),
    pytest.param(a_dict_with_an_armed_key(100), id="key among many"),
    pytest.param(LyingDict(), id="__dict__ property"),
    pytest.param(datetime(2026, 1, 1, tzinfo=hostile(tzinfo)()), id="time zone"),
]


PLACES: list[Any] = [
    pytest.param(lambda value: value, id="bare"),
    pytest.param(lambda value: {"error": value}, id="error"),
    pytest.param(lambda value: {"status": value, "result": value}, id="status"),
    pytest.param(lambda value: {"result": [value, "text"]}, id="nested"),
    pytest.param(lambda value: SimpleNamespace(field=value), id="attribute"),
]


READERS: list[Any] = [
    pytest.param(answer_text, id="answer_text"),
    pytest.param(lambda value: call_fingerprint("t", value), id="call_fingerprint"),
    pytest.param(lambda value: size_of(value, 1_000), id="size_of"),
    pytest.param(classify, id="classify"),
    pytest.param(lambda value: [AnswerBook().name(b"call", value) for _ in range(2)], id="AnswerBook"),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", HOSTILES)
def test_no_foreign_code_is_run(value: Any, place: Callable[..., Any], read: Any) -> None:
    read(place(value))


def deep_list() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


def deep_dict() -> Any:
    value: Any = {}
    for _ in range(100_000):
        value = {"k": value}
    return value


def cyclic_dict() -> Any:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    value["list"] = [value, value]
    return value


def cyclic_object() -> Any:
    value = SimpleNamespace(a=1)
    value.me = value
    return value


def doubling() -> Any:
    """A few objects that would print as 2**64 nodes."""
    value: Any = [1]
    for _ in range(64):
        value = [value, value]
    return value


MONSTERS: list[Any] = [
    pytest.param(lambda: "x" * 100_000_000, id="100 MB text"),
    pytest.param(lambda: {"a": ["x" * 10_000_000] * 10}, id="100 MB nested"),
    pytest.param(lambda: {"a": b"x" * 100_000_000}, id="100 MB bytes"),
    pytest.param(lambda: {"a": bytearray(10_000_000)}, id="bytearray"),
    pytest.param(lambda: [1] * 5_000_000, id="millions of items"),
    pytest.param(lambda: {i: i for i in range(500_000)}, id="half a million keys"),
    pytest.param(lambda: {"s": set(range(500_000))}, id="set of half a million"),
    pytest.param(lambda: {"k" * 100_000_000: 1}, id="100 MB key"),
    pytest.param(lambda: [{"k" * 100_000: 1}] * 4_000, id="long keys"),
    pytest.param(lambda: {"s": {"m" * 50_000 + str(i) for i in range(500)}}, id="set of long texts"),
    pytest.param(
        lambda: [SimpleNamespace(**{f"f{i}": "v" * 5_000 for i in range(60)})] * 1_000,
        id="objects with long attributes",
    ),
    pytest.param(lambda: [SimpleNamespace(**{"n" * 100_000: 1})] * 4_000, id="objects with long names of attributes"),
    pytest.param(deep_list, id="deep list"),
    pytest.param(deep_dict, id="deep dict"),
    pytest.param(cyclic_list, id="cyclic list"),
    pytest.param(cyclic_dict, id="cyclic dict"),
    pytest.param(cyclic_object, id="cyclic object"),
    pytest.param(doubling, id="shared structure"),
    pytest.param(lambda: {"n": 10**200_000}, id="huge integer"),
    pytest.param(lambda: {"n": -(10**50)}, id="large negative integer"),
    pytest.param(lambda: {"n": Fraction(10**5_000, 7)}, id="fraction of a huge integer"),
    pytest.param(lambda: {"n": Decimal(10) ** 400_000}, id="huge decimal"),
    pytest.param(lambda: {"a": "\ud800", "\udfff": 1}, id="lone surrogates"),
    pytest.param(lambda: [float("nan"), float("inf"), -float("inf")], id="not numbers"),
    pytest.param(lambda: {None: 1, 2: 2, "a": 3, (1,): 4}, id="mixed keys"),
    pytest.param(lambda: object(), id="bare object"),
    pytest.param(lambda: iter(()), id="generator"),
    pytest.param(lambda: ..., id="ellipsis"),
]


@pytest.mark.parametrize("build", MONSTERS)
def test_no_value_costs_more_than_a_bounded_walk(build: Callable[[], Any]) -> None:
    value = build()
    taken, text = cpu_seconds(lambda: answer_text(value)), answer_text(value)
    assert len(text) <= 8 * MAX_CHARS
    assert taken < GENEROUS_S


@pytest.mark.parametrize("build", MONSTERS)
def test_no_argument_costs_more_than_a_bounded_walk(build: Callable[[], Any]) -> None:
    value = build()
    taken, first = cpu_seconds(lambda: call_fingerprint("t", {"x": value})), call_fingerprint("t", {"x": value})
    assert first == call_fingerprint("t", {"x": value})
    assert taken < GENEROUS_S


@pytest.mark.parametrize("build", MONSTERS)
def test_no_answer_costs_more_than_a_bounded_copy(build: Callable[[], Any]) -> None:
    value = build()
    taken, copy = cpu_seconds(lambda: snapshot(value)), snapshot(value)
    assert len(copy) <= 8 * MAX_CHARS
    assert taken < GENEROUS_S


@given(
    st.recursive(
        scalars | st.binary(max_size=9) | st.floats(),
        lambda i: st.lists(i) | st.dictionaries(st.integers() | keys | st.none(), i),
        max_leaves=20,
    )
)
@settings(max_examples=60)
def test_any_plain_value_has_a_text(value: Any) -> None:
    assert isinstance(answer_text(value), str)


# ---- A value that holds itself many times is read as often as any other: a bounded number of its entries ------------


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
