"""The identity of a call or an answer: canonical, bounded, the same in every process.

``call_fingerprint`` is what a call *means*, ``answer_text`` what an answer *is*, ``input_fingerprint`` what a run is
asked. ``mask`` hides what differs between two versions of an answer, and ``AnswerBook`` compares answers.
``engine/tools``, ``calls/function_settings``, the rules and the replay readers call it. No foreign ``__str__``,
``__repr__`` or ``__eq__`` is ever called, and no input costs more than a bounded walk.
"""

import json
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import date, datetime, timedelta
from datetime import time as dt_time
from decimal import Decimal
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain, islice
from operator import itemgetter
from pickle import Pickler, loads
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, NoReturn, TypeVar
from unicodedata import category, normalize
from uuid import UUID

# ---- What a call means, and what an answer is.

DIGEST_SIZE: Final = 16
_WORDS_READ: Final = 16_384
_INPUT_PARTS: Final = 1_024  # of one input
_SCALARS: Final = frozenset({int, float, bool, type(None)})
# Arguments that say which attempt this is, and never what is asked for. A reason may be all that a call has to say.
ASIDE: Final = frozenset({"attempt", "attempt_number", "retry", "retry_count", "task_progress"})


def call_fingerprint(
    tool: str,
    args: Any,
    *,
    identity: Iterable[str] | None = None,
    volatile: Iterable[str] = (),
    exact: bool = False,
) -> bytes:
    """Return the digest of what a call means.

    Key order, ``1.0`` against ``1``, absent against ``None`` and white space do not matter. ``identity`` names the only
    arguments that count, ``volatile`` those that never do. ``exact``: every argument counts, also those in ``ASIDE``.
    """
    if type(args) is dict:
        # no code of other keys runs
        names = args if STR.issuperset(map(type, args)) else [key for key in args if type(key) is str]
        dropped: Iterable[str] = ()
        if identity is not None or volatile:
            dropped = {*names} - {*(names if identity is None else identity)} | {*volatile}
        elif not exact and 0 < len(ASIDE.intersection(names)) < len(args):
            dropped = ASIDE
        if dropped:
            args = {key: value for key, value in args.items() if type(key) is not str or key not in dropped}
    try:
        text = encode(_canonical(args, _Budget(), MAX_DEPTH))
    except _NotPlainError:
        text = bounded_text(args)
    return digest(f"{tool}\0{text}")


def input_fingerprint(agent: str, asked: Any) -> bytes:
    """Return the identity of what a user asks of an agent: texts, media, and lists or dicts of them.

    Each is compared whole; white space in short texts does not matter. The identity is empty where nothing is asked, or
    where a part cannot be compared.
    """
    whole = blake2b(agent.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE)
    is_empty = True
    waiting: list[Any] = [asked]
    for _ in range(_INPUT_PARTS):
        if not waiting:
            return b"" if is_empty else whole.digest()
        value = waiting.pop()
        kind = type(value)
        if kind is str or kind is bytes:
            if kind is str:
                text = " ".join(value.split()) if len(value) <= _WORDS_READ else value
                value = text.encode("utf-8", "surrogatepass")
            is_empty = is_empty and not value
            whole.update(b"%d:" % len(value))
            whole.update(value)
        elif (kind is list or kind is tuple) and len(value) <= _INPUT_PARTS:
            waiting += reversed(value)
        elif kind is dict and len(value) <= _INPUT_PARTS and all(type(key) is str for key in value):
            waiting += [entry for key in sorted(value, reverse=True) for entry in (value[key], key)]
        elif kind in _SCALARS and (kind is not int or value.bit_length() < 256):
            whole.update(b"%r;" % value)
        else:
            break
    return b""


def answer_text(value: Any) -> str:
    """Return the bounded canonical text of any value. Equal data gives equal text in every process."""
    if type(value) is str:
        return value if len(value) <= MAX_CHARS else edges(value, EDGE)
    return bounded_text(value) if _parts_of(value, MAX_CHARS) is None else _json_of(value)


