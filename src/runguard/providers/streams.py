"""Reads an answer that comes in pieces: which kind of piece each provider sends, and what it says.

``calls/streams`` feeds a ``StreamReading`` with the pieces that a guarded function streams. Usage in a stream is
cumulative with every provider: figures only grow, and they are not added up.
"""

from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from runguard.pricing.rates import Usage
from runguard.providers.messages import (
    MAX_ARGUMENTS,
    MAX_CALLS,
    MAX_PARTS,
    TEXT_CHARS,
    Call,
    Reading,
    Result,
    anthropic_block,
    arguments,
    model_of,
    read,
    responses_item,
    text_in,
)
from runguard.providers.usage import (
    NO_INPUT,
    UPPER,
    Counts,
    fields,
    items,
    read_usage,
    size_of,
    stated_cost,
    text_size,
    tokens_in,
    usage_in,
)

# ---- What the pieces of an answer have said so far: text, tool calls, usage, each up to its bound.

_MAX_PROBLEMS: Final = 16
_CHOICES: Final = 128
_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class StreamedCall:
    """A tool call whose arguments are still coming, or are ``given`` as a whole."""

    __slots__ = ("given", "id", "name", "pieces", "room")

    def __init__(self, name: str, id_: str, given: object = None) -> None:
        self.name, self.id, self.given = name, id_, given
        self.pieces: list[str] = []
        self.room = MAX_ARGUMENTS

    def add(self, piece: str) -> None:
        if self.room > 0:
            self.pieces.append(piece[: self.room])
            self.room -= len(piece)

    def whole(self) -> Call:
        """Return the tool's name and its arguments, parsed as far as they are valid JSON."""
        return self.name, arguments("".join(self.pieces)) if self.given is None else self.given


