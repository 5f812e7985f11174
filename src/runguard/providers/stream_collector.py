"""Collects what the pieces of an answer say: text, tool calls, usage, each up to its bound."""

from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from runguard.pricing.rates import Usage
from runguard.providers.responses import MAX_ARGUMENTS, MAX_CALLS, TEXT_CHARS, Call, Reading, Result, arguments
from runguard.providers.sizes import size_of, text_size, tokens_in
from runguard.providers.usage import NO_INPUT, Counts, read_usage

_MAX_PROBLEMS: Final = 16


class GrowingCall:
    """A tool call whose arguments are still coming."""

    __slots__ = ("id", "name", "pieces", "room")

    def __init__(self, name: str, id_: str, start: object = None) -> None:
        self.name, self.id = name, id_
        self.pieces: list[str] | object = [] if start is None or start == {} else start
        self.room = MAX_ARGUMENTS

    def add(self, piece: str) -> None:
        if self.room > 0 and type(self.pieces) is list:
            self.pieces.append(piece[: self.room])
            self.room -= len(piece)

    def whole(self) -> Call:
        return self.name, arguments("".join(self.pieces)) if type(self.pieces) is list else self.pieces


class StreamCollector:
    """What has come so far. Figures only grow, and text and calls are kept up to a bound."""

    __slots__ = (
        *(
            "_asked",
            "_begun",
            "_calls",
            "_closed",
            "_counts",
            "_earlier",
            "_full",
            "_history",
            "_model",
            "_own",
            "_partial",
            "_problems",
            "_room",
        ),
        *("_reported_at", "_spoken", "_texts", "_usd", "chars", "is_final"),
    )

    def __init__(self) -> None:
        self.chars = 0  # bytes of everything streamed, thinking and arguments included: as estimates count text
        self._texts: list[str] = []
        self._room = TEXT_CHARS
        self._calls: list[GrowingCall | Call] = []
        self._begun: dict[tuple[object, ...], GrowingCall] = {}
        self._counts: Counts | None = None  # Anthropic's come in two halves: input first, output last
        self._reported_at = -1  # ``chars`` when the last report came
        self._model = ""
        self._usd: Decimal | None = None
        self._own: tuple[object, object, tuple[Result, ...]] = (None, None, ())
        self._problems: list[str] = []
        self._partial = False
        self._full = (0, TEXT_CHARS, 0, 0)  # texts, room, calls, chars before the first partial response
        self.is_final = False  # the usage so far is final
        self._earlier: list[Usage] = []  # of requests that were made before, where a client makes several
        # how much was known, written and called when the current request began
        self._history = self._spoken = self._asked = 0
        self._closed = False  # it gave its finish reason

    def reading(self) -> Reading:
        """What has come so far. Changes nothing."""
        counts, problems = self._counts, self._problems
        if counts is not None and counts.lacks_input:
            problems = [*problems, NO_INPUT]
        calls: tuple[Call, ...] = tuple(call.whole() if isinstance(call, GrowingCall) else call for call in self._calls)
        sig, result, results = self._own
        return Reading(
            None if counts is None else counts.usage(),
            self._model,
            calls,
            "".join(self._texts),
            self._usd,
            sig,
            result,
            results,
            tuple(problems[:_MAX_PROBLEMS]),
            tuple(reversed(self._earlier)),
            None if counts is None else replace(counts),
            self.received,
        )

    @property
    def received(self) -> int:
        """Bytes of the current request's answer."""
        return self.chars - self._spoken

    @property
    def ends_unreported(self) -> bool:
        """Whether more came since the last report than that report can have counted."""
        counts = self._counts
        if counts is None or self.chars <= self._reported_at:
            return False
        return tokens_in(self.received) > counts.usage().output

    def _say(self, text: Any, *, aloud: bool = True) -> None:
        if type(text) is not str or not text:
            return
        self.chars += text_size(text)
        if aloud and self._room > 0:
            self._texts.append(text[: self._room])
            self._room -= len(text)

    def _call(self, call: Call) -> None:
        self.chars += len(call[0]) + size_of(call[1])
        if len(self._calls) < MAX_CALLS:
            self._calls.append(call)

    def _begin(self, key: tuple[object, ...], name: Any, id_: Any, start: object = None) -> None:
        if type(name) is not str or not name or len(self._calls) >= MAX_CALLS:
            return
        self.chars += len(name)
        self._begun[key] = growing = GrowingCall(name, id_ if type(id_) is str else "", start)
        self._calls.append(growing)

    def _grow(self, key: tuple[object, ...], piece: Any) -> None:
        if type(piece) is str and piece:
            self.chars += text_size(piece)
            if (growing := self._begun.get(key)) is not None:
                growing.add(piece)

    def _report(self, report: Any) -> bool:
        """Whether a usage report says anything."""
        problems: list[str] = []
        counts = None if report is None else read_usage(report, problems)
        for problem in problems:
            self._problem(problem)
        if counts is not None:
            self._take(counts)
        return counts is not None

    def _take(self, counts: Counts) -> None:
        self._reported_at = self.chars
        if self._counts is None:
            self._counts = replace(counts)
        else:
            self._counts.add(counts)

    def _problem(self, problem: str) -> None:
        if len(self._problems) < _MAX_PROBLEMS and problem not in self._problems:
            self._problems.append(problem)