class _NotPlainError(Exception):
    """A value holds something that is not plain, or more than may be read in full."""


def _canonical(value: Any, budget: "_Budget", depth: int) -> object:
    """Return arguments as they are meant: None dropped, whole floats as integers, white space collapsed.

    Raise _NotPlainError for arguments that are not plain JSON, or beyond the limits. ``depth``: levels that are left.
    """
    kind = type(value)
    if kind is str:
        budget.chars -= len(value)
        if budget.chars < 0:
            raise _NotPlainError
        return " ".join(value.split())
    if kind is dict or kind is list or kind is tuple:
        budget.nodes -= len(value)
        if budget.nodes < 0 or not depth or (kind is dict and not STR.issuperset(map(type, value))):
            raise _NotPlainError
        if kind is not dict:
            return [_canonical(held, budget, depth - 1) for held in value]
        budget.chars -= sum(map(len, value))
        if budget.chars < 0:
            raise _NotPlainError
        meant: dict[str, object] = {}
        for key, held in value.items():
            if type(held) is str and len(held) <= budget.chars:  # as below, without a call for each text
                budget.chars -= len(held)
                meant[key] = " ".join(held.split())
            elif held is not None:
                meant[key] = _canonical(held, budget, depth - 1)
        return meant
    if kind not in _SCALARS or (kind is int and not -BIG < value < BIG):
        raise _NotPlainError
    return int(value) if kind is float and value.is_integer() else value


_encoder: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False)
# JSONEncoder builds its C encoder anew for every text; building it once saves a third of the time.
_make: Final[Any] = getattr(json.encoder, "c_make_encoder", None)
_c_encode: Final[Any] = _make and _make(None, None, json.encoder.encode_basestring, None, ":", ",", True, False, True)


def encode(value: object) -> str:
    """Return JSON with sorted keys. ``value`` must be plain and of bounded size."""
    return "".join(_c_encode(value, 0)) if _c_encode is not None else _encoder.encode(value)


