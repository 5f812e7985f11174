"""The identity of a call or an answer: canonical, bounded, the same in every process.

``call_fingerprint`` is what a call *means*: key order, ``1.0`` against ``1``, absent against ``None`` and white space
do not matter. ``answer_text`` is what an answer *is*. ``masking`` hides what differs between two versions of the same
answer, and ``answer_book`` compares answers.

No foreign ``__str__``, ``__repr__`` or ``__eq__`` is ever called, and no input costs more than a bounded walk: a value
that is large, deep, cyclic or of an unknown type goes through ``bounded_text`` instead of the C encoder.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

from runguard.core.bounded_text import BIG, EDGE, MAX_CHARS, MAX_DEPTH, MAX_NODES, bounded_text, edges

DIGEST_SIZE: Final = 16
_WORDS_READ: Final = 16_384

_SCALARS: Final = frozenset({int, float, bool, type(None)})


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
        return value if len(value) <= MAX_CHARS else edges(value, EDGE)
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
