"""The canonical text of any value at all: a walk with a budget, shallow things first.

A value that is large, deep, cyclic or of an unknown type costs no more than a bounded walk. No foreign ``__str__``,
``__repr__`` or ``__eq__`` is ever called.
"""

import sys
from datetime import date, datetime, timedelta
from datetime import time as dt_time
from decimal import Decimal
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Final
from uuid import UUID

from runguard.core.stored_attributes import stored_attributes

MAX_CHARS: Final = 65_536  # an answer beyond this is known by its head, its tail and its length
MAX_NODES: Final = 4_096
MAX_DEPTH: Final = 32
EDGE: Final = MAX_CHARS // 4
BIG: Final = 10**40  # printing a longer integer is neither bounded nor always allowed
# Values of the standard library whose text is theirs: exact types only, a subclass may bring code of its own.
_SPOKEN: Final = frozenset({Decimal, UUID, complex, date, timedelta})
_TIMES: Final = frozenset({datetime, dt_time})  # without their zone, whose code may be anybody's
_STR: Final = frozenset({str})
_LISTS, _SETS, _BYTES = (list, tuple), (set, frozenset), (bytes, bytearray)
_MODULUS: Final = 2**61 - 1
_WIDTH: Final = 2_048  # of a longer sequence or mapping, the first and last entries count
_LONG: Final = 512  # a longer text is identified by its edges


def edges(text: str, edge: int) -> str:
    """Head, tail and length of a long text. A middle that differs alone is not seen: the price of a bounded cost."""
    return f"{text[:edge]}\0{len(text)}\0{text[-edge:]}"


class _Budget:
    """The rest of a bounded walk: how many more entries of containers are read, and how many characters.

    Without characters left, texts are identified by length and a few characters.
    """

    __slots__ = ("chars", "nodes")

    def __init__(self, nodes: int = MAX_NODES, chars: int = MAX_CHARS) -> None:
        self.nodes, self.chars = nodes, chars

    def take(self, entries: Any) -> Any:
        """As many of these entries as may be read."""
        taken = entries[: self.nodes]
        self.nodes -= len(taken)
        return taken

    def text(self, text: str) -> str:
        if self.chars <= 0:
            return text if len(text) <= 16 else f"#{len(text)}"
        kept = text if len(text) <= _LONG else edges(text, min(EDGE, max(self.chars // 4, 16)))
        self.chars -= len(kept)
        return kept


def bounded_text(value: Any) -> str:
    """Canonical text of anything. Breadth first: what stands beside a long list still counts."""
    out: list[str] = []
    budget = _Budget()
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        out += [_told(item, below, budget) for item in level]
        if not below:
            break
        out.append("\2")
        level = below
    return "\1".join(out)


def _told(item: Any, below: list[Any], budget: _Budget) -> str:
    """One node's own text; what it contains goes to the next level."""
    kind = type(item)
    if kind is str and len(item) <= _LONG and budget.chars > 0:
        budget.chars -= len(item)
        return f"s{item}"
    if issubclass(kind, dict):
        return f"{{{dict.__len__(item)}:" + _told_keys(item, below, budget)
    if issubclass(kind, _LISTS):
        base: Any = list if issubclass(kind, list) else tuple
        size = base.__len__(item)
        if budget.nodes > 0:
            below += budget.take(
                base.__getitem__(item, slice(None))
                if size <= _WIDTH
                else [*_slice(base, item, 0, _WIDTH // 2), *_slice(base, item, size - _WIDTH // 2, size)]
            )
        return f"[{size}"
    atom = _atom(item, budget)
    if atom is not None:
        return atom
    if issubclass(kind, _SETS):
        # A set has no order, and the order of its members differs between processes: sort what they say.
        base = set if issubclass(kind, set) else frozenset
        # Each member has a small budget of its own: a shared one would run out at another member in another process.
        size = base.__len__(item)
        members = (
            sorted(_bounded_member(member, _Budget(16, 256)) for member in base.__iter__(item))
            if size <= budget.nodes
            else []
        )
        budget.nodes -= len(members)
        return f"<set {size}>" + budget.text(",".join(members))
    fields = budget.take(sorted(stored_attributes(item), key=itemgetter(0))[:64]) if budget.nodes > 0 else []
    below += (value for _, value in fields)
    return f"<{_type_name(kind)}>" + ",".join(budget.text(name) for name, _ in fields)


def _told_keys(item: dict[Any, Any], below: list[Any], budget: _Budget) -> str:
    """The keys of a dict, sorted: their order does not matter. A dict that holds itself is listed a few times only."""
    if budget.nodes <= 0:
        return ""
    size = dict.__len__(item)
    keys = [*dict.keys(item)] if size <= _WIDTH else []
    if keys and _STR.issuperset(map(type, keys)):
        chars = sum(map(len, keys))
        if chars <= _LONG and chars < budget.chars:  # as below, without a call for each of them: most dicts
            keys.sort()
            del keys[budget.nodes :]
            budget.nodes -= len(keys)
            budget.chars -= chars
            below += map(partial(dict.__getitem__, item), keys)
            return "s" + ",s".join(keys)
    few = size <= 8 * MAX_NODES
    entries: list[Any] = _some(list(dict.items(item))) if few else list(islice(dict.items(item), _WIDTH))
    keyed = sorted(
        ((_atom(key, budget) or f"<{_type_name(type(key))}>", value) for key, value in entries), key=itemgetter(0)
    )
    keyed = budget.take(keyed)
    below += (value for _, value in keyed)
    return ",".join(key for key, _ in keyed)


def _slice(base: Any, item: Any, start: int, stop: int) -> Any:
    return base.__getitem__(item, slice(start, stop))


def _some(entries: list[Any]) -> list[Any]:
    return entries if len(entries) <= _WIDTH else [*entries[: _WIDTH // 2], *entries[-_WIDTH // 2 :]]


def _bounded_member(member: Any, budget: _Budget) -> str:
    budget.nodes -= 1
    atom = _atom(member, budget)
    if atom is None and budget.nodes > 0 and issubclass(type(member), tuple):
        return "(" + ",".join(_bounded_member(part, budget) for part in tuple.__getitem__(member, slice(16))) + ")"
    return atom if atom is not None else f"<{_type_name(type(member))}>"


def _atom(item: Any, budget: _Budget) -> str | None:
    kind = type(item)
    if issubclass(kind, str):
        return "s" + budget.text(item if kind is str else str.__getitem__(item, slice(None)))
    if kind is bool or item is None:
        return "1b" if item is True else "0b" if item is False else "n"
    if issubclass(kind, int):
        bits = int.bit_length(item)
        if bits < 4_096:
            return f"i{int.__format__(item, 'x')}"
        # the hash of a positive integer is the same remainder, five times as fast
        is_hash = sys.hash_info.modulus == _MODULUS and int.__gt__(item, 0)
        return f"i{bits}:{int.__hash__(item) if is_hash else int.__mod__(item, _MODULUS)}"
    if issubclass(kind, float):
        return f"f{float.__repr__(item)}"
    if issubclass(kind, _BYTES):
        base: Any = bytes if issubclass(kind, bytes) else bytearray
        head, tail = bytes(_slice(base, item, 0, 256)), bytes(base.__getitem__(item, slice(-64, None)))
        return f"b{base.__len__(item)}:{head.hex()}:{tail.hex()}"
    if kind in _SPOKEN:
        return f"<{kind.__name__}>" + budget.text(str(item))
    if kind in _TIMES:
        return f"<{kind.__name__}>{item.replace(tzinfo=None)}"
    return None


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
