"""A wrong argument of a class of settings is a PolicyError that names it."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.decision import _counted, printable, printable_lines
from runguard.core.errors import Checked, CheckedABC, PolicyError, did_you_mean
from runguard.core.identity import LruDict
from tests.kit.examples import each_row


class Plain(metaclass=Checked):
    def __init__(self, limit: int, *, window: str = "1d") -> None:
        self.limit, self.window = limit, window


class Empty(metaclass=Checked):
    def __init__(self) -> None:
        pass


class Open(metaclass=Checked):
    def __init__(self, **anything: int) -> None:
        self.total = sum(anything.values())


class Many(metaclass=CheckedABC):
    def __init__(self, *parts: int, scale: int) -> None:
        self.total = sum(parts) * scale


@each_row(
    ("make", "message"),
    [
        (lambda: Plain(1, windw="1h"), "Plain.windw: no such setting; did you mean 'window'?"),  # type: ignore[call-arg]
        (lambda: Plain(1, win="1h"), "Plain.win: no such setting; did you mean 'window'?"),  # type: ignore[call-arg]
        (lambda: Plain(1, xyz=1), "Plain.xyz: no such setting; known: limit, window"),  # type: ignore[call-arg]
        (lambda: Plain(1, "1h"), "Plain takes 1 settings without a name; write Plain(limit=…)"),  # type: ignore[call-arg]
        (lambda: Plain(), "Plain.limit: missing"),  # type: ignore[call-arg]
        (lambda: Empty(1), "Empty takes no settings without a name; write Empty()"),  # type: ignore[call-arg]
        (lambda: Many(1, 2), "Many.scale: missing"),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_argument_is_named(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        make()
    assert str(caught.value) == message


def test_an_error_inside_the_class_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        Open(a="text")  # type: ignore[arg-type]


@each_row(
    ("shown", "hint"),
    [(None, "known: aa, bb, cc"), (2, "known: aa, bb and 1 more"), (3, "known: aa, bb, cc"), (0, "")],
)
def test_without_a_near_name_the_known_ones_are_listed(shown: int | None, hint: str) -> None:
    assert did_you_mean("zzzz", ["aa", "bb", "cc"], shown=shown) == hint
    assert did_you_mean("zzzz", []) == "known: none"


# ---- Control characters in names are written out, in every value that is shown


class Pair(NamedTuple):
    name: str
    number: int


@dataclass(frozen=True)
class Named:
    name: str
    others: tuple[str, ...]


@each_row(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines\r\tand a tab", "two\\nlines\\r\\tand a tab"),
        ("\x1b[31mred\x7f", "\\x1b[31mred\\x7f"),
        ("\u202eturned\u2069", "\\u202eturned\\u2069"),
        ("half \ud800", "half \\ud800"),
        ("Zoë 漢字 🙂", "Zoë 漢字 🙂"),
    ],
)
def test_controls_of_a_text_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_values_keep_their_kind() -> None:
    assert printable({"a\n": ["b\r", ("c\t", 1)]}) == {"a\\n": ["b\\r", ("c\\t", 1)]}
    assert printable(Pair("a\n", 2)) == Pair("a\\n", 2)
    assert type(printable(Pair("a\n", 2))) is Pair
    assert printable(Named("a\n", ("b\x00",))) == Named("a\\n", ("b\\x00",))
    assert printable(Named) is Named
    assert printable(1.5) == 1.5
    assert printable(None) is None


def test_lines_of_our_own_stay_lines() -> None:
    assert printable_lines("first\x1b\nsecond\r") == "first\\x1b\nsecond\\r"


# ---- Counts in the text of a trip agree with their noun


@each_row(
    ("number", "unit", "text"),
    [
        (1, "re-entries", "1 re-entry"),
        (2, "re-entries", "2 re-entries"),
        (1, "model calls", "1 model call"),
        (1, "USD", "1 USD"),
    ],
)
def test_a_count_agrees_with_its_noun(number: int, unit: str, text: str) -> None:
    assert _counted(number, unit) == text


# ---- ``LruDict`` keeps the entries that were set last, whichever way they are set


STEP = st.tuples(st.sampled_from(["set", "default", "again", "pop"]), st.integers(0, 8), st.integers())


@given(st.integers(1, 5), st.lists(STEP, max_size=40))
def test_it_is_a_dict_without_its_oldest_entries(most: int, steps: list[tuple[str, int, int]]) -> None:
    kept, model = LruDict[int, int](most), OrderedDict[int, int]()
    for what, key, value in steps:
        if what == "set":
            kept[key] = model[key] = value
            model.move_to_end(key)
        elif what == "default":
            assert kept.setdefault(key, value) == model.setdefault(key, value)
        elif what == "pop":
            assert kept.pop(key, None) == model.pop(key, None)
        elif key in model:
            kept.move_to_end(key)
            model.move_to_end(key)
        while len(model) > most:
            model.popitem(last=False)
        assert list(kept.items()) == list(model.items())


def test_an_entry_that_another_thread_drops_while_it_is_set_raises_nothing() -> None:
    class Key(str):
        """Takes its entry out when it is looked up once more after it was set, as another thread may do."""

        __slots__ = ("looks",)

        def __hash__(self) -> int:
            self.looks = getattr(self, "looks", 0) + 1
            if self.looks == 2:
                kept.pop("oldest", None)
            return hash("oldest")

    kept = LruDict[str, int](3)
    kept["oldest"] = 1
    kept[Key("oldest")] = 2
    assert "oldest" not in kept