def digest(text: str) -> bytes:
    """Return the BLAKE2b digest of a text, which may contain lone surrogates."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def read_as(value: Any) -> str:
    """Return the text of a value as a reader sees it: letter case, width and invisible characters do not matter."""
    text = answer_text(value)[:_WORDS_READ]
    if text.isascii():
        return text.lower()
    visible = "".join([sign for sign in normalize("NFKC", text) if category(sign) != "Cf"])
    return " ".join(visible.casefold().split())


def words_name(text: str) -> int:
    """Return a name for a text, within this process; never 0. An empty text has a name, too."""
    return hash(text[:_WORDS_READ]) or 1


# ---- The answers that a lane has seen, and the names by which they are compared.

# What an answer is compared by: a copy, in parts where it is large; a name and a text as they are; or a bounded text.
Shot = bytes | str | tuple[Any, ...]


class AnswerBook:
    """Names the answers of one lane so that two versions of the same answer get the same name.

    The first answer of a call is named by the hash of its snapshot, and nothing is masked. When the call repeats with
    another snapshot, the two are compared, and only what differs is masked. Snapshots are kept for the most recent
    calls, and of one call for its latest different answers. Where the snapshots of a call were dropped, whole masks
    are compared instead: such a call is recognised from its second repetition on. Names are numbers of this process.
    """

    __slots__ = ("_calls", "_held", "_recent", "size")
    CALLS: Final = 512
    SNAPSHOTS: Final = 16  # calls with snapshots
    SNAPSHOT_BYTES: Final = 262_144  # of all snapshots
    VERSIONS: Final = 4  # different answers of one call whose snapshots are kept
    ANSWERS: Final = 64  # different answers remembered of one call

    def __init__(self) -> None:
        self._calls: dict[bytes, _Known] = {}  # the one used last at the end
        self._recent: deque[_Known] = deque()  # calls with snapshots, the oldest first
        self._held = 0  # bytes of their snapshots
        self.size = 0  # bytes of the last answer; -1 when it is too large to be copied

    def name(self, call: bytes, value: Any, by: str = "") -> tuple[int, bool]:
        """Return the answer's identity, and whether this (call, answer) pair is new to the agent.

        ``by``: the agent. A reviewer may read what a writer has read, and it is news to the reviewer.
        """
        shot, self.size = snapshot(value)
        exact = hash(shot)
        known = self._calls.get(call)
        if known is None:
            known = self._calls[call] = _Known(exact, by)
            if len(self._calls) > self.CALLS:
                del self._calls[next(iter(self._calls))]
            self._keep(known, exact, shot)
            return exact, True
        self._calls[call] = self._calls.pop(call)
        name, new = known.again(exact, shot, by)
        self._keep(known, name, shot)
        return name, new

    def _keep(self, known: "_Known", name: int, shot: Shot) -> None:
        """Keep the latest snapshot of each answer, and drop those of the oldest calls where they become too many."""
        size = len(shot) if type(shot) is bytes else _size_of(shot)
        if size > self.SNAPSHOT_BYTES // 2:
            known.was_dropped = True
            return
        if known.shots:
            self._held += known.keep(name, shot)
        else:
            known.shots, known.held = ((name, shot),), size
            self._recent.append(known)
            self._held += known.held
        while len(self._recent) > self.SNAPSHOTS or self._held > self.SNAPSHOT_BYTES:
            oldest = self._recent.popleft()
            self._held -= oldest.held
            oldest.shots, oldest.held, oldest.was_dropped = (), 0, True

    def forget_pairs(self) -> None:
        """Count every answer as news again.

        Something has changed the world, so what was known may be asked once more.
        """
        for known in self._calls.values():
            known.received = set()


class _Known:
    """The answers of one call: their names by snapshot and by masked text, and which agent received which."""

    __slots__ = ("by", "exact", "held", "names", "received", "shots", "was_dropped")

    def __init__(self, exact: int, by: str) -> None:
        self.exact, self.by = exact, by
        self.names: dict[int, int] | None = None  # made when the call repeats: most never do
        self.received: set[tuple[str, int]] | None = None
        self.shots: tuple[tuple[int, Shot], ...] = ()  # names and their latest snapshots, the newest first
        self.held = 0  # bytes of them
        self.was_dropped = False  # an answer has no snapshot any more: masks are compared, too

    def keep(self, name: int, shot: Shot) -> int:
        """Keep the latest snapshot of an answer. Return how many bytes more the call holds."""
        others = [entry for entry in self.shots if entry[0] != name][: AnswerBook.VERSIONS - 1]
        self.shots, before = ((name, shot), *others), self.held
        self.held = sum(_size_of(kept) for _, kept in self.shots)
        return self.held - before

    def again(self, exact: int, shot: Shot, by: str) -> tuple[int, bool]:
        """Return the name of one more answer, and whether it is news to ``by``."""
        if self.names is None:
            self.names = {self.exact: self.exact}
        if self.received is None:
            self.received = {(self.by, self.exact)}
        name = self.names.get(exact)
        if name is None:
            name = self._identify(exact, shot, self.names)
        if (by, name) in self.received:
            return name, False
        if len(self.received) >= AnswerBook.ANSWERS:
            self.received.clear()  # a call with this many answers makes progress; its oldest answer may come again
        self.received.add((by, name))
        return name, True

    def _identify(self, exact: int, shot: Shot, names: dict[int, int]) -> int:
        """Return the name of a snapshot not seen before.

        It is the name of an answer that differs in volatile parts alone, else its own.
        """
        if len(names) > 2 * AnswerBook.ANSWERS:
            names.clear()
        text = _text_of(shot)
        name = next((name for name, kept in self.shots if are_alike(_text_of(kept), text)), exact)
        if name == exact and self.was_dropped and len(text) <= MAX_CHARS:
            name = names.setdefault(hash(mask(text)), exact)
        names[exact] = name
        return name


def snapshot(value: Any) -> tuple[Shot, int]:
    """Return what an answer is compared by, as cheap as possible, and about how many bytes of JSON the value takes.

    Larger or stranger values are compared by their bounded text. The size is -1 where there is no copy.
    """
    if type(value) is dict and len(value) == 1:  # a text, as frameworks carry it, needs no copy
        ((name, text),) = value.items()
        if type(name) is str and type(text) is str and len(text) <= _MOST_BYTES:
            size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            return (name, text), len(name) + size + _SIGNS
    parts = _parts_of(value)
    if parts is None:
        return bounded_text(value), -1
    size = max(sum(map(len, parts)) - HEAD, 0)
    if len(parts) == 1:
        return parts[0], size
    return bounded_text(value) if parts.has_many_values else tuple(parts), size


def _size_of(shot: Shot) -> int:
    return sum(map(sys.getsizeof, shot)) if type(shot) is tuple else len(shot)  # a text may take 4 bytes a sign


def _text_of(shot: Shot) -> str:
    """Return the text of a snapshot, for masking."""
    if isinstance(shot, str):
        return shot
    if isinstance(shot, tuple):
        if type(shot[0]) is str:
            return encode(dict([shot]))
        shot = b"".join(shot)
    value = restored(shot)
    return value if type(value) is str else _json_of(value)


def _json_of(value: Any) -> str:
    """Return the JSON of a plain value, and the bounded text of one that JSON has no form for, such as a set."""
    try:
        return encode(value)
    except (TypeError, ValueError, RecursionError):  # also keys of several types, huge integers, or too deep
        return bounded_text(value)


# ---- Masking: hide what differs between two versions of the same answer (times, ids, durations).

# Where a word begins, its first letter says which of these it may be: trying them all at every letter would take three
# times as long.
_VOLATILE: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"  # 2026-11-15T09:30:00Z
    r"|\b(?:(?=[0-9a-fA-F])(?:"
    r"\d\d:\d\d:\d\d(?:[.,]\d+)?\b"  # 09:30:00
    r"|[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"  # UUID
    r"|0x[0-9a-fA-F]{4,}\b"  # addresses
    r"|(?=[0-9a-fA-F]{0,63}[0-9])(?=[0-9a-fA-F]{0,63}[a-fA-F])[0-9a-fA-F]{12,64}\b"  # hashes, object ids
    r"|1[4-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?\b"  # seconds, ms, us, ns since 1970
    r"|\d+(?:\.\d+)?\s?(?:ns|us|µs|ms|secs?|seconds?|mins?|minutes?|hours?|s)\b)"  # durations
    r"|(?=[rtscmejRTSCMEJ])(?i:(?:request|req|trace|span|correlation|session|call|message|msg|event|job_run)[ _-]?id\b"
    r"[\"']?\s{0,2}[:=]?\s{0,2}[\"']?<?[\w.@-]{1,80})"
    r"|(?=[etdlupqrETDLUPQR])(?i:(?:elapsed\w{0,8}|took\w{0,4}|duration\w{0,8}|latency\w{0,8}|uptime|timestamp|pid"
    r"|(?:execution|exec|query|response|processing|run)_?time\w{0,8})[\"']?\s{0,2}[:=]\s{0,2}[\"']?[\w.:+-]{1,40})"
    r"|(?i:\w{1,24}_at[\"']?\s{0,2}[:=]\s{0,2}[\"']?[\w.:+-]{1,40}))"
)


def mask(text: str) -> str:
    """Return ``text`` with volatile parts replaced.

    Counts, percentages, exit codes and line numbers stay: they are how an answer shows progress.
    """
    text = _unescaped(text)
    return text if _is_measurement(text) else _mask_parts(text)


def are_alike(one: str, other: str) -> bool:
    """Return whether two texts differ in volatile parts alone: ``mask(one) == mask(other)``, at less cost.

    Only what differs is masked. A text is cut only where no volatile part can reach from one side to the other, so the
    masks of its pieces together are the mask of the whole, and the answer True is always right. The answer False comes
    early, when no cut shortly after a difference makes the pieces before it alike. It may be wrong where a volatile
    part of another kind took the place of one, such as a duration that of a date: the answer then counts as new.
    """
    one, other = _unescaped(one), _unescaped(other)
    if _is_measurement(one) or _is_measurement(other):
        return mask(one) == mask(other)
    at_one = at_other = 0
    for _ in range(_PIECES):
        equal = _equal_chars(one, at_one, other, at_other)
        if at_one + equal == len(one) and at_other + equal == len(other):
            return True
        back = _cut_before(one, at_one, at_one + equal) - at_one
        at_one, at_other = at_one + back, at_other + back
        cut = _alike_until(one, at_one, other, at_other)
        if cut is None:
            return False
        at_one, at_other = cut
    return _mask_parts(one[at_one:]) == _mask_parts(other[at_other:])


def _alike_until(one: str, at_one: int, other: str, at_other: int) -> tuple[int, int] | None:
    """Return the next place in both texts up to which they are alike; None when a few cuts show none."""
    cuts = list(islice(_CUT.finditer(one, at_one), _CUTS_TRIED))
    compared = 0
    for found in cuts:
        to_one = found.end()
        # the same words stand around the cut in the other text
        begin, end = (found.start() - 1, found.end(1)) if found[1] is not None else found.span()
        there = other.find(one[begin:end], at_other, at_other + to_one - at_one + _SHIFT)
        if there >= 0:
            to_other = there + to_one - begin
            if _mask_parts(one[at_one:to_one]) == _mask_parts(other[at_other:to_other]):
                return to_one, to_other
            compared += 1
            if compared == _COMPARED:
                return None
    is_end = len(cuts) < _CUTS_TRIED
    return (len(one), len(other)) if is_end and _mask_parts(one[at_one:]) == _mask_parts(other[at_other:]) else None


def _unescaped(text: str) -> str:
    """Return a text with JSON's escaped line breaks as such, because their letters would join the next word."""
    if "\\" in text:
        text = text.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    return text


