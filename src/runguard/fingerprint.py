"""The identity of a call or an answer: canonical, bounded, the same in every process.

Two digests exist. ``call_fingerprint`` is what a call *means*: key order, ``1.0`` against ``1``, absent against ``None`` and
white space do not matter. ``answer_text`` + ``digest`` is what an answer *is*; ``mask`` additionally hides the parts that
differ between two tellings of the same answer (times, ids, durations), and is asked for only when a call repeats.

No foreign ``__str__``, ``__repr__`` or ``__eq__`` is ever called, and no input costs more than a bounded walk: a value that is
large, deep, cyclic or of an unknown type goes through ``_bounded`` instead of the C encoder.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final

DIGEST_SIZE: Final = 16
MAX_CHARS: Final = 65_536  # an answer beyond this is known by its head, its tail and its length
MAX_NODES: Final = 4_096
MAX_DEPTH: Final = 32
_EDGE: Final = MAX_CHARS // 4

_SCALARS: Final = frozenset({int, float, bool, type(None)})
_BIG: Final = 10**40  # printing a longer integer is neither bounded nor always allowed


class _ForeignError(Exception):
    """The C encoder met a type it does not know."""


def _refuse(_: object) -> Any:
    raise _ForeignError


_encode: Final[Callable[[object], str]] = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False, default=_refuse
).encode


def digest(text: str) -> bytes:
    """BLAKE2b of a text; lone surrogates are kept apart rather than refused."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def call_fingerprint(
    tool: str,
    args: object,
    *,
    identity: Iterable[str] | None = None,
    volatile: Iterable[str] = (),
) -> bytes:
    """Digest of a call. ``identity`` names the only arguments that count, ``volatile`` those that never do."""
    if isinstance(args, Mapping):
        if identity is not None:
            kept = frozenset(identity)
            args = {key: value for key, value in args.items() if key in kept}
        if volatile:
            dropped = frozenset(volatile)
            args = {key: value for key, value in args.items() if key not in dropped}
    text = answer_text(_canonical(args, MAX_DEPTH)) if _is_small(args) else answer_text(args)
    return digest(f"{tool}\0{text}")


def answer_text(value: object) -> str:
    """The bounded canonical text of any value; equal data gives equal text in every process."""
    if type(value) is str:
        return value if len(value) <= MAX_CHARS else _edges(value)
    if _is_small(value):
        try:
            return _encode(value)
        except (_ForeignError, TypeError, ValueError, RecursionError):
            pass  # foreign types, mixed keys, too deep: the walk below knows them
    return _bounded(value)


def _is_small(value: Any) -> bool:
    """Whether the C encoder may see ``value``: a look at sizes only, cut off at the limit."""
    size = nodes = 0
    pending: list[Any] = [value]
    for item in pending:
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
            pending.extend(item.values())
        elif kind is list or kind is tuple:
            nodes += len(item)
            if nodes > MAX_NODES:
                return False
            pending.extend(item)
        elif kind not in _SCALARS or (kind is int and not -_BIG < item < _BIG):
            return False
        if size > MAX_CHARS:
            return False
    return True


def _canonical(value: Any, depth: int) -> object:
    """Arguments as they are meant: None dropped, whole floats as integers, white space collapsed."""
    kind = type(value)
    if kind is str:
        return " ".join(value.split())
    if kind is float and value.is_integer():
        return int(value)
    if depth and kind is dict:
        return {k: _canonical(v, depth - 1) for k, v in value.items() if v is not None}
    if depth and (kind is list or kind is tuple):
        return [_canonical(v, depth - 1) for v in value]
    return value


def _edges(text: str) -> str:
    """Head, tail and length of a long text. A middle that differs alone is not seen: the price of a bounded cost."""
    return f"{text[:_EDGE]}\0{len(text)}\0{text[-_EDGE:]}"


def _bounded(value: object) -> str:
    """Canonical text of anything, by a walk with a budget of nodes, characters and depth."""
    out: list[str] = []
    left = [MAX_NODES, MAX_CHARS]

    def walk(item: Any, depth: int) -> None:
        left[0] -= 1
        if left[0] < 0 or left[1] < 0:
            return
        kind = type(item)
        text = _atom(item, left[1])
        if text is not None:
            pass
        elif depth <= 0:
            text = f"<{_type_name(kind)} below>"
        elif issubclass(kind, dict):
            out.append(f"{{{dict.__len__(item)}")
            for key, entry in _sorted_items(item, left[0]):
                out.append(key)
                walk(entry, depth - 1)
            text = "}"
        elif issubclass(kind, list | tuple):
            base: Any = list if issubclass(kind, list) else tuple
            out.append(f"[{base.__len__(item)}")
            for entry in base.__getitem__(item, slice(max(left[0], 0))):
                walk(entry, depth - 1)
            text = "]"
        elif kind in (set, frozenset):
            # A set has no order, and its members' own order differs between processes: sort what they say.
            members: Iterable[Any] = item if len(item) <= left[0] else ()
            text = f"<set {len(item)}>" + ",".join(sorted(_atom(m, 256) or f"<{_type_name(type(m))}>" for m in members))
        else:
            text = f"<{_type_name(kind)}>{_fields(item)}"
        left[1] -= len(text)
        out.append(text)

    walk(value, MAX_DEPTH)
    return "\1".join(out)


