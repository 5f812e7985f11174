"""Equal calls have equal digests, in every process, whatever their size."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runguard.core.identity import answer_text, call_fingerprint, size_of
from tests.kit.examples import each_row
from tests.kit.fingerprints import cyclic_list, keys, values

arguments = st.dictionaries(keys, values, max_size=5)


# ---- what a call means ----------------------------------------------------------------------------------------------


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return float(value) if type(value) is int and abs(value) <= 2**53 else value


def with_nones(value: Any) -> Any:
    if isinstance(value, dict):
        absent = next(name for name in ("x" * n for n in range(20, 100)) if name not in value)
        return {**{key: with_nones(entry) for key, entry in value.items()}, absent: None}
    return [with_nones(item) for item in value] if isinstance(value, list) else value


@given(arguments)
def test_key_order_does_not_matter(args: dict[Any, Any]) -> None:
    assert call_fingerprint("t", reordered(args)) == call_fingerprint("t", args)


@given(arguments)
def test_a_whole_float_is_its_integer(args: dict[Any, Any]) -> None:
    assert call_fingerprint("t", with_floats(args)) == call_fingerprint("t", args)


@given(arguments)
def test_an_argument_that_is_none_is_absent(args: dict[Any, Any]) -> None:
    assert call_fingerprint("t", with_nones(args)) == call_fingerprint("t", args)


@given(
    words=st.lists(st.text("abc", min_size=1), min_size=1, max_size=5),
    gaps=st.lists(st.text(" \t\n", min_size=1, max_size=3), min_size=6, max_size=6),
)
def test_white_space_does_not_matter(words: list[str], gaps: list[str]) -> None:
    padded = gaps[5] + "".join(word + gap for word, gap in zip(words, gaps, strict=False))
    assert call_fingerprint("t", {"q": padded}) == call_fingerprint("t", {"q": " ".join(words)})


@each_row(("a", "b"), [(1, "1"), (1, True), (0, False), (1, 1.5), ("", "0"), ([], {}), ([1], 1)])
def test_types_that_mean_something_else_differ(a: Any, b: dict[str, Any] | float | str) -> None:
    assert call_fingerprint("t", {"x": a}) != call_fingerprint("t", {"x": b})


def test_the_tool_is_part_of_the_call() -> None:
    assert call_fingerprint("read", {"x": 1}) != call_fingerprint("write", {"x": 1})


def test_identity_names_the_only_arguments_that_count() -> None:
    first = call_fingerprint("t", {"job": 7, "reason": "because"}, identity=["job"])
    assert first == call_fingerprint("t", {"job": 7, "reason": "now"}, identity=["job"])
    assert first != call_fingerprint("t", {"job": 8, "reason": "because"}, identity=["job"])


def test_volatile_arguments_never_count() -> None:
    first = call_fingerprint("t", {"job": 7, "nonce": "x"}, volatile=["nonce"])
    assert first == call_fingerprint("t", {"job": 7, "nonce": "y"}, volatile=["nonce"])
    assert first != call_fingerprint("t", {"job": 8, "nonce": "x"}, volatile=["nonce"])


# ---- different data, different digest -------------------------------------------------------------------------------


paths = st.lists(st.tuples(st.sampled_from(["key", "item"]), keys, values), max_size=12)


DISTINCT = [0, 1, -1, 2.5, "", "0", "one", "two words", True, False, "é", 10**30, 10**60]


def around(leaf: Any, path: list[tuple[str, str, Any]]) -> Any:
    """``leaf`` at the bottom of dicts and lists, with siblings beside it."""
    for kind, key, sibling in path:
        leaf = {key: leaf, key + "'": sibling} if kind == "key" else [sibling, leaf, sibling]
    return leaf


@given(path=paths, pair=st.lists(st.sampled_from(DISTINCT), min_size=2, max_size=2, unique_by=lambda v: (type(v), v)))
def test_one_changed_field_changes_the_digest(path: list[tuple[str, Any, Any]], pair: list[float | str]) -> None:
    one, other = (around(value, path) for value in pair)
    assert call_fingerprint("t", {"x": one}) != call_fingerprint("t", {"x": other})


@given(path=paths, pair=st.lists(st.sampled_from(DISTINCT), min_size=2, max_size=2, unique_by=lambda v: (type(v), v)))
def test_one_changed_field_is_seen_beside_a_foreign_value_too(
    path: list[tuple[str, Any, Any]], pair: list[float | str]
) -> None:
    one, other = ({"raw": b"\0", "x": around(value, path)} for value in pair)
    assert answer_text(one) != answer_text(other)


@given(one=values, other=values)
def test_equal_text_means_equal_data(one: Any, other: Any) -> None:
    assume(repr(one) != repr(other) and one != other)
    assert answer_text({"x": one}) != answer_text({"x": other})


class Celsius(float):
    pass


class Rank(int):
    pass


@dataclass(slots=True)
class Slotted:
    progress: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(Decimal("1.10"), Decimal("1.20"), id="Decimal"),
        pytest.param(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC), id="datetime"),
        pytest.param(date(2026, 1, 1), date(2026, 1, 2), id="date"),
        pytest.param(timedelta(seconds=1), timedelta(seconds=2), id="timedelta"),
        pytest.param(UUID(int=1), UUID(int=2), id="UUID"),
        pytest.param(PurePosixPath("/a"), PurePosixPath("/b"), id="path"),
        pytest.param(Celsius(1.5), Celsius(2.5), id="float subclass"),
        pytest.param(Rank(1), Rank(2), id="int subclass"),
        pytest.param(b"one", b"two", id="bytes"),
        pytest.param({1, 2}, {1, 3}, id="set"),
        pytest.param({(1, 2)}, {(1, 3)}, id="set of tuples"),
        pytest.param({1: "a"}, {2: "a"}, id="other keys than text"),
        pytest.param(SimpleNamespace(progress=1), SimpleNamespace(progress=2), id="attribute"),
        pytest.param(SimpleNamespace(items=[1]), SimpleNamespace(items=[2]), id="attribute that holds a list"),
        pytest.param(
            SimpleNamespace(job=SimpleNamespace(step=1)),
            SimpleNamespace(job=SimpleNamespace(step=2)),
            id="attribute of an attribute",
        ),
        pytest.param(Slotted(1), Slotted(2), id="slots"),
    ],
)
def test_a_change_inside_a_value_that_is_not_json_is_a_change(one: Any, other: Any) -> None:
    # Otherwise a tool that reports progress in such a value would be stopped for repeating itself.
    assert answer_text({"result": one}) != answer_text({"result": other})


def jobs(step: int) -> list[dict[str, Any]]:
    """A list of six hundred, one of which moves."""
    return [{"job": i, "note": "x" * 120, "state": f"step {step}" if i == 300 else "idle"} for i in range(600)]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(jobs, id="in the middle of a list of hundreds"),
        pytest.param(lambda n: {f"k{i}": i + n for i in range(5_000)}, id="in a dict of thousands"),
        pytest.param(lambda n: {"log": list(range(5_000)), "progress": n}, id="beside a list of thousands"),
        pytest.param(
            lambda n: {"log": list(range(5_000)), "meta": {"a": 1, "b": 2, "progress": n, "z": 3}},
            id="inside a neighbour of a list of thousands",
        ),
        pytest.param(
            lambda n: {"log": {str(i): i for i in range(5_000)}, "progress": n}, id="beside a dict of thousands"
        ),
        pytest.param(lambda n: {"a": "x" * 40_000, "b": "y" * 40_000, "progress": n}, id="after long texts"),
        pytest.param(lambda n: {"text": "x" * 200_000 + str(n)}, id="at the end of a long text"),
        pytest.param(lambda n: {"text": str(n) + "x" * 200_000}, id="at the start of a long text"),
        pytest.param(lambda n: "x" * 200_000 + "y" * n, id="in the length of a long text"),
    ],
)
def test_a_change_in_a_large_answer_is_a_change(answer: Callable[..., Any]) -> None:
    assert answer_text(answer(1)) != answer_text(answer(2))


# ---- the same in every process --------------------------------------------------------------------------------------


ELSEWHERE = """
import enum
from runguard.core.identity import answer_text, call_fingerprint, digest

