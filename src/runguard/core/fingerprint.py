"""The identity of a call or an answer: canonical, bounded, the same in every process.

``call_fingerprint`` is what a call *means*: key order, ``1.0`` against ``1``, absent against ``None`` and white space
do not matter. ``answer_text`` is what an answer *is*. ``masking`` hides what differs between two versions of the same
answer, and ``answer_book`` compares answers.

No foreign ``__str__``, ``__repr__`` or ``__eq__`` is ever called, and no input costs more than a bounded walk: a value
that is large, deep, cyclic or of an unknown type goes through ``bounded_text`` instead of the C encoder.
"""

import json
import sys
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from datetime import time as dt_time
from decimal import Decimal
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from typing import Any, Final
from uuid import UUID

from runguard.core.stored_attributes import stored_attributes

DIGEST_SIZE: Final = 16
_WORDS_READ: Final = 16_384
MAX_CHARS: Final = 65_536  # an answer beyond this is known by its head, its tail and its length
MAX_NODES: Final = 4_096
MAX_DEPTH: Final = 32
_EDGE: Final = MAX_CHARS // 4

_SCALARS: Final = frozenset({int, float, bool, type(None)})
BIG: Final = 10**40  # printing a longer integer is neither bounded nor always allowed


_encoder: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False)
# JSONEncoder builds its C encoder anew for every text; building it once saves a third of the time.
_make: Final[Any] = getattr(json.encoder, "c_make_encoder", None)
_c_encode: Final[Any] = _make and _make(None, None, json.encoder.encode_basestring, None, ":", ",", True, False, True)


def encode(value: object) -> str:
    """JSON with sorted keys. Only for plain values of bounded size."""
    return "".join(_c_encode(value, 0)) if _c_encode is not None else _encoder.encode(value)