def _atom(item: Any, room: int) -> str | None:
    kind = type(item)
    if issubclass(kind, str):
        text = str.__getitem__(item, slice(None)) if kind is not str else item
        return "s" + (text if len(text) <= min(room, MAX_CHARS) else _edges(text))
    if kind is bytes or kind is bytearray:
        return f"b{len(item)}:{bytes(item[:_EDGE]).hex()}:{bytes(item[-64:]).hex()}"
    if kind is int:
        return f"i{item:x}" if item.bit_length() < 4096 else f"i{item.bit_length()}"
    if kind in _SCALARS:
        return json.dumps(item)
    return None


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields(item: object) -> str:
    """Plain attributes of an object without running its code: an address in a repr would make equal things differ."""
    try:
        fields = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return ""
    if type(fields) is not dict:
        return ""
    atoms = sorted((key, _atom(value, 1_024)) for key, value in list(fields.items())[:64] if type(key) is str)
    return ",".join(f"{key}={atom}" for key, atom in atoms if atom is not None)


def _sorted_items(mapping: dict[Any, object], room: int) -> list[tuple[str, object]]:
    """Items in an order that does not depend on insertion; keys of any type are told by their atom."""
    if dict.__len__(mapping) > max(room, 0):
        return []  # known by its length alone
    keyed = [(_atom(key, 256) or f"<{_type_name(type(key))}>", value) for key, value in dict.items(mapping)]
    keyed.sort(key=lambda pair: pair[0])
    return keyed


# ---- masking: what differs between two tellings of the same answer --------------------------------------------------

_VOLATILE: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"  # 2026-11-15T09:30:00Z
    r"|\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b"  # 09:30:00
    r"|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"  # UUID
    r"|\b0x[0-9a-fA-F]{4,}\b"  # addresses
    r"|\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}\b"  # hashes, object ids
    r"|\b1[4-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?\b"  # seconds, ms, us, ns since 1970
    r"|\b\d+(?:\.\d+)?\s?(?:ns|us|µs|ms|sec|secs|seconds|minutes|min|s)\b"  # durations
    r"|(?i:\b(?:request|req|trace|span|correlation|session|call|message|msg|event|job_run)[_-]?id\b[\"']?\s{0,2}[:=]?\s{0,2}[\"']?[\w.-]{1,80})"
    r"|(?i:\b(?:elapsed|took|duration\w{0,8}|latency\w{0,8}|uptime|timestamp|\w{1,24}_at|pid)[\"']?\s{0,2}[:=]\s{0,2}[\"']?[\w.:+-]{1,40})"
)


def mask(text: str) -> str:
    """``text`` with volatile parts replaced; counts, percentages, exit codes and line numbers stay."""
    return _VOLATILE.sub("~", text)


class AnswerBook:
    """Names the answers of one lane so that two tellings of the same answer get the same name.

    The exact text is compared first; only when a call repeats with a different text are both masked. Texts are kept for the
    most recent calls alone: an older call that repeats is compared from its second repetition on.
    """

    __slots__ = ("_calls", "_pairs", "_texts")
    CALLS: Final = 512
    TEXTS: Final = 16
    TEXT_CHARS: Final = 16_384

    def __init__(self) -> None:
        self._calls: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # call -> (exact digest, name)
        self._texts: OrderedDict[bytes, str] = OrderedDict()  # call -> last text
        self._pairs: OrderedDict[tuple[str, bytes, bytes], None] = OrderedDict()

    def name(self, call: bytes, text: str, by: str = "") -> tuple[bytes, bool]:
        """The answer's name, and whether this (call, answer) pair is new to whom it was told: a reviewer may read what a writer has read."""
        exact = digest(text)
        known = self._calls.get(call)
        if known is None:
            name = exact
        elif known[0] == exact:
            name = known[1]
        else:
            name = digest(mask(text))
            before = self._texts.get(call)
            if before is not None and digest(mask(before)) == name:
                name = known[1]
        self._calls[call] = (exact, name)
        if known is None:
            if len(self._calls) > self.CALLS:
                self._calls.popitem(last=False)
        else:
            self._calls.move_to_end(call)
        if len(text) <= self.TEXT_CHARS:
            self._texts[call] = text
            self._texts.move_to_end(call)
            if len(self._texts) > self.TEXTS:
                self._texts.popitem(last=False)
        else:
            self._texts.pop(call, None)
        pair = (by, call, name)
        if pair in self._pairs:
            self._pairs.move_to_end(pair)
            return name, False
        self._pairs[pair] = None
        if len(self._pairs) > self.CALLS:
            self._pairs.popitem(last=False)
        return name, True

    def forget_pairs(self) -> None:
        """Something changed the world: what was known may be asked again."""
        self._pairs.clear()


def size_of(value: object, enough: int) -> int:
    """Characters of text inside ``value``, counted until ``enough`` is passed."""
    size = 0
    pending: list[Any] = [value]
    for nodes, item in enumerate(pending):
        kind = type(item)
        if issubclass(kind, str | bytes | bytearray):
            size += len(item)
        elif issubclass(kind, dict):
            pending.extend(dict.keys(item))
            pending.extend(dict.values(item))
        elif issubclass(kind, list):
            pending.extend(list.__iter__(item))
        else:
            size += 4
        if size > enough or nodes > 100_000:
            return max(size, enough + 1 if nodes > 100_000 else size)
    return size
