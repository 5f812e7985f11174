"""Recorded runs as streams of steps, and bounded reading of files.

``sources`` and ``adk`` convert every kind of recording into these steps; ``player`` plays them. Readers stop at the
limits here and report that as they report any other damage.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from runguard.core.errors import RunGuardError
from runguard.core.events import Outcome
from runguard.pricing.rates import Usage

# ---- steps and runs

# exceptions caused by a value of the wrong type
ODD: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_FAULTS_SHOWN: Final = 20
_FAULT_CHARS: Final = 300
_IN_A_ROW: Final = 10_000
_WORD_CHARS: Final = 4_096
_LAST_TIME: Final = 1e12  # seconds


@dataclass(slots=True)
class Turn:
    """A user message that begins a run, or the resume of a paused run after other runs."""

    at: float | None
    run: str = ""  # the recording's own name of that run
    resumes: bool = False
    text: str = ""  # of the message


@dataclass(slots=True)
class Resumed:
    """An answer from outside: the time since the last step was a pause."""

    at: float | None


@dataclass(slots=True)
class Asked:
    """A model call with its answer."""

    at: float | None
    agent: str
    branch: str = ""
    model: str = ""
    usage: Usage | None = None  # None: not reported
    estimated: bool = False
    batch: str = ""  # names this response
    text_id: int = 0  # identity of the final text of an activation
    goes_on: bool = False  # it called tools: the agent continues with their answers
    after_answer: bool = False  # a call of the framework after the run's final answer
    refused: bool = False  # RunGuard answered instead of the model
    scope: str = ""  # id of the call that delegated the task in which this happened
    nano: int | None = None  # cost in nano-USD, if recorded
    is_cut: bool = False  # it hit its output limit
    text: str = ""  # the final text of an activation, where it is known
    is_share: bool = False  # a share of the totals of a run: the size of this prompt is unknown
    # of a remote agent: what each of its model calls took; empty: it did not say
    reports: tuple[Usage, ...] | None = None
    went_on: int = 0  # of these reports: those after which the remote agent went on


@dataclass(slots=True)
class Called:
    """A tool call requested by the last response of that agent."""

    at: float | None
    agent: str
    branch: str
    batch: str
    id: str
    tool: str
    args: Any = None
    scope: str = ""  # as in ``Asked``


@dataclass(slots=True)
class Answered:
    """The answer to a call. Answers of one recorded event are one observation."""

    at: float | None
    agent: str
    id: str
    tool: str
    value: object = None
    outcome: Outcome | None = None  # if the value does not show it
    event: str = ""
    ends: bool = False  # the agent ends after it
    pending: bool = False  # waits for a confirmation or a sign-in: neither failure nor repetition


@dataclass(slots=True)
class Passed:
    """A hand-off to another agent."""

    at: float | None
    agent: str
    branch: str
    target: str
    scope: str = ""  # as in ``Asked``


@dataclass(slots=True)
class Changed:
    """The state has changed, or a node has given its output, without a tool call."""

    at: float | None
    agent: str
    branch: str
    value: int  # identity of the new values
    scope: str = ""  # as in ``Asked``


@dataclass(slots=True)
class Delegated:
    """An agent runs the call of another agent as its own task: no tool was called."""

    id: str


@dataclass(slots=True)
class Wrote:
    """An entry of the journal that the guard wrote."""

    at: float | None
    entry: dict[str, Any]


@dataclass(slots=True)
class Stopped:
    """RunGuard ended the recorded run here."""

    at: float | None


Step = Turn | Resumed | Asked | Called | Answered | Passed | Changed | Delegated | Wrote | Stopped


class UnreadableError(RunGuardError):
    """A source cannot be replayed; the message says why."""


@dataclass(slots=True)
class Faults:
    """Counts records that could not be read and keeps the first messages."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    in_a_row: int = 0  # since the last record that could be read

    def add(self, where: str, what: str) -> None:
        """Add a message. ``where`` and ``what`` may quote the file: both are shortened and put on one line."""
        self.count += 1
        self.in_a_row += 1
        if len(self.first) < _FAULTS_SHOWN:
            self.first.append(f"{_short(where)}: {_short(what)}")

    def taken(self) -> "Faults":
        """Return the faults found so far and reset this object."""
        found = Faults(self.count, self.first)
        self.count, self.first = 0, []
        return found

    def give_up(self, where: str) -> bool:
        """Return whether too many records in a row were unreadable to continue."""
        if self.in_a_row < _IN_A_ROW:
            return False
        self.add(where, f"{_IN_A_ROW:,} records in a row cannot be read: ignoring the rest")
        return True

    def merge(self, other: "Faults") -> None:
        self.count += other.count
        self.first.extend(other.first[: _FAULTS_SHOWN - len(self.first)])


