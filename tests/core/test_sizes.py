"""How large a value is, and how far answers are compared exactly."""

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core import identity as bounded_text
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo, ToolCall
from runguard.core.identity import (
    HEAD,
    LEVELS,
    MAX_NODES,
    AnswerBook,
    answer_text,
    restored,
    size_of,
    snapshot,
    stored_attributes,
)
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy
from tests.kit.examples import each_row
from tests.kit.fingerprints import keys, scalars

LOTS = 10**9
plain = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=30)


def copy_of(value: Any) -> bytes | None:
    parts = bounded_text._parts_of(value)
    return None if parts is None else b"".join(parts)


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


@each_row("text", ["", "done", "é" * 300, "lorem ipsum " * 9_000, "half of a pair: \ud800"])
def test_a_text_is_compared_without_a_copy(text: str) -> None:
    shot, size = snapshot({"result": text})
    assert shot == ("result", text)
    written = json.dumps({"result": text}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert abs(size - len(written)) < 16
    assert snapshot({"result": text + "."})[0] != shot


# ---- The shortest answers are short ones: a size below zero means an answer that is too large to be copied


@each_row("value", [[], {}, "", 0, 1, True, None, 0.5, "a"])
def test_a_tiny_answer_has_a_size(value: Any) -> None:
    book = AnswerBook()
    book.name(b"call", value)
    assert 0 <= book.size < 10


# ---- A dict is told in one go where its keys are short texts, and key by key otherwise. The text is the same


scalars_bounded_text = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=40)
)
values = st.recursive(
    scalars_bounded_text,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=200), inner, max_size=6), st.tuples(inner, inner)
    ),
    max_leaves=40,
)


def key_by_key(monkeypatch: pytest.MonkeyPatch, value: Any) -> str:
    with monkeypatch.context() as patched:
        patched.setattr(bounded_text, "STR", frozenset())
        return bounded_text.bounded_text(value)


@settings(max_examples=60)
@given(values)
def test_a_dict_has_one_text(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert key_by_key(patch, value) == bounded_text.bounded_text(value)


@pytest.mark.parametrize("wide", [7, 2_049])
def test_a_budget_that_runs_out_leaves_the_same_text(monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    rows = [{f"k{n % 13}": n, "name": f"row {n} " * 3, "t" * (n % 40): None} for n in range(MAX_NODES // wide + 900)]
    value = {"rows": rows, "wide": dict.fromkeys(map(str, range(wide)), rows[0])}
    assert key_by_key(monkeypatch, value) == bounded_text.bounded_text(value)


# ---- Walks through values end early where a value is deep, cyclic or odd, and identities stay what they were


ENOUGH = 1_000_000


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def holds_itself() -> Any:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize("value", [nested(50 * LEVELS), holds_itself()], ids=["deep", "cyclic"])  # deep for any Python
def test_a_value_that_no_encoder_can_write_is_too_large(value: Any) -> None:
    assert size_of(value, ENOUGH) == ENOUGH + 1
    assert copy_of(value) is None


def test_a_value_is_too_deep_to_be_measured_from_one_level_on() -> None:
    assert size_of(nested(LEVELS + 1), ENOUGH) == ENOUGH + 1


def test_keys_that_are_numbers_count_as_numbers() -> None:
    assert size_of(dict.fromkeys(range(100), "ab"), ENOUGH) == 100 * (4 + 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_integer_is_known_by_its_length_and_its_remainder(sign: int) -> None:
    number = sign * (10**5_000 + 7)
    assert answer_text(number) == f"i{number.bit_length()}:{number % (2**61 - 1)}"


def test_attributes_of_dicts_and_slots_are_read_without_code_of_the_object() -> None:
    class Slotted:
        __slots__ = ("empty", "first")

    class Mixed(Slotted):
        @property
        def second(self) -> int:
            raise AssertionError("foreign code was run")

    item: Any = Mixed()
    item.first, item.other = 1, 2
    assert sorted(stored_attributes(item)) == sorted(stored_attributes(item)) == [("first", 1), ("other", 2)]


def test_every_detector_of_a_lane_sees_its_events_in_order() -> None:
    guard = Guard(Policy.validated({"max_seconds": 5}, ""))
    lane = guard.start(RunInfo("run")).lanes[ROOT_LANE]
    for event in (ModelCall, ToolCall):
        expected = [detector.observe for detector in lane.detectors if event in detector.sees]
        assert list(lane.by_event[event].every) == expected
