"""When two calls of a ``once`` tool are the same: what must match, and above all what must not."""

import json
import math
import subprocess
import sys
from decimal import Decimal
from enum import Enum
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from runguard.policy.tools import Each, Fields, once_identity
from tests.kit.examples import each_row

PAY = Fields(
    {"invoice": None, "amount": int, "rate": float, "express": bool},
    {"amount": 5, "rate": 1.0, "express": False},
    drops_others=True,
)


class Currency(Enum):
    EUR = "eur"


class Line(BaseModel):
    item: str
    count: int = 1


def same(one: Any, other: Any, declared: Fields | None = None) -> bool:
    return once_identity("pay", one, declared) == once_identity("pay", other, declared)


# ---- the same call --------------------------------------------------------------------------------------------------


@each_row(
    "given",
    [
        {"invoice": "A1", "x": 1},
        {"invoice": "A1", "attempt": 1},
        {"invoice": "A1", "amount": 5},
        {"invoice": "A1", "amount": "5"},
        {"invoice": "A1", "amount": " 05 "},
        {"invoice": "A1", "amount": "5.0"},
        {"invoice": "A1", "amount": 5.0},
        {"invoice": "A1", "amount": "5\u200b"},
        {"invoice": "A1", "rate": 1},
        {"invoice": "A1", "rate": "1"},
        {"invoice": "A1", "rate": "1e0"},
        {"invoice": "A1", "express": 0},
        {"invoice": "A1", "express": "false"},
        {"invoice": "A\u200b1"},
        {"invoice": "\ufeffA1"},
        {"invoice": "A1\u2060"},
        {"express": False, "rate": 1.0, "amount": 5, "invoice": "A1"},
    ],
)
def test_what_the_tool_receives_decides(given: dict[str, Any]) -> None:
    assert same({"invoice": "A1"}, given, PAY)


@each_row(
    ("one", "other"),
    [
        ({"name": "é"}, {"name": "e\u0301"}),
        ({"name": "é"}, {"name": "e\u200b\u0301"}),
        ({"n": 5}, {"n": 5.0}),
        ({"n": 0}, {"n": -0.0}),
        ({"items": [1, 2]}, {"items": (1, 2)}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}),
        ({"a": Currency.EUR}, {"a": "eur"}),
        ({"a": Line(item="pen")}, {"a": {"item": "pen", "count": 1}}),
    ],
)
def test_two_ways_to_write_one_value(one: Any, other: Any) -> None:
    assert same(one, other)


def test_named_arguments_count_or_do_not() -> None:
    one, other = {"invoice": "A1", "note": "x"}, {"invoice": "A1", "note": "y"}
    assert once_identity("pay", one, identity=("invoice",)) == once_identity("pay", other, identity=("invoice",))
    assert once_identity("pay", one, volatile=("note",)) == once_identity("pay", other, volatile=("note",))
    assert once_identity("pay", one, identity=("invoice", "note")) != once_identity(
        "pay", other, identity=("invoice", "note")
    )
    assert once_identity("pay", {"invoice": "A1"}, PAY, identity=("amount",)) == once_identity(
        "pay", {"invoice": "A2", "amount": "5"}, PAY, identity=("amount",)
    )


def test_declarations_reach_into_lists_and_models() -> None:
    lines = Fields({"item": None, "count": int}, {"count": 1}, drops_others=True)
    declared = Fields({"lines": Each(lines), "weights": Each(float)}, drops_others=True)
    one = {"lines": [{"item": "pen"}], "weights": ["1", 2]}
    assert same(one, {"lines": [{"item": "pen", "count": "1", "x": 7}], "weights": [1.0, "2"]}, declared)
    assert not same(one, {"lines": [{"item": "pen", "count": 2}], "weights": ["1", 2]}, declared)


def test_a_field_may_have_other_names() -> None:
    declared = Fields({"order": Fields({"total": int}, names={"total": ("sum", "total")}, drops_others=True)})
    assert same({"order": {"sum": 5}}, {"order": {"total": "5", "x": 1}}, declared)
    assert not same({"order": {"sum": 5}}, {"order": {"total": 6}}, declared)