@dataclass(slots=True)
class RecordedRun:
    """One conversation of one session. ``steps`` can be iterated once."""

    id: str
    steps: Iterator[Step]
    app: str = ""
    user: str = ""
    session: str = ""
    source: str = ""
    success: bool | None = None
    capped: bool | None = None
    labels: Mapping[str, str] | None = None
    unknown: frozenset[str] = frozenset()  # for a run without steps: the figures that its line does not contain


# ---- values of a file


def word(value: Any) -> str:
    """Return a name or an id as a string; "" if the value is neither a string nor a number."""
    if value.__class__ is str:
        text: str = value[:_WORD_CHARS]
        # half a surrogate pair cannot be encoded
        return text if text.isascii() else text.encode("utf-8", "replace").decode()
    return str(value) if value is not None and isinstance(value, int | float) and not isinstance(value, bool) else ""


def time_of(value: Any) -> float | None:
    """Return a time in seconds from a number or an ISO date; None for anything else."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if -_LAST_TIME < value < _LAST_TIME else None
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _short(text: str) -> str:
    line = " ".join(text[: 2 * _FAULT_CHARS].encode("utf-8", "replace").decode().split())
    return line if len(line) <= _FAULT_CHARS else f"{line[:_FAULT_CHARS]}…"


# ---- values that the guard can handle

_MOST_TOKENS: Final = 10**30  # tokens of one model call; sums and costs below this can still be printed
_counts_of: Final = attrgetter(*(field.name for field in fields(Usage)))


def possible(usage: Usage, name: str, faults: Faults) -> Usage | None:
    """Return the usage of a model call of the run ``name``; None, with a fault, if no call can take so many tokens."""
    counts = _counts_of(usage)
    if min(counts) >= 0 and max(counts) < _MOST_TOKENS:
        return usage
    faults.add(name, "a model call reports an impossible number of tokens: ignoring them")
    return None


# ---- reading files of any size, plain or gzipped: line by line, or a JSON document value by value
# A file of 13 MB can unpack to more than a gigabyte, and a line of 60 MB can hold twenty million lists.

MAX_UNPACKED: Final = 1024**3  # bytes of one compressed file, by default
MAX_RECORD: Final = 64 * 1024**2  # bytes of one line, one event or one element of a document
_MAX_VALUES: Final = 4_000_000  # of one record; each takes fifty bytes or more in memory
_SMALL: Final = 4 * 1024**2  # a record of this size cannot hold too many values
_SKIPPED_AT_ONCE: Final = 1024**2  # bytes
_READ_AT_ONCE: Final = 256 * 1024
_EMPTY_LINES: Final = 1_000_000
_LONGEST_NUMBER: Final = 400
_NO_SPACE: Final = re.compile(r"[^ \t\r\n]")
DAMAGED: Final = (OSError, EOFError, zlib.error)  # exceptions from reading a damaged or truncated file


class UnpackedError(OSError):
    """A compressed file is larger than the limit."""


class _Limited(gzip.GzipFile):
    """Reads a compressed file up to a limit."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path, "rb")
        self._limit = limit

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > self._limit:
            raise UnpackedError(
                f"it unpacks to more than {size_text(self._limit)}; raise --max-unpacked, or unpack it first"
            )
        return data


def open_bytes(path: Path, max_unpacked: int = MAX_UNPACKED) -> BinaryIO:
    """Open a file for reading; decompress it if necessary."""
    if not is_gzip(path):
        return path.open("rb")
    return io.BufferedReader(_Limited(path, max_unpacked), _READ_AT_ONCE)