class Colour(enum.Enum):
    RED = "red"

class Thing:
    def __init__(self, **fields):
        self.__dict__.update(fields)

words = ["alpha", "beta", "gamma", "delta", "epsilon"]
samples = [
    {"b": 1, "a": [1.5, None, {"z": "é", "y": True}]},
    {"tags": set(words), "frozen": frozenset(words)},
    {frozenset(words): 1},
    {"thing": Thing(name="x", size=3, flag=None), "colour": Colour.RED},
    [Thing(tags="t"), object(), len],
    {1: "a", "b": 2, None: 3, (1, 2): 4},
    {"many": {f"member {n} " + "x" * 40 for n in range(2_000)}},
    {"raw": b"bytes", "inner": {"set": {b"a", 1, "x", None, 2.5}}},
]
for sample in samples:
    print(digest(answer_text(sample)).hex(), call_fingerprint("t", {"x": sample}).hex())
"""


def test_equal_data_has_equal_digests_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", ELSEWHERE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(outputs) == 1
    lines = outputs.pop().splitlines()
    assert len(set(lines)) == len(lines) == 8


def test_equal_data_has_equal_text_however_deep_the_caller_stands() -> None:
    nested: Any = "leaf"
    for _ in range(500):
        nested = [nested]

    def deeper(levels: int) -> str:
        return answer_text(nested) if not levels else deeper(levels - 1)

    assert deeper(0) == deeper(sys.getrecursionlimit() - 400)


# ---- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("x" * 1_000, id="text"),
        pytest.param({"a": {"b": ["x" * 500, "x" * 500]}}, id="nested"),
        pytest.param({"x" * 1_000: 1}, id="key"),
        pytest.param({"a": ("x" * 1_000,)}, id="tuple"),
        pytest.param({"a": b"x" * 1_000}, id="bytes"),
        pytest.param({"a": {"x" * 1_000}}, id="set"),
    ],
)
def test_size_counts_the_text_wherever_it_is(value: dict[Any, Any] | dict[str, Any] | str) -> None:
    assert size_of(value, 10_000) >= 1_000


def test_size_stops_counting_when_it_has_enough() -> None:
    assert size_of(["x" * 1_000] * 1_000, 5_000) < 10_000


def test_size_of_a_circle_ends() -> None:
    assert size_of(cyclic_list(), 1_000) > 1_000


def test_which_attempt_it_is_does_not_count() -> None:
    first = call_fingerprint("run", {"command": "make", "attempt": 1})
    assert call_fingerprint("run", {"command": "make", "attempt": 2}) == first
    assert call_fingerprint("run", {"command": "make all", "attempt": 1}) != first
    assert call_fingerprint("run", {"command": "make", "attempt": 2}, exact=True) != first
    assert call_fingerprint("run", {"attempt": 1}) != call_fingerprint("run", {"attempt": 2}), (
        "where it is all there is, it counts"
    )
    assert call_fingerprint("run", {"attempt": 1, "retry": 1}) != call_fingerprint("run", {"attempt": 2, "retry": 1})
    assert call_fingerprint("get", {"request_id": 1, "full": True}) != call_fingerprint(
        "get", {"request_id": 2, "full": True}
    ), "a thing that is looked up"
