"""The usage of one model call, from its first chunk to its bill: what was reported, and an estimate of what was not.

Live runs, replay, termination conditions and token budgets all bill by these rules:

- A figure that was reported never falls while the call lasts. Chunks repeat and extend each other; they are not added
  up.
- A report always replaces an estimate.
- A call that reported nothing is estimated: its prompt from the request, its output from the text that came back.
- A call that reported output and no input is estimated in its input only. Input without output is a valid report.
- A stream that reported something on the way and nothing at its end took at least the text that came.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

from runguard.pricing.rates import Usage
from runguard.providers.fields import fields, items
from runguard.providers.sizes import UPPER, answer_size, tokens_in
from runguard.providers.usage import Counts, read_usage, searches_in

_CLOSED_KEPT: Final = 1_024
_OPEN_KEPT: Final = 1_024
_PROBLEMS_KEPT: Final = 16


_Key = tuple[Any, Any]  # author and branch


class CallBill(NamedTuple):
    """What a call took. ``estimated``: some of it was not reported."""

    usage: Usage
    estimated: bool


class CallUsage:
    """What is known of one call so far."""

    __slots__ = (
        "_answered",
        "_counts",
        "_final",
        "_has_input",
        "_searches",
        "_streamed",
        "_whole",
        "has_report",
        "problems",
        "prompt",
        "reported",
    )

    def __init__(self) -> None:
        self._counts: Counts | None = None
        self._has_input = False  # the prompt was counted, or a part of it
        self.reported: Usage | None = None  # the usage as it was reported; None: nothing was
        self._searches = 0  # on the model's side
        self.prompt: int | None = None  # the size of the prompt, if it was reported
        self._streamed = self._whole = 0  # bytes of the chunks, and of whole responses
        # whether the whole answer is there, and whether a report came with it or behind it
        self._answered = self._final = False
        self.has_report = False  # usage came with it, if only zeros
        self.problems: list[str] = []  # what reports said that cannot be true

    def add(self, response: Any) -> bool:
        """A response of ADK or one of its events, whole or a chunk, as an object or as JSON.

        True: it reported something new.
        """
        get = fields(response).get
        partial = get("partial") is True
        self._answered = self._answered or not partial
        counts: Counts | None = None
        report = get("usage_metadata")
        if report is not None or (report := get("usageMetadata")) is not None:
            self.has_report = True
            del self.problems[_PROBLEMS_KEPT:]
            counts = read_usage(report, self.problems)
        if (grounding := get("grounding_metadata") or get("groundingMetadata")) is not None:
            self._searches = max(self._searches, searches_in(grounding))
            if counts is None and self._counts is not None and self._searches > self._counts.searches:
                self._counts.searches = self._searches
                self.reported = self._counts.usage()
        if partial or counts is None:  # else its size is of no use any more
            size = answer_size(get("content"))
            if partial:
                self._streamed += size
            else:
                self._whole += size
        if counts is None:
            return False
        self._final = self._final or self._answered
        known = self._counts
        if self._searches > counts.searches:
            counts.searches = self._searches
        if known is None:
            known = self._counts = counts
        elif not known.add(counts):
            return False
        self.reported = known.usage()
        self._has_input = known.input > 0 or known.cached > 0 or known.cache_write > 0
        self.prompt = self.reported.input or None if self._has_input else None
        return True

    @property
    def text_tokens(self) -> int:
        """Tokens of the answer, estimated from its text."""
        return tokens_in(max(self._streamed, self._whole))

    def bill(self, prompt: int, audio: int = 0) -> CallBill:
        """What the call took. ``prompt``: the tokens of its request, estimated; ``audio``: those of them that are
        audio.
        """
        if self._has_input and self._final and self.reported is not None:  # most calls
            return CallBill(self.reported, False)
        bill = self.bill_so_far(prompt, audio)
        if self._final or self.text_tokens <= bill.usage.output:
            return bill
        return CallBill(replace(bill.usage, output=self.text_tokens), True)

    def bill_so_far(self, prompt: int, audio: int = 0) -> CallBill:
        """The same in the middle of a stream: its next chunk may report what has come by now."""
        usage, counts = self.reported, self._counts
        if usage is None or counts is None:
            usage = Usage(input=prompt, output=self.text_tokens, audio=audio, searches=self._searches)
            return CallBill(usage, True)
        if counts.lacks_input:
            return CallBill(replace(usage, input=prompt, audio=audio), True)
        return CallBill(usage, counts.is_undivided)


def usage_in(get: Any) -> Any:
    """The usage report of a response or an event, by its fields."""
    report = get("usage_metadata")
    return get("usageMetadata") if report is None else report


class Taken(NamedTuple):
    """What a model call took, read from its events.

    ``before``: what was already counted for the same call, which this replaces.
    """

    usage: Usage
    estimated: bool
    before: Usage | None = None


class _Closed(NamedTuple):
    """The last call of an author in a branch: another event may still belong to it."""

    call: CallUsage
    prompt: int  # estimated
    billed: Usage
    streamed: bool
    calls: bool  # it called functions


class EventUsage:
    """The model calls among the events of a session, each billed once.

    A stream may report its usage in every chunk, in the last one, in the event that closes it, or behind that. Streams
    are distinguished by author and branch, because parallel branches are interleaved. The prompt of a call that reports
    none is estimated from the events before it; instructions and tool declarations are in no event.
    """

    __slots__ = ("_closed", "_history", "_open")

    def __init__(self) -> None:
        self._history = 0  # bytes of all events so far
        self._open: dict[_Key, CallUsage] = {}
        self._closed: dict[_Key, _Closed] = {}

    @property
    def prompt(self) -> int:
        """The tokens of all events so far, estimated."""
        return -(-self._history // UPPER)

    def pass_by(self, event: Any) -> None:
        """An event that no model has made: part of the next prompt, and the end of what its author said before."""
        get = fields(event).get
        self._history += answer_size(get("content"))
        self._closed.pop(_key(get), None)

    def read(self, event: Any, *, is_answer: bool = False) -> Taken | None:
        """None: the event completes no model call.

        ``is_answer``: it is known to be a model's answer, whether or not it reports usage.
        """
        get = fields(event).get
        if get("partial") is True:
            return self._read_chunk(_key(get), event, get("content"))
        key, report, content = _key(get), usage_in(get), get("content")
        prompt = self.prompt
        self._history += answer_size(content)
        streamed, closed = self._open.pop(key, None), self._closed.pop(key, None)
        if report is None and not is_answer and (streamed is None or not streamed.has_report):
            return None
        calls = _calls_functions(content)
        if closed is not None and streamed is None and closed.call.reported is not None:
            if report is None and calls and not closed.calls:
                return None  # LiteLLM's words and its function calls come in two events, and only the first one reports
            if closed.streamed and _closes_again(closed.billed, report):
                return self._again(key, closed._replace(calls=calls), event)
        call = CallUsage() if streamed is None else streamed
        call.add(event)
        bill = call.bill(prompt)
        self._close(key, _Closed(call, prompt, bill.usage, streamed is not None, calls))
        return Taken(*bill)

    def _read_chunk(self, key: _Key, event: Any, content: Any) -> Taken | None:
        closed = self._closed.pop(key, None)
        if closed is not None and key not in self._open and not answer_size(content):  # a report behind its answer
            return self._again(key, closed, event)
        if len(self._open) < _OPEN_KEPT or key in self._open:
            self._open.setdefault(key, CallUsage()).add(event)
        return None

    def _again(self, key: _Key, closed: _Closed, event: Any) -> Taken | None:
        """One more event of a call that was billed: the new bill replaces the old one."""
        closed.call.add(event)
        bill = closed.call.bill(closed.prompt)
        self._close(key, closed._replace(billed=bill.usage))
        return None if bill.usage == closed.billed else Taken(*bill, closed.billed)

    def _close(self, key: _Key, closed: _Closed) -> None:
        self._closed[key] = closed
        if len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]


def _key(get: Any) -> _Key:
    return get("author") or "", get("branch") or ""


def _calls_functions(content: Any) -> bool:
    parts = items(fields(content).get("parts"))
    return any(
        get("function_call") is not None or get("functionCall") is not None
        for get in (fields(part).get for part in parts)
    )


def _closes_again(before: Usage, report: Any) -> bool:
    """ADK's older streaming closes a stream twice when a call follows text: same prompt, no chunk between."""
    counts = read_usage(report, [])
    after = None if counts is None else counts.usage()
    return after is not None and after.input == before.input and after.output >= before.output
