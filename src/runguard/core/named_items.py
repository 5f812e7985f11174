"""Which items of a call a failure names: "coupon SAVE-07 has expired", "Unknown column 'total'".

Such a failure is about those items. The same message about other items is another failure: trying nine columns is a
search, not a stall.
"""

import re
from collections.abc import Iterable
from typing import Final

from runguard.core.fingerprint import ASIDE, answer_text

_SAID: Final = 800  # characters of a failure in which items are looked for
_NAME: Final = 80  # characters of a name; a longer text that an error quotes is the whole argument
_LONG_ARGUMENT: Final = 16_384
_BIG: Final = 10**40
# One expression for each kind of quotation mark: the text of a dict is full of others.
_QUOTED: Final = tuple(re.compile(rf"{mark}([^{mark}\n]{{2,{_NAME}}}){mark}") for mark in "'\"`")


def named_items(args: object, answer: object, volatile: Iterable[str] = ()) -> str:
    """The names, as one text; "" when the failure names nothing of the call."""
    if type(args) is not dict:
        return ""
    said = answer_text(answer)
    said = said if len(said) <= _SAID else f"{said[: _SAID // 2]}\n{said[-_SAID // 2 :]}"
    aside = ASIDE.union(volatile)
    given = [value for key, value in args.items() if type(key) is str and key not in aside]
    names = {name for value in given if (name := _name(value)) and _contains(said, name)}
    long = [value[:_LONG_ARGUMENT] for value in given if type(value) is str and len(value) > _NAME]
    if long:
        quoted = {name for pattern in _QUOTED for name in pattern.findall(said)}
        names |= {name for name in quoted if any(_contains(value, name) for value in long)}
    return "\0".join(sorted(names))  # in the same order, however a store keeps the arguments


def _name(value: object) -> str:
    name = value if type(value) is str else str(value) if type(value) is int and 9 < value < _BIG else ""
    return name if 2 <= len(name) <= _NAME else ""


def _contains(text: str, name: str) -> bool:
    """Whether ``name`` stands in ``text`` as a word of its own."""
    at = text.find(name)
    return at >= 0 and not (_in_word(text[max(at - 1, 0) : at]) or _in_word(text[at + len(name) : at + len(name) + 1]))


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"
