"""A wrong argument of a class of settings is a PolicyError that names it."""

from collections.abc import Callable
from typing import Any

import pytest

from runguard.core.errors import Checked, CheckedABC, PolicyError, did_you_mean
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