def _is_measurement(text: str) -> bool:
    """Return whether a text is nothing but ids or durations."""
    return len(text) <= _ONLY and _MEASUREMENT.match(text) is not None


def _mask_parts(text: str) -> str:
    masked, count = _VOLATILE.subn("~", text)
    return _VOLATILE.sub(_hidden, text) if count and _LEFT.search(text) is not None else masked


def _hidden(found: re.Match[str]) -> str:
    """Return the mask of a time, but keep durations that show progress or remaining work.

    A date to wait for is masked: it changes with each report anyway.
    """
    whole, (start, end) = found.string, found.span()
    before = _LEFT_BEFORE.search(whole, max(start - 40, 0), start)
    if (before is not None and (before[1] is None or found[0][4:5] != "-")) or _LEFT_AFTER.match(
        whole, end
    ) is not None:
        return found[0]
    return "~"


_LEFT_WORDS: Final = "eta|remaining|left|lag|until|up ?to|through|watermark|progress|position"
_LEFT: Final = re.compile(rf"{_LEFT_WORDS}|to go", re.IGNORECASE)
_LEFT_BEFORE: Final = re.compile(
    rf"(?:\b|_)(?:(eta|until|remaining|left)|{_LEFT_WORDS})(?:_\w{{1,12}})?" + r"[\"']?\s{0,2}[:=]?\s{0,2}[\"']?$",
    re.IGNORECASE,
)
_LEFT_AFTER: Final = re.compile(r"\s(?:remaining|left|to go)\b", re.IGNORECASE)
# A text of nothing but ids or durations, with or without the name of their field, is a measurement: they are the
# answer. A clock is no measurement, because it moves by itself.
_ONLY: Final = 1_024
_MEASUREMENT: Final = re.compile(
    r"\W*(?:(?:\"(?:result|output|value|uuid)\"\W{1,4})?(?:(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?=\d{0,63}[a-f])[0-9a-f]{12,64})\b\W*)+"
    r"|(?:\"(?!\w{0,24}(?:elapsed|took|duration|latency|uptime|time|_at)|pid)\w{1,40}\"\W{1,4})?(?:\d+(?:\.\d+)?\s?(?:ns|us|µs|ms|s)\b\W*)+)$",
    re.IGNORECASE,
)