def digest(text: str) -> bytes:
    """BLAKE2b of a text; lone surrogates are kept apart rather than refused."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def words_name(text: str) -> int:
    """A name for what was said, within this process; never 0. Saying nothing has a name too."""
    return hash(text[:_WORDS_READ]) or 1


# Arguments that say which attempt this is, and never what is asked for. Why it is made may be all that a call has to
# say.
ASIDE: Final = frozenset({"attempt", "attempt_number", "retry", "retry_count", "task_progress"})


def call_fingerprint(
    tool: str,
    args: Any,
    *,
    identity: Iterable[str] | None = None,
    volatile: Iterable[str] = (),
    exact: bool = False,
) -> bytes:
    """Digest of a call. ``identity`` names the only arguments that count, ``volatile`` those that never do; ``exact``:
    every one does.
    """
    if type(args) is dict and (identity is not None or volatile):
        kept = None if identity is None else frozenset(identity)
        dropped = frozenset(volatile)
        args = {
            key: value
            for key, value in args.items()
            if type(key) is not str or ((kept is None or key in kept) and key not in dropped)
        }
        exact = True
    plain = _plain_args(args)
    if not exact and type(args) is dict and len(args) > 1:
        texts = args if plain is not None else [key for key in args if type(key) is str]  # runs no code of a key
        if not ASIDE.isdisjoint(texts):
            args = {key: value for key, value in args.items() if type(key) is not str or key not in ASIDE} or args
            plain = _plain_args(args)
    if plain is not None:
        return digest(f"{tool}\0{encode(plain)}")
    text = encode(_canonical(args)) if _is_small(args) else bounded_text(args)
    return digest(f"{tool}\0{text}")


def _plain_args(args: Any) -> dict[str, object] | None:
    """Canonical arguments when they are what they nearly always are, a flat dict of short values; else None."""
    if type(args) is not dict or len(args) > 32:
        return None
    plain: dict[str, object] = {}
    for key, value in args.items():
        kind = type(value)
        if type(key) is not str or len(key) > 256:
            return None
        if kind is str:
            if len(value) > 1_024:
                return None
            plain[key] = " ".join(value.split())
        elif kind is int:
            if not -BIG < value < BIG:
                return None
            plain[key] = value
        elif kind is float:
            plain[key] = int(value) if value.is_integer() else value
        elif kind is bool:
            plain[key] = value
        elif value is not None:
            return None
    return plain


def answer_text(value: Any) -> str:
    """The bounded canonical text of any value; equal data gives equal text in every process."""
    if type(value) is str:
        return value if len(value) <= MAX_CHARS else _edges(value, _EDGE)
    return encode(value) if _is_small(value) else bounded_text(value)


def _is_small(value: Any) -> bool:
    """Whether the C encoder may see ``value``: plain JSON, within the limits. A look at sizes only, level by level."""
    size = nodes = 0
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                size += len(item)
            elif kind is dict:
                nodes += len(item)
                if nodes > MAX_NODES:
                    return False
                for key in item:
                    if type(key) is not str:
                        return False
                    size += len(key)
                below += item.values()
            elif kind is list or kind is tuple:
                nodes += len(item)
                if nodes > MAX_NODES:
                    return False
                below += item
            elif kind not in _SCALARS or (kind is int and not -BIG < item < BIG):
                return False
            if size > MAX_CHARS:
                return False
        if not below:
            return True
        level = below
    return False  # deeper than the encoder should have to go, wherever the caller stands


def _canonical(value: Any) -> object:
    """Arguments as they are meant: None dropped, whole floats as integers, white space collapsed. Only for small
    values.
    """
    kind = type(value)
    if kind is str:
        return " ".join(value.split())
    if kind is float and value.is_integer():
        return int(value)
    if kind is dict:
        return {k: _canonical(v) for k, v in value.items() if v is not None}
    if kind is list or kind is tuple:
        return [_canonical(v) for v in value]
    return value


def _edges(text: str, edge: int) -> str:
    """Head, tail and length of a long text. A middle that differs alone is not seen: the price of a bounded cost."""
    return f"{text[:edge]}\0{len(text)}\0{text[-edge:]}"


LEVELS: Final = 2_000  # one inside the other; recursive encoders give up before
CHARS_PER_TOKEN: Final = 4  # of ordinary text whose tokens were not counted


def size_of(value: Any, enough: int) -> int:
    """Characters of text inside ``value``, counted until ``enough`` is passed. A number or another scalar counts 4.

    What a dict or a list holds itself is counted in one go: most of what tools answer consists of small dicts.
    """
    kind = type(value)
    if kind is str:
        return len(value)
    size = nodes = 0
    level: list[Any] = [value]
    for _ in range(LEVELS):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict or kind is list or kind is tuple:
                held: Any = item
            else:
                held, own = _size_of_other(item)
                size += own
                nodes += _ODD
            nodes += len(held)
            if nodes > _SIZED:
                return max(size, enough + 1)  # so many parts are too large whatever they hold
            if kind is dict:
                for key in item:
                    if type(key) is str:
                        size += len(key)
                    elif type(key) in _SCALARS:
                        size += 4
                    else:
                        size += _size_of_key(key)
                        nodes += _ODD
                        if nodes > _SIZED:
                            return max(size, enough + 1)
                held = item.values()
            for part in held:
                kind = type(part)
                if kind is str:
                    size += len(part)
                    if size > enough:
                        return size
                elif kind in _SCALARS:
                    size += 4
                else:
                    below.append(part)
            if size > enough:
                return size
        if not below:
            return size
        level = below
    return max(size, enough + 1)  # no encoder goes so deep: it holds itself


def _size_of_key(key: Any) -> int:
    """A key that is not a plain text: its size, and that of what it holds directly."""
    below, size = _size_of_other(key)
    return size + sum(len(part) if type(part) is str else 4 for part in below)


def _size_of_other(item: Any) -> tuple[list[Any], int]:
    """What a value of another type holds, and its own size. Runs no code of the value."""
    kind = type(item)
    if issubclass(kind, dict):
        return [*islice(dict.keys(item), _SIZED), *islice(dict.values(item), _SIZED)], 0
    for texts in _TEXTS:
        if issubclass(kind, texts):
            return [], texts.__len__(item)
    for parts in _PARTS:
        if issubclass(kind, parts):
            return list(islice(parts.__iter__(item), _SIZED)), 0
    return [], 4


_SIZED: Final = 100_000
_ODD: Final = 7  # a value or a key of a type of its own takes as long as so many plain ones
_TEXTS: Final[tuple[Any, ...]] = (str, bytes, bytearray)
_PARTS: Final[tuple[Any, ...]] = (list, tuple, set, frozenset)


# ---- any value at all: a walk with a budget, shallow things first ---------------------------------------------------

# Values of the standard library whose text is theirs: exact types only, a subclass may bring code of its own.
_SPOKEN: Final = frozenset({Decimal, UUID, complex, date, timedelta})
_TIMES: Final = frozenset({datetime, dt_time})  # without their zone, whose code may be anybody's
_MODULUS: Final = 2**61 - 1
_WIDTH: Final = 2_048  # of a longer sequence or mapping, the first and last entries count
_LONG: Final = 512  # a longer text is identified by its edges


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
        kept = text if len(text) <= _LONG else _edges(text, min(_EDGE, max(self.chars // 4, 16)))
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
    atom = _atom(item, budget)
    if atom is not None:
        return atom
    kind = type(item)
    if issubclass(kind, dict):
        entries: list[Any] = []
        if budget.nodes > 0:  # a dict that holds itself many times is listed a few times only
            entries = (
                _some(list(dict.items(item)))
                if dict.__len__(item) <= 8 * MAX_NODES
                else list(islice(dict.items(item), _WIDTH))
            )
        keyed = sorted(
            ((_atom(key, budget) or f"<{_type_name(type(key))}>", value) for key, value in entries), key=itemgetter(0)
        )
        keyed = budget.take(keyed)  # of the sorted entries: the order of a dict does not matter
        below += (value for _, value in keyed)
        return f"{{{dict.__len__(item)}:" + ",".join(key for key, _ in keyed)
    if issubclass(kind, list | tuple):
        base: Any = list if issubclass(kind, list) else tuple
        size = base.__len__(item)
        if budget.nodes > 0:
            below += budget.take(
                base.__getitem__(item, slice(None))
                if size <= _WIDTH
                else [*_slice(base, item, 0, _WIDTH // 2), *_slice(base, item, size - _WIDTH // 2, size)]
            )
        return f"[{size}"
    if issubclass(kind, set | frozenset):
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
    if issubclass(kind, bytes | bytearray):
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
