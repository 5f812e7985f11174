"""How large a value is, and how far answers are compared exactly."""

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.identity import HEAD, AnswerBook, copy_of, restored, size_of, snapshot
from tests.kit.examples import each_row
from tests.kit.fingerprints import keys, scalars

LOTS = 10**9
plain = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=30)


def counted(value: Any) -> int:
    """The definition: characters of texts and keys, 4 for everything else that holds nothing."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(counted(key) + counted(part) for key, part in value.items())
    if isinstance(value, list):
        return sum(counted(part) for part in value)
    return 4


@given(plain)
def test_the_size_is_that_of_all_texts(value: Any) -> None:
    assert size_of(value, LOTS) == counted(value)


@given(plain)
def test_a_copy_is_equal_and_does_not_depend_on_what_a_value_shares(value: Any) -> None:
    copy = copy_of([value, value])
    assert copy is not None
    assert copy == copy_of([deepcopy(value), deepcopy(value)]) == copy_of(restored(copy))


@given(plain)
def test_the_size_of_a_copy_is_about_that_of_the_json(value: Any) -> None:
    copy = copy_of(value)
    assert copy is not None
    written = len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))
    assert written / 3 - 16 <= len(copy) - HEAD <= 5 * written + 16


class Text(str):
    __slots__ = ()


class Fields(dict[Any, Any]):
    pass


@pytest.mark.parametrize(
    ("value", "size"),
    [
        pytest.param(Text("four"), 4, id="subclass of str"),
        pytest.param(Fields(ab=Text("four")), 6, id="subclass of dict"),
        pytest.param({"s": {"abc", "de"}}, 6, id="set"),
        pytest.param([b"abc", bytearray(2)], 5, id="bytes"),
        pytest.param({("ab", 1): "x"}, 7, id="tuple as a key"),
        pytest.param(object(), 4, id="object"),
        pytest.param(None, 4, id="None"),
    ],
)
def test_other_types_have_a_size(value: Any, size: int) -> None:
    assert size_of(value, LOTS) == size


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Text("x"), id="subclass"),
        pytest.param({Text("x"): 1}, id="subclass as a key"),
        pytest.param([0] * 1_000_000, id="many items"),
        pytest.param("x" * 2_000_000, id="long text"),
    ],
)
def test_not_every_value_is_copied(value: Any) -> None:
    assert copy_of(value) is None


def rows(count: int, middle: str) -> dict[str, Any]:
    found = [{"id": n, "name": f"row {n}", "ok": True, "price": 1.5} for n in range(count)]
    found[count // 2]["name"] = middle
    return {"rows": found}


@each_row("count", [10, 1_000, 1_100, 5_000])
def test_a_change_in_the_middle_of_many_rows_is_news(count: int) -> None:
    book = AnswerBook()
    assert [book.name(b"call", rows(count, name))[1] for name in ("one", "two", "one", "two")] == [True, True] + [
        False
    ] * 2


@each_row("length", [1_000, 60_000, 70_000, 900_000])
def test_a_change_in_the_middle_of_a_long_text_is_news(length: int) -> None:
    book, half = AnswerBook(), "lorem ipsum; " * (length // 26)
    assert [book.name(b"call", {"result": f"{half}{name}{half}"})[1] for name in ("one", "two", "two")] == [
        True,
        True,
        False,
    ]


def test_the_size_of_a_large_answer_is_known_though_only_a_sample_of_it_is_compared() -> None:
    rows = [{"id": n, "name": f"item {n}", "ok": True} for n in range(20_000)]
    shot, size = snapshot({"rows": rows})
    assert len(shot) < 100_000, "a bounded text"
    assert 0.6 * len(json.dumps(rows)) < size < 1.4 * len(json.dumps(rows))
    assert snapshot({"rows": [*rows, *rows]})[1] == -1, "more than a copy may hold"
    book = AnswerBook()
    assert book.name(b"call", {"rows": rows})[1]
    assert not book.name(b"call", {"rows": deepcopy(rows)})[1]
    assert book.size == size