# ---- Where a text may be cut for masking.

_PIECES: Final = 64  # compared one by one; the rest of a text that differs more often is masked at once
_CUTS_TRIED: Final = 8
_COMPARED: Final = 2
_SHIFT: Final = 1_024  # how much longer the other piece may be
_LOOK: Final = 160
# After a character that is in no volatile part, or between two plain words. Exceptions are words that belong to what
# follows or precedes: "request id 7", "left 5 s", "5 s left".
_CUT: Final = re.compile(
    r"[{}\[\]();|/!?*#%$&>^`]"
    r"|(?<=\s)(?!(?:request|req|trace|span|correlation|session|call|message|msg|event|id"
    r"|eta|remaining|left|lag|until|up|to|upto|through|watermark|progress|position)\s)"
    r"[a-z]+\s(?!(?:remaining|left|to)\b)(?=([a-z]+\W))",
    re.IGNORECASE,
)


def _equal_chars(one: str, at_one: int, other: str, at_other: int) -> int:
    """Return how many characters are equal from two positions onward, found in growing steps and then in halves."""
    most = min(len(one) - at_one, len(other) - at_other)
    equal, step = 0, _LOOK
    while equal < most and step:
        to = min(equal + step, most)
        if one[at_one + equal : at_one + to] == other[at_other + equal : at_other + to]:
            equal, step = to, 2 * step
        else:
            most, step = to - 1, min(step, to - equal) // 2
    return equal