# ---- another call: a wrong match refuses somebody's payment ---------------------------------------------------------


@each_row(
    ("one", "other"),
    [
        ({"invoice": "A1"}, {"invoice": "a1"}),
        ({"invoice": "A1"}, {"invoice": "A1 "}),
        ({"invoice": "A 1"}, {"invoice": "A  1"}),
        ({"invoice": "A1"}, {"invoice": "A\u00a01"}),
        ({"invoice": "A1"}, {"invoice": "A\u200d1"}),  # a joiner changes what is written in many scripts
        ({"invoice": "A1"}, {"invoice": "Α1"}),  # a Greek letter
        ({"invoice": "A1"}, {"invoice": "\uff211"}),  # full width: form C leaves it alone
        ({"invoice": "A1"}, {"invoice": "A01"}),
        ({"invoice": "A1\n"}, {"invoice": "A1"}),
        ({"invoice": "5"}, {"invoice": 5}),
        ({"invoice": "5"}, {"invoice": "5.0"}),
        ({"invoice": "true"}, {"invoice": True}),
        ({"invoice": None}, {}),
        ({"invoice": None}, {"invoice": ""}),
        ({"invoice": "None"}, {"invoice": None}),
        ({"invoice": "A1", "amount": 5}, {"invoice": "A1", "amount": 50}),
        ({"invoice": "A1", "amount": 5}, {"invoice": "A1", "amount": -5}),
        ({"invoice": "A1", "amount": 5}, {"invoice": "A1", "amount": None}),
        ({"invoice": "A1", "amount": "5"}, {"invoice": "A1", "amount": "5.5"}),
        ({"invoice": "A1", "amount": "1e2"}, {"invoice": "A1", "amount": 100}),  # pydantic reads no exponent as an int
        ({"invoice": "A1", "amount": 9007199254740993}, {"invoice": "A1", "amount": 9007199254740992}),
        ({"invoice": "A1", "amount": "9007199254740993"}, {"invoice": "A1", "amount": "9007199254740992"}),
        ({"invoice": "A1", "amount": 10**4_000}, {"invoice": "A1", "amount": 10**4_000 + 1}),
        ({"invoice": "A1", "rate": 0.1}, {"invoice": "A1", "rate": 0.1 + 1e-16}),
        ({"invoice": "A1", "rate": 9007199254740993}, {"invoice": "A1", "rate": 9007199254740992}),
        ({"invoice": "A1", "rate": "1e400"}, {"invoice": "A1", "rate": "1e500"}),
        ({"invoice": "A1", "rate": math.nan}, {"invoice": "A1", "rate": math.inf}),
        ({"invoice": "A1", "express": True}, {"invoice": "A1"}),
        ({"invoice": "A1", "express": 2}, {"invoice": "A1", "express": True}),
        ({"invoice": ["A1", "A2"]}, {"invoice": ["A2", "A1"]}),
        ({"invoice": ["A1", "A2"]}, {"invoice": ["A1"], "amount": 5}),
        ({"invoice": [["A1"], "A2"]}, {"invoice": ["A1", ["A2"]]}),
        ({"invoice": {"a": 1, "b": 2}}, {"invoice": {"a": 2, "b": 1}}),
        ({"invoice": {"a": 1, "a\u200b": 2}}, {"invoice": {"a": 1}}),
        ({"invoice": "ab", "amount": 5}, {"invoice": "a", "amount": 5}),
        ({"invoice": "x" * 40_000 + "1" + "x" * 40_000}, {"invoice": "x" * 40_000 + "2" + "x" * 40_000}),
        ({"invoice": [0] * 9_000 + [1] + [0] * 9_000}, {"invoice": [0] * 9_000 + [2] + [0] * 9_000}),
        ({"invoice": b"x" * 400 + b"1" + b"x" * 400}, {"invoice": b"x" * 400 + b"2" + b"x" * 400}),
        ({"invoice": Decimal("5.0")}, {"invoice": Decimal("5.1")}),
    ],
)
def test_these_stay_different(one: Any, other: Any) -> None:
    assert not same(one, other, PAY)
    assert not same(one, other)


