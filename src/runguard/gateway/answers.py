"""Reads an answer while it passes through, whole or streamed, without changing a byte of it."""

import json
import zlib
from dataclasses import replace
from typing import Any, Final

from runguard.gateway.formats import WireFormat
from runguard.providers.messages import Reading, read
from runguard.providers.streams import StreamReading
from runguard.providers.usage import size_of

_MOST_BYTES: Final = 64_000_000  # of an answer, or of one event, that is read; more is counted by its size
_SLICE: Final = 1_000_000


class Inflater:
    """Unpacks the copy of a body that is read, within bounds."""

    def __init__(self, encoding: str) -> None:
        self.is_readable = encoding in ("", "identity", "gzip", "deflate")
        self._inflate = (
            zlib.decompressobj(47 if encoding == "gzip" else 15) if encoding in ("gzip", "deflate") else None
        )

    def feed(self, data: bytes) -> bytes:
        if not self.is_readable:
            return b""
        if self._inflate is None:
            return data
        try:
            out, left = bytearray(), data
            while left and len(out) < _MOST_BYTES:
                out += self._inflate.decompress(left, _SLICE)
                left = self._inflate.unconsumed_tail
            return bytes(out)
        except zlib.error:
            self.is_readable = False
            return b""


class AnswerReader:
    """What an answer has said so far, and whether it is complete."""

    def __init__(self, wire: WireFormat, encoding: str, *, is_stream: bool) -> None:
        self._wire, self.is_stream = wire, is_stream
        self._inflate = Inflater(encoding)
        self._stream = StreamReading()
        self._rest = bytearray()
        self.size = 0  # bytes that came
        self.name = ""  # under which the provider keeps the answer
        self._whole: Reading | None = None

    def feed(self, chunk: bytes) -> bool:
        """Take in a piece of the body. True: the answer is complete, and the program may act on it."""
        self.size += len(chunk)
        self._rest += self._inflate.feed(chunk)
        if len(self._rest) > _MOST_BYTES:
            self._rest.clear()
            self._inflate.is_readable = False
        if not self.is_stream:
            return False
        is_complete = False
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            if line.startswith(b"data:"):
                is_complete = self._event(line[5:].strip()) or is_complete
        return is_complete

    def end(self) -> None:
        """Read a body that is no stream: it is complete."""
        if self.is_stream or not self._rest:
            return
        try:
            data = json.loads(bytes(self._rest))
        except (ValueError, RecursionError):
            return
        if isinstance(data, list):  # Gemini's stream without server-sent events
            for one in data:
                self._note(one)
            self.is_stream = True
        else:
            self._whole, self.name = read(data), _name_of(data)

    @property
    def is_final(self) -> bool:
        """Whether the usage so far is final, although the stream may have been cut."""
        return self._stream.is_final

    @property
    def lacks_report(self) -> bool:
        """Whether more was said than the usage so far can count: a stream that ended without its last report."""
        return self._whole is None and self._stream.ends_unreported

    @property
    def reading(self) -> Reading:
        """What the answer has said so far, with the least that it can have taken as its usage."""
        if self._whole is not None:
            return self._whole
        return replace(self._stream.reading(), usage=self._stream.least_usage)

    @property
    def said(self) -> int:
        """Bytes that the model has said, for the estimate of an answer without a report."""
        if self.is_stream:
            return self._stream.received or (0 if self._inflate.is_readable else self.size)
        if self._whole is None:
            return self.size
        return self._whole.size or size_of(self._whole.text)

    def _event(self, line: bytes) -> bool:
        if line == b"[DONE]":
            return self._wire.is_end("[DONE]")
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            return False
        self._note(data)
        return self._wire.is_end(data)

    def take(self, chunk: Any) -> None:
        """Take in a piece of a stream that a library has read: an object, or the text of events."""
        if isinstance(chunk, str | bytes):
            self.feed(chunk.encode() if isinstance(chunk, str) else chunk)
        else:
            self._note(chunk)

    def _note(self, data: Any) -> None:
        self._stream.feed(data)
        if not self.name and isinstance(data, dict):
            self.name = _name_of(data.get("response"))


def _name_of(data: Any) -> str:
    name = data.get("id") if isinstance(data, dict) else None
    return name if isinstance(name, str) else ""