def _cut_before(text: str, start: int, end: int) -> int:
    """Return the last place near ``end`` where the text may be cut, else ``start``."""
    begin = max(start, end - _LOOK)
    cuts = [found.end() for found in _CUT.finditer(text[begin:end])]
    return begin + cuts[-1] if cuts else start


# ---- The canonical text of any value at all: a walk with a budget, shallow things first.

MAX_CHARS: Final = 65_536  # an answer beyond this is known by its head, its tail and its length
MAX_NODES: Final = 4_096
MAX_DEPTH: Final = 32
EDGE: Final = MAX_CHARS // 4
BIG: Final = 10**40  # printing a longer integer is neither bounded nor always allowed
# Types of the standard library whose ``str`` is safe. Exact types only: a subclass may bring code of its own.
_SPOKEN: Final = frozenset({Decimal, UUID, complex, date, timedelta})
_TIMES: Final = frozenset({datetime, dt_time})  # read without their zone, which may run foreign code
STR: Final = frozenset({str})
_LISTS, _SETS, _BYTES = (list, tuple), (set, frozenset), (bytes, bytearray)
_MODULUS: Final = 2**61 - 1
_WIDTH: Final = 2_048  # of a longer sequence or mapping, the first and last entries count
_LONG: Final = 512  # a longer text is identified by its edges


def edges(text: str, edge: int) -> str:
    """Return head, tail and length of a long text. A change in the middle alone is not seen: that bounds the cost."""
    return f"{text[:edge]}\0{len(text)}\0{text[-edge:]}"