class StreamReading:
    """Reads a stream: ``feed`` it every chunk. Figures only grow; text and calls are kept up to a bound.

    ``reading()`` says what the chunks mean together, also for a stream that was left midway.
    """

    __slots__ = (
        *("_asked", "_begun", "_calls", "_closed", "_counts", "_earlier", "_full", "_history", "_model", "_own"),
        *("_partial", "_problems", "_reported_at", "_room", "_spoken", "_texts", "_usd", "chars", "is_final"),
    )

    def __init__(self) -> None:
        self.chars = 0  # bytes of everything streamed, thinking and arguments included: as estimates count text
        self._texts: list[str] = []
        self._room = TEXT_CHARS
        self._calls: list[StreamedCall] = []
        self._begun: dict[tuple[object, ...], StreamedCall] = {}
        self._counts: Counts | None = None  # Anthropic's come in two halves: input first, output last
        self._reported_at = -1  # ``chars`` when the last report came
        self._model = ""
        self._usd: Decimal | None = None
        self._own: tuple[object, object, tuple[Result, ...]] = (None, None, ())
        self._problems: list[str] = []
        self._partial = False
        self._full = (0, TEXT_CHARS, 0, 0)  # texts, room, calls, chars before the first partial response
        self.is_final = False  # the usage so far is final
        self._earlier: list[Usage] = []  # of earlier requests, where a client makes several for one call
        # the length of the history, the bytes streamed and the calls made when the current request began
        self._history = self._spoken = self._asked = 0
        self._closed = False  # it gave its finish reason

    def reading(self) -> Reading:
        """Return what has come so far, and change nothing."""
        counts, problems = self._counts, self._problems
        if counts is not None and counts.lacks_input:
            problems = [*problems, NO_INPUT]
        calls: tuple[Call, ...] = tuple(call.whole() for call in self._calls)
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
            ids=tuple(call.id for call in self._calls),
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

    @property
    def least_usage(self) -> Usage | None:
        """What the call took at least, as far as it is reported: for a stream that has ended before its last report."""
        usage = None if self._counts is None else self._counts.usage()
        return replace(usage, output=tokens_in(self.received)) if usage is not None and self.ends_unreported else usage

    def _say(self, text: Any, *, aloud: bool = True) -> None:
        if type(text) is not str or not text:
            return
        self.chars += text_size(text)
        if aloud and self._room > 0:
            self._texts.append(text[: self._room])
            self._room -= len(text)

    def _call(self, name: str, given: object, id_: str) -> None:
        self.chars += len(name) + size_of(given)
        if len(self._calls) < MAX_CALLS:
            self._calls.append(StreamedCall(name, id_, given))

    def _begin(self, key: tuple[object, ...], name: Any, id_: Any, start: object = None) -> None:
        if type(name) is not str or not name or len(self._calls) >= MAX_CALLS:
            return
        self.chars += len(name)
        self._begun[key] = growing = StreamedCall(name, text_in(id_), None if start == {} else start)
        self._calls.append(growing)

    def _grow(self, key: tuple[object, ...], piece: Any) -> None:
        if type(piece) is str and piece:
            self.chars += text_size(piece)
            if (growing := self._begun.get(key)) is not None:
                growing.add(piece)

    def _report(self, report: Any) -> bool:
        """Take in a usage report. Return whether it has any figures."""
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

    # ---- Which kind of piece each provider sends.

    def feed(self, chunk: object) -> None:
        """Take in one more piece. Never raise: a piece that cannot be read becomes a problem of the reading."""
        self._reported_at, before = -1, self._reported_at
        try:
            self._feed(chunk)
        except Exception as error:
            self._problem(f"a chunk could not be read: {type(error).__name__}")
        # a report counts everything that its own chunk says
        self._reported_at = before if self._reported_at < 0 else self.chars

    def take_whole(self, snapshot: object) -> None:
        """Take in a snapshot that the client library has put together from the same pieces."""
        self.feed(snapshot)
        get = fields(snapshot).get
        ends = [get("stop_reason"), *(fields(choice).get("finish_reason") for choice in items(get("choices"))[:1])]
        self.is_final = self._counts is not None and any(end is not None for end in ends)

    def _feed(self, chunk: Any) -> None:
        if type(chunk) is str:
            self._say(chunk)
            return
        if type(chunk) is bytes:
            self.chars += len(chunk)
            return
        get = fields(chunk).get
        kind = get("type")
        if type(kind) is str:
            if kind.startswith("response."):
                self._responses_event(kind, get)
                return
            if (event := _EVENTS.get(kind)) is not None:
                event(self, get)
                return
        choices = get("choices")
        if type(choices) is list and (not choices or fields(choices[0]).get("message") is None):
            self._chat_chunk(chunk, get, choices)
        elif (
            (candidates := items(get("candidates")))
            or get("usage_metadata") is not None
            or get("usageMetadata") is not None
        ):
            self._gemini_chunk(get, fields(candidates[0]).get("content") if candidates else get("content"))
        elif type(getattr(content := get("content"), "parts", None)) is list or type(get("partial")) is bool:
            self._gemini_chunk(get, content)
        else:
            self._add(read(chunk), chunk)  # a whole answer, or something of the caller's own

    def _add(self, given: Reading, chunk: object) -> None:
        if given.counts is not None:
            self._take(given.counts)
        self._usd = self._usd if given.usd is None else given.usd
        self._model = given.model or self._model
        sig, result, results = self._own
        self._own = (
            sig if given.sig is None else given.sig,
            result if given.result is None else given.result,
            given.results or results,
        )
        self._say(given.text)
        for (name, args), id_ in zip(given.calls, given.ids, strict=True):
            self._call(name, args, id_)
        for problem in given.problems:
            self._problem(problem)
        if not given.text and not given.calls and given.usage is None:
            self._model = self._model or model_of(fields(chunk).get)

    # ---- OpenAI's chat completions, LiteLLM.

    def _chat_chunk(self, chunk: Any, get: Any, choices: list[Any]) -> None:
        self._model = model_of(get) or self._model
        given = get("usage")
        reported = self._report(given)
        usd = stated_cost(chunk, given, self._problems)
        self._usd = self._usd if usd is None else usd
        for choice in choices[:_CHOICES]:
            of = fields(choice).get
            first = of("index") in (0, None)
            delta = fields(of("delta")).get
            self._say(delta("content"), aloud=first)
            self._say(delta("refusal"), aloud=first)
            self._say(delta("reasoning_content"), aloud=False)
            self._say(of("text"), aloud=first)
            for call in items(delta("tool_calls"))[:MAX_CALLS]:
                self._chat_call(fields(call).get, first)
            if (older := delta("function_call")) is not None:
                self._chat_piece(("function",), fields(older).get, None, "arguments", first)
            self._closed = self._closed or of("finish_reason") is not None
        self.is_final = self.is_final or (reported and (self._closed or not choices))

    def _chat_call(self, get: Any, first: bool) -> None:
        index = get("index")
        custom = get("custom")
        at = index if type(index) is int else len(self._calls)  # a call without an index comes in one piece
        of = fields(get("function") if custom is None else custom).get
        self._chat_piece(("chat", at), of, get("id"), "arguments" if custom is None else "input", first)

    def _chat_piece(self, key: tuple[object, ...], get: Any, id_: Any, where: str, first: bool) -> None:
        if not first:  # only the first of several choices is read, but all are paid for
            self._say(get("name"), aloud=False)
            self._say(get(where), aloud=False)
            return
        known = self._begun.get(key)
        # some providers give every call the index 0, and each its own id
        if known is None or (type(id_) is str and id_ and known.id and id_ != known.id and get("name")):
            self._begin(key, get("name"), id_)
        self._grow(key, get(where))

    # ---- Gemini, ADK.

    def _gemini_chunk(self, get: Any, content: Any) -> None:
        self._model = model_of(get) or self._model
        parts = items(fields(content).get("parts"))
        if (history := len(items(get("automatic_function_calling_history")))) != self._history or (
            self._closed and parts
        ):
            self._next_request(history)
        self._closed = self._closed or _ends(get)
        self.is_final = self._report(usage_in(get)) and self._closed
        if not parts:
            return
        partial = get("partial")
        before = self.chars
        if partial is not True and self._partial:  # after the pieces, ADK sends the whole answer
            texts, self._room, calls, self.chars = self._full
            del self._texts[texts:], self._calls[calls:]
        for part in parts[:MAX_PARTS]:
            self._gemini_part(fields(part).get)
        self.chars = max(self.chars, before)
        self._partial = partial is True
        if not self._partial:
            self._full = (len(self._texts), self._room, len(self._calls), self.chars)

    def _next_request(self, history: int) -> None:
        """Keep the usage so far as that of a finished request: google-genai has called functions and asks again.

        ``history``: the length of the history of automatic function calls in the new chunk.
        """
        if history > self._history or len(self._calls) > self._asked:  # else the provider sends more after its end
            self._earlier.append(
                Usage(output=-(-self.received // UPPER)) if self._counts is None else self._counts.usage()
            )
            self._counts, self._history, self._spoken, self._asked = None, history, self.chars, len(self._calls)
        self._closed = False

    def _gemini_part(self, get: Any) -> None:
        if (text := get("text")) is not None:
            self._say(text, aloud=get("thought") is not True)
        elif (call := get("function_call") or get("functionCall")) is not None:
            of = fields(call).get
            if name := text_in(of("name")):
                self._call(name, arguments(of("args")), text_in(of("id")))

    # ---- OpenAI's responses.

    def _responses_event(self, kind: str, get: Any) -> None:
        if kind.endswith(".delta"):
            self._say(get("delta"), aloud=kind in ("response.output_text.delta", "response.refusal.delta"))
        elif kind == "response.output_item.done":
            parts = Reading()
            responses_item(fields(get("item")).get, parts)
            for (name, args), id_ in zip(parts.calls, parts.ids, strict=True):  # their characters came as deltas
                self._calls.append(StreamedCall(name, id_, args))
            del self._calls[MAX_CALLS:]
        elif (response := get("response")) is not None:
            self._response(response, whole=kind in _ENDS)
            self.is_final = kind in _ENDS and self._counts is not None

    def _response(self, response: Any, *, whole: bool) -> None:
        given, streamed = read(response), self.chars
        if whole and (given.text or given.calls):
            self._texts.clear()
            self._calls.clear()
            self._room, self.chars = TEXT_CHARS, 0
        self._add(given, response)
        self.chars = max(self.chars, streamed)

    # ---- Anthropic.

    def _message_start(self, get: Any) -> None:
        of = fields(get("message")).get
        self._model = model_of(of) or self._model
        self._report(of("usage"))

    def _message_delta(self, get: Any) -> None:
        self.is_final = self._report(get("usage")) and fields(get("delta")).get("stop_reason") is not None

    def _block_start(self, get: Any) -> None:
        of = fields(get("content_block")).get
        if of("type") == "tool_use":
            self._begin(("block", get("index")), of("name"), of("id"), of("input"))
            return
        parts = Reading()
        anthropic_block(of, parts)
        self._say(parts.text)

    def _block_delta(self, get: Any) -> None:
        of = fields(get("delta")).get
        kind = of("type")
        if kind == "text_delta":
            self._say(of("text"))
        elif kind == "input_json_delta":
            self._grow(("block", get("index")), of("partial_json"))
        elif kind == "thinking_delta":
            self._say(of("thinking"), aloud=False)

    def _chunk_event(self, get: Any) -> None:
        """Take in the chunk inside an event of OpenAI's stream helper, which sends each chunk beside its own events."""
        if (chunk := get("chunk")) is not None:
            inner = fields(chunk).get
            if type(choices := inner("choices")) is list:
                self._chat_chunk(chunk, inner, choices)


def _ends(get: Any) -> bool:
    """Return whether a chunk of Gemini or ADK gives a finish reason."""
    for candidate in items(get("candidates"))[:1]:
        get = fields(candidate).get
    return (get("finish_reason") or get("finishReason")) is not None


_EVENTS: Final = {
    "message_start": StreamReading._message_start,
    "message_delta": StreamReading._message_delta,
    "content_block_start": StreamReading._block_start,
    "content_block_delta": StreamReading._block_delta,
    "chunk": StreamReading._chunk_event,
}