@each_row(
    ("one", "other"),
    [
        ({"amount": "5"}, {"amount": 5}),
        ({"amount": True}, {"amount": 1}),
        ({"amount": 5, "x": 1}, {"amount": 5, "x": 2}),
        ({"amount": 5}, {"amount": 5, "x": None}),
        ({"invoice": "A1"}, {"invoice": "A1", "amount": 5}),
    ],
)
def test_without_a_declaration_every_argument_counts_as_it_was_given(one: Any, other: Any) -> None:
    assert not same(one, other)


def test_another_tool_is_another_side_effect() -> None:
    assert once_identity("pay", {"n": 1}) != once_identity("refund", {"n": 1})
    assert once_identity("pay", {}) != once_identity("pay", [])


# ---- any value at all -----------------------------------------------------------------------------------------------

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


def _plain(value: Any) -> Any:
    """What the identity is meant to compare, built in another way: as JSON text."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, int | float):
        return f"{int(value):d}" if isinstance(value, int) or value.is_integer() else repr(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {"d": sorted(([_plain(key), _plain(item)] for key, item in value.items()), key=repr)}
    from unicodedata import normalize

    return "text:" + normalize("NFC", value.replace("\u200b", "").replace("\u2060", "").replace("\ufeff", ""))


@given(_json, _json)
def test_two_values_match_exactly_when_they_are_equal(one: Any, other: Any) -> None:
    assert same({"a": one}, {"a": other}) == (json.dumps(_plain(one)) == json.dumps(_plain(other)))


@given(
    st.text(alphabet="0123456789.+-e_ aftrue", max_size=6) | st.integers() | st.floats() | st.booleans(),
    st.sampled_from([int, float, bool]),
)
def test_a_number_is_read_as_pydantic_reads_it(value: Any, kind: Any) -> None:
    try:
        received = TypeAdapter(kind).validate_python(value)
    except ValidationError:
        received = value
    if isinstance(received, float) and not math.isfinite(received):
        received = value
    if kind is float and isinstance(value, int) and abs(value) > 2**53:
        received = value  # a float would lose digits
    assert once_identity("t", {"n": value}, Fields({"n": kind})) == once_identity("t", {"n": received}), (
        value,
        received,
    )


def test_deep_and_circular_values_are_read_to_their_end() -> None:
    deep: Any = "A1"
    other: Any = "A2"
    for _ in range(50_000):
        deep, other = [deep], [other]
    assert not same({"a": deep}, {"a": other})
    circle: dict[str, Any] = {"invoice": "A1"}
    circle["self"] = circle
    again: dict[str, Any] = {"invoice": "A1"}
    again["self"] = again
    assert same(circle, again)


def test_foreign_code_of_an_argument_is_not_run() -> None:
    class Loud(str):
        __slots__ = ()

        def __str__(self) -> str:
            raise AssertionError("called")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("called")

        __hash__ = str.__hash__

    assert same({"a": Loud("A1")}, {"a": "A1"})


def test_every_process_finds_the_same_identity() -> None:
    args = {"invoice": "Ä\u200b1", "lines": [{"n": 1.5}, {"n": 10**30}, None, True], "tags": {"b": 1, "a": 2}}
    script = f"from runguard.policy.tools import once_identity; print(once_identity('pay', {args!r}).hex())"
    command, seed = [sys.executable, "-c", script], {"PYTHONHASHSEED": "1"}
    found = subprocess.run(command, env=seed, capture_output=True, text=True, check=True).stdout.strip()
    assert found == once_identity("pay", args).hex() == "d83b7911c236dc019c8164abcb2d4cdb", (
        "claims in stores are kept under it"
    )