class _Budget:
    """The rest of a bounded walk: how many more entries of containers are read, and how many characters.

    Without characters left, texts are identified by their length.
    """

    __slots__ = ("chars", "nodes")

    def __init__(self, nodes: int = MAX_NODES, chars: int = MAX_CHARS) -> None:
        self.nodes, self.chars = nodes, chars

    def take(self, entries: Any) -> Any:
        """Return as many of these entries as may be read, and count them."""
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
    """Return the canonical text of anything: a value that is large, deep, cyclic or of an unknown type.

    Breadth first: what stands beside a long list still counts.
    """
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
    """Return one node's own text. What it contains is added to ``below``, the next level."""
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
    """Return the keys of a dict, sorted because their order does not matter, and add its values to ``below``.

    A dict that holds itself is listed a few times only.
    """
    if budget.nodes <= 0:
        return ""
    size = dict.__len__(item)
    keys = [*dict.keys(item)] if size <= _WIDTH else []
    if keys and STR.issuperset(map(type, keys)):
        chars = sum(map(len, keys))
        if chars <= _LONG and chars < budget.chars:  # most dicts: the same as below without a call for each key
            keys.sort()
            del keys[budget.nodes :]
            budget.nodes -= len(keys)
            budget.chars -= chars
            below += map(partial(dict.__getitem__, item), keys)
            return "s" + ",s".join(keys)
    entries: list[Any] = list(islice(dict.items(item), size if size <= 8 * MAX_NODES else _WIDTH))
    del entries[_WIDTH // 2 : -_WIDTH // 2]
    keyed = sorted(
        ((_atom(key, budget) or f"<{_type_name(type(key))}>", value) for key, value in entries), key=itemgetter(0)
    )
    keyed = budget.take(keyed)
    below += (value for _, value in keyed)
    return ",".join(key for key, _ in keyed)


def _slice(base: Any, item: Any, start: int, stop: int) -> Any:
    return base.__getitem__(item, slice(start, stop))


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


# ---- Attributes of any object, read without running its code: an address in a repr would make equal things differ.

_READ: Final = 256  # attributes of one class or one object
_DESCRIPTORS: Final = frozenset({GetSetDescriptorType, MemberDescriptorType})


def stored_attributes(item: Any) -> Iterable[tuple[str, Any]]:
    """Yield names and values in the dict and the slots of an object."""
    for name, found in _places_of(type(item)):  # type: ignore[arg-type]  # every class is hashable
        if name == "__dict__":
            held = found.__get__(item)
            if type(held) is dict:
                yield from [entry for entry in list(held.items())[:_READ] if type(entry[0]) is str]
        else:
            with suppress(AttributeError):  # a slot without a value
                yield name, found.__get__(item)


@lru_cache(256)
def _places_of(kind: type) -> list[tuple[str, Any]]:
    """Return where objects of a class keep their attributes."""
    return [
        (name, found)
        for base in kind.__mro__
        for name, found in list(vars(base).items())[:_READ]
        if (name == "__dict__" and type(found) in _DESCRIPTORS)
        or ("__slots__" in vars(base) and type(found) is MemberDescriptorType)  # no part of a generator or a file
    ]


# ---- Copies of plain values at the speed of C: texts, numbers, and the lists and dicts that hold them.

HEAD: Final = 12  # bytes of a copy beside those of its value; the copy of a tiny value is shorter than that
_MOST_BYTES: Final = 1_048_576
_SIGNS: Final = 6  # bytes around a name and a text
_FEW: Final = 8  # fields whose length is looked at beforehand
_MOST_FRAMED: Final = 262_144  # of them, in frames: more of many small values are not compared in full
_FRAME: Final = 2 * 65_536  # every frame is smaller; a long text is written beside the frames


class _Parts(list[bytes]):
    """What a pickler has written: a small value is one part."""

    __slots__ = ()

    @property
    def has_many_values(self) -> bool:
        """Whether it takes long to compare the value in full."""
        return len(self) > 1 and sum(len(part) for part in self if len(part) < _FRAME) > _MOST_FRAMED


class _PlainPickler(Pickler):
    def reducer_override(self, obj: Any) -> NoReturn:
        """Refuse every value that is not of a built-in type."""
        raise _NotPlainError


class _File:
    """What a pickler writes to."""

    __slots__ = ("most", "parts")

    def __init__(self) -> None:
        self.parts, self.most = _Parts(), _MOST_BYTES

    def write(self, part: bytes) -> None:
        self.parts.append(part)
        if (len(part) > self.most or len(self.parts) > 1) and sum(map(len, self.parts)) > self.most:
            raise _NotPlainError


# Picklers at rest, and their files: making one takes longer than copying a small value.
_idle: Final[list[tuple[_PlainPickler, _File]]] = []


def size_of_copy(value: Any, enough: int) -> int:
    """Return the bytes of the copy of a value without its head, which is about the length of the value's JSON.

    A value without a copy has those of the text inside of it, counted until ``enough`` is passed.
    """
    parts = _parts_of(value)
    if parts is None:
        return size_of(value, enough)
    size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
    return size - HEAD if size > HEAD else 0


def _parts_of(value: Any, most: int = _MOST_BYTES) -> _Parts | None:
    """Return a copy by which plain values are compared and measured; None for a value that is not plain, or too large.

    Equal values have equal copies. The work is bounded, and no code of the value runs: a value that is very deep or
    cyclic has no copy either.
    """
    for part in value.values() if type(value) is dict and len(value) <= _FEW else (value,):
        if type(part) is str and len(part) > most:
            return None  # too large: checked first, so that nothing is copied in vain
    try:
        pickler, file = _idle.pop()  # no other thread has this one now
    except IndexError:
        file = _File()
        pickler = _PlainPickler(file, 4)
        pickler.fast = True  # writes shared parts out: a copy does not depend on what a value shares
    file.most = most
    try:
        pickler.dump(value)
    except (_NotPlainError, ValueError, RecursionError):  # too large or foreign; cyclic; too deep
        return None  # the pickler has stopped in the middle of a value: it is not used again
    parts, file.parts = file.parts, _Parts()
    _idle.append((pickler, file))
    return parts


def restored(copy: bytes) -> Any:
    """Return the value of a copy. Only for copies made here, which never left this process."""
    return loads(copy)


# ---- How large a value is.

LEVELS: Final = 2_000  # one inside the other; recursive encoders give up before
CHARS_PER_TOKEN: Final = 4  # of ordinary text whose tokens were not counted
_SIZED: Final = 100_000  # parts of one value that are looked at
_ODD: Final = 7  # a value or a key of a type of its own takes as long as so many plain ones
_TEXTS: Final[tuple[Any, ...]] = (str, bytes, bytearray)
_PARTS: Final[tuple[Any, ...]] = (list, tuple, set, frozenset)


def size_of(value: Any, enough: int) -> int:
    """Return the characters of text inside ``value``, counted until ``enough`` is passed. A number or scalar counts 4.

    What a dict or a list holds itself is counted in one go: most of what tools answer consists of small dicts.
    """
    if type(value) is str:
        return len(value)
    size = nodes = 0
    level: list[Any] = [value]
    for _ in range(LEVELS):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            held: Any = item
            if kind is not dict and kind is not list and kind is not tuple:
                held, own = _size_of_other(item)
                size += own
                nodes += _ODD
            nodes += len(held)
            if nodes > _SIZED:
                return max(size, enough + 1)  # so many parts are too large whatever they hold
            for part in held if kind is not dict else chain(held, held.values()):
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


def _size_of_other(item: Any) -> tuple[list[Any], int]:
    """Return what a value of another type holds, and its own size. Runs no code of the value."""
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


# ---- The one dict of bounded size.

_K = TypeVar("_K")
_V = TypeVar("_V")


class LruDict(OrderedDict[_K, _V]):
    """A dict of the ``most`` entries that were set last. ``move_to_end`` renews an entry without setting it."""

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        try:  # noqa: SIM105 - on the path of every call
            self.move_to_end(key)
        except KeyError:  # another thread has taken it out meanwhile
            pass
        if len(self) > self.most:
            self.popitem(last=False)
