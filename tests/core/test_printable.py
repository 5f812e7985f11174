"""Control characters in names are written out, in every value that is shown."""

from dataclasses import dataclass
from typing import NamedTuple

from runguard.core.decision import printable, printable_lines
from tests.kit.examples import each_row


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