def open_text(path: Path, max_unpacked: int = MAX_UNPACKED) -> TextIO:
    return io.TextIOWrapper(open_bytes(path, max_unpacked), encoding="utf-8-sig", errors="replace")


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def load_json(text: str | bytes) -> Any:
    """Parse one record; raise ValueError if it is not JSON, too large or nested too deeply."""
    check_size(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_size(text: str | bytes, start: int = 0) -> None:
    """Raise ValueError for a record that would take too much memory.

    Every value but the first follows a comma, a bracket or a colon.
    """
    size = len(text) - start
    if size > MAX_RECORD:
        raise ValueError(f"a record of more than {size_text(MAX_RECORD)}")
    if size > _SMALL:
        signs: tuple[Any, ...] = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
        if sum(text.count(sign, start) for sign in signs) > _MAX_VALUES:
            raise ValueError(f"a record of more than {_MAX_VALUES:,} values")


def size_text(size: int) -> str:
    """Format a number of bytes."""
    for unit, name in ((1024**3, "GB"), (1024**2, "MB"), (1024, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}" if size % unit == 0 else f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def lines_of(
    path: Path, faults: Faults, start: int = 0, end: int | None = None, max_unpacked: int = MAX_UNPACKED
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin within [start, end): where each begins, and its text. Ranges are for plain files."""
    position, empty = start, 0
    try:
        with open_bytes(path, max_unpacked) as file:
            if start:
                file.seek(start - 1)
                position += _skip_line(file) - 1  # the line that began before belongs to the range before
            while end is None or position < end:
                line = file.readline(MAX_RECORD)
                if not line:
                    return
                begins, position = position, position + len(line)
                if len(line) >= MAX_RECORD and not line.endswith(b"\n"):
                    faults.add(f"{path.name} at byte {begins}", f"a line of more than {size_text(MAX_RECORD)}")
                    position += _skip_line(file)
                elif line.strip():
                    empty = 0
                    yield begins, line
                elif (empty := empty + 1) > _EMPTY_LINES:
                    faults.add(
                        f"{path.name} at byte {begins}", f"{_EMPTY_LINES:,} empty lines in a row: the rest is left out"
                    )
                    return
    except UnpackedError as error:
        faults.add(f"{path.name} at byte {position}", f"read up to here: {error}")
    except DAMAGED as error:
        faults.add(f"{path.name} at byte {position}", f"the file is damaged or cut off here: {error}")


def ranges(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a plain file, of about ``size`` bytes. A line belongs to the one in which it begins."""
    total = path.stat().st_size
    for start in range(0, total, size):
        yield start, min(start + size, total)


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while piece := file.readline(_SKIPPED_AT_ONCE):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


class TruncatedError(ValueError):
    """The document ends, or stops being JSON, in the middle."""


class JsonStream:
    """``members`` and ``elements`` iterate an object or an array; ``value`` reads the whole next value."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at, self._done = "", 0, False
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Return the next character that is not white space, "" at the end."""
        while True:
            if (found := _NO_SPACE.search(self._text, self._at)) is not None:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._more():
                return ""

    def take(self, wanted: str) -> None:
        if self.peek() != wanted:
            raise TruncatedError(
                f"'{wanted}' expected, {self.peek()!r} found" if self.peek() else "the document ends in the middle"
            )
        self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                check_size(self._text, self._at)
            except ValueError as error:
                raise TruncatedError(str(error)) from None
            try:
                value, end = self._decode(self._text, self._at)
            except ValueError as error:
                if not self._more(len(self._text) - self._at):
                    raise TruncatedError(str(error)) from None
                continue
            except RecursionError:
                raise TruncatedError("nested too deeply") from None
            if len(self._text) - end < _LONGEST_NUMBER and not isinstance(value, str | list | dict) and self._more():
                continue  # a number may continue in the next piece
            self._at = end
            return value

    def members(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads the value of each before the next."""
        for _ in self.elements("{", "}"):
            key = self.value()
            self.take(":")
            if not isinstance(key, str):
                raise TruncatedError("a key that is not a string")
            yield key

    def elements(self, first: str = "[", last: str = "]") -> Iterator[None]:
        """Yield once per element of an array; the caller reads the element before the next."""
        self.take(first)
        while self.peek() != last:
            yield None
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != last:
                self.take(last)
        self._at += 1

    def _more(self, at_least: int = 0) -> bool:
        """Read more text; a value that did not fit is parsed again only after its text has doubled."""
        if self._done:
            return False
        piece = self._file.read(min(max(_READ_AT_ONCE, at_least), MAX_RECORD))
        self._done = not piece
        if piece:
            self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)
