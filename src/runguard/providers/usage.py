"""The usage of a model call: one bill from its first chunk to its last, from the reports of any provider.

The ADK adapter, ``engine/token_budget``, replay and termination conditions bill calls with ``CallUsage`` and
``EventUsage``. ``providers/messages`` and ``providers/streams`` read reports with ``read_usage``. The other adapters
measure texts with ``size_of``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from decimal import Context, Decimal
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from runguard.core.identity import CHARS_PER_TOKEN, LruDict, stored_attributes
from runguard.core.money import stated_usd
from runguard.pricing.rates import MOST_TOKENS, Usage

# ---- The usage of one model call: what was reported, and an estimate of what was not.

_CLOSED_KEPT: Final = 1_024
_OPEN_KEPT: Final = 1_024
_PROBLEMS_KEPT: Final = 16
_Key = tuple[Any, Any]  # author and branch


class CallBill(NamedTuple):
    """The bill of one call. ``estimated``: some figures of ``usage`` were not reported."""

    usage: Usage
    estimated: bool


class CallUsage:
    """The usage of one call, as far as it is known.

    - A figure that was reported never falls while the call lasts. Chunks repeat and extend each other; they are not
      added up.
    - A report always replaces an estimate.
    - For a call that reported nothing, the prompt is estimated from the request and the output from the answer's text.
    - For a call that reported output and no input, only the input is estimated. For a call that reported input alone,
      without output and total, only the output is estimated, from the answer's text.
    - A stream that reported something on the way and nothing at its end is billed for at least the text that came.
    """

    __slots__ = (
        "_answered",
        "_counts",
        "_final",
        "_has_input",
        "_has_output",
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
        self._has_output = False  # the answer was counted, or a total that includes it
        self.reported: Usage | None = None  # the usage as it was reported; None: nothing was
        self._searches = 0  # on the model's side
        self.prompt: int | None = None  # the size of the prompt, if it was reported
        self._streamed = self._whole = 0  # bytes of the chunks, and of whole responses
        # whether the whole answer is there, and whether a report came with it or after it
        self._answered = self._final = False
        self.has_report = False  # a usage report came, even if it held only zeros
        self.problems: list[str] = []  # what reports said that cannot be true

    def add(self, response: Any) -> bool:
        """Take in a response of ADK or one of its events, whole or a chunk, as an object or as JSON.

        Return True when it reported something new.
        """
        get = fields(response).get
        partial = get("partial") is True
        self._answered = self._answered or not partial
        counts: Counts | None = None
        report = get("usage_metadata")
        if report is None:
            report = get("usageMetadata")
        if report is not None:
            self.has_report = True
            del self.problems[_PROBLEMS_KEPT:]
            counts = read_usage(report, self.problems)
        if (grounding := get("grounding_metadata") or get("groundingMetadata")) is not None:
            self._searches = max(self._searches, searches_in(grounding))
            if counts is None and self._counts is not None and self._searches > self._counts.searches:
                self._counts.searches = self._searches
                self.reported = self._counts.usage()
        is_new = False
        if counts is not None:
            self._final = self._final or self._answered
            counts.searches = max(counts.searches, self._searches)
            if self._counts is None:
                self._counts, is_new = counts, True
            else:
                is_new = self._counts.add(counts)
            if is_new:
                known = self._counts
                usage = self.reported = known.usage()
                self._has_input = known.input > 0 or known.cached > 0 or known.cache_write > 0
                self._has_output = known.answer > 0 or known.beside > 0 or known.total > 0
                self.prompt = usage.input or None if self._has_input else None
        if partial or counts is None or not self._has_output:  # a whole answer that is counted needs no estimate
            size = answer_size(get("content"))
            if partial:
                self._streamed += size
            else:
                self._whole += size
        return is_new

    @property
    def text_tokens(self) -> int:
        """Tokens of the answer, estimated from its text."""
        return tokens_in(max(self._streamed, self._whole))

    def bill(self, prompt: int, audio: int = 0) -> CallBill:
        """Return the bill of the call, with estimates where nothing was reported.

        ``prompt``: the estimated tokens of its request. ``audio``: the part of ``prompt`` that is audio.
        """
        is_counted = self._final and self._has_output
        if is_counted and self._has_input and self.reported is not None:  # most calls need no estimate
            return CallBill(self.reported, False)
        bill = self.bill_so_far(prompt, audio)
        if is_counted or self.text_tokens <= bill.usage.output:
            return bill
        return CallBill(replace(bill.usage, output=self.text_tokens), True)

    def bill_so_far(self, prompt: int, audio: int = 0) -> CallBill:
        """Return the bill in the middle of a stream.

        Text after the last report is not estimated: a later chunk may still report it.
        """
        usage, counts = self.reported, self._counts
        if usage is None or counts is None:
            usage = Usage(input=prompt, output=self.text_tokens, audio=audio, searches=self._searches)
            return CallBill(usage, True)
        if counts.lacks_input:
            return CallBill(replace(usage, input=prompt, audio=audio), True)
        return CallBill(usage, counts.is_undivided)


def usage_in(get: Any) -> Any:
    """Return the usage report of a response or an event. ``get``: its fields, as ``fields(...).get``."""
    report = get("usage_metadata")
    return get("usageMetadata") if report is None else report


class Taken(NamedTuple):
    """The usage of a model call, read from its events.

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
        self._closed = LruDict[_Key, _Closed](_CLOSED_KEPT)

    @property
    def prompt(self) -> int:
        """The tokens of all events so far, estimated."""
        return -(-self._history // UPPER)

    def pass_by(self, event: Any) -> None:
        """Take in an event that no model has made.

        It becomes part of the next prompt and completes what its author said before.
        """
        get = fields(event).get
        self._history += answer_size(get("content"))
        self._closed.pop(_key(get), None)

    def read(self, event: Any, *, is_answer: bool = False) -> Taken | None:
        """Return the usage of the model call that the event completes; None when it completes none.

        ``is_answer``: the event is known to be a model's answer, whether or not it reports usage.
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
                return None  # LiteLLM sends text and function calls in two events, and only the first one reports usage
            if closed.streamed and _closes_again(closed.billed, report):
                return self._again(key, closed._replace(calls=calls), event)
        call = CallUsage() if streamed is None else streamed
        call.add(event)
        bill = call.bill(prompt)
        self._closed[key] = _Closed(call, prompt, bill.usage, streamed is not None, calls)
        return Taken(*bill)

    def _read_chunk(self, key: _Key, event: Any, content: Any) -> Taken | None:
        closed = self._closed.pop(key, None)
        if closed is not None and key not in self._open and not answer_size(content):  # a report after its answer
            return self._again(key, closed, event)
        if len(self._open) < _OPEN_KEPT or key in self._open:
            self._open.setdefault(key, CallUsage()).add(event)
        return None

    def _again(self, key: _Key, closed: _Closed, event: Any) -> Taken | None:
        """Bill a call again after one more event; None when the bill stays the same."""
        closed.call.add(event)
        bill = closed.call.bill(closed.prompt)
        self._closed[key] = closed._replace(billed=bill.usage)
        return None if bill.usage == closed.billed else Taken(*bill, closed.billed)


def _key(get: Any) -> _Key:
    return get("author") or "", get("branch") or ""


def _calls_functions(content: Any) -> bool:
    parts = items(fields(content).get("parts"))
    return any(
        get("function_call") is not None or get("functionCall") is not None
        for get in (fields(part).get for part in parts)
    )


def _closes_again(before: Usage, report: Any) -> bool:
    """Return whether a report repeats the close of a stream that was already billed.

    ADK's older streaming closes a stream twice when a call follows text: same prompt, no chunk between.
    """
    counts = read_usage(report, [])
    after = None if counts is None else counts.usage()
    return after is not None and after.input == before.input and after.output >= before.output


# ---- The one reader of token usage: what a provider reports of a call, in our terms.

_NUMBERS: Final = frozenset({int, float})  # exact types: a bool is not a count, and neither is a mock
_WRONG: Final = frozenset({float, bool, str})  # meant as a count, but not valid as one
_COUNTS: Final = _WRONG | {int}
_ENTRIES: Final = 64  # of a list that are looked at
NO_INPUT: Final = "usage: no input tokens reported"

# A name in a report, and the figure of ``Counts`` that it gives; or the names inside of it.
_Names = tuple[tuple[str, "str | _Names"], ...]


class _Form:
    """The names that one kind of report uses. The first two of ``whole`` identify it."""

    def __init__(self, whole: _Names, parts: _Names, *, leaves_out_caches: bool = False) -> None:
        """``leaves_out_caches``: its input does."""
        self.whole = whole  # one of these that cannot be true spoils the report
        self.parts = parts  # one of these that cannot be true leaves the rest as they are
        self.leaves_out_caches = leaves_out_caches
        self.names = frozenset(name for name, _ in parts)


_CACHE: Final = (("cache_read_input_tokens", "cached"), ("cache_creation_input_tokens", "cache_write"))
_LIFETIMES: Final = (("ephemeral_1h_input_tokens", "cache_write_1h"),)
_SERVER_TOOLS: Final = ("server_tool_use", (("web_search_requests", "searches"),))
_OF_INPUT: Final = (
    ("cached_tokens", "cached"),
    ("audio_tokens", "audio"),
    ("cache_creation_tokens", "cache_write"),
    ("cache_write_tokens", "cache_write"),
    ("web_search_requests", "searches"),  # LiteLLM
    ("cache_creation_token_details", _LIFETIMES),  # LiteLLM
)
_OF_OUTPUT: Final = (
    ("reasoning_tokens", "thinking"),
    ("thinking_tokens", "thinking"),
    ("audio_tokens", "audio_output"),
)
# OpenAI's chat completions, LiteLLM, and many with the same names; LiteLLM adds Anthropic's names
_CHAT: Final = _Form(
    (("prompt_tokens", "input"), ("completion_tokens", "answer"), ("total_tokens", "total")),
    (*_CACHE, ("prompt_tokens_details", _OF_INPUT), _SERVER_TOOLS, ("completion_tokens_details", _OF_OUTPUT)),
)
_RESPONSES: Final = _Form(
    (("input_tokens", "input"), ("output_tokens", "answer"), ("total_tokens", "total")),
    (("input_tokens_details", _OF_INPUT), ("output_tokens_details", _OF_OUTPUT)),
)
_ANTHROPIC: Final = _Form(
    (("input_tokens", "input"), ("output_tokens", "answer"), *_CACHE),
    (("cache_creation", _LIFETIMES), _SERVER_TOOLS, ("output_tokens_details", _OF_OUTPUT)),
    leaves_out_caches=True,
)
# Microsoft's Agent Framework. It passes on Anthropic's input, and says so in names of its own.
_MICROSOFT: Final = _Form(
    (("input_token_count", "input"), ("output_token_count", "answer")),
    (
        ("cache_read_input_token_count", "cached"),
        ("cache_creation_input_token_count", "cache_write"),
        ("reasoning_output_token_count", "thinking"),
    ),
)
_FROM_ANTHROPIC: Final = ("anthropic.cache_read_input_tokens", "anthropic.cache_creation_input_tokens")
_OWN: Final = _Form((("input", "input"), ("output", "answer")), (("cached", "cached"),))
_OF_USAGE: Final = _Form(_OWN.whole, tuple((part.name, part.name) for part in dataclass_fields(Usage)[2:]))
_FORMS: Final = (_CHAT, _ANTHROPIC, _MICROSOFT, _OWN)
# Gemini, and ADK, which uses Gemini's names for every model. JSON has the same names in camel case.
_GEMINI: Final = (
    ("prompt_token_count", "input"),
    ("response_token_count", "answer"),  # of a live connection
    ("candidates_token_count", "answer"),
    ("total_token_count", "total"),
    ("thoughts_token_count", "thinking"),
    ("tool_use_prompt_token_count", "tools"),
)
_GEMINI_PARTS: Final = (("cached_content_token_count", "cached"), ("cache_creation_input_tokens", "cache_write"))
_GEMINI_NAMES: Final = (*(name for name, _ in _GEMINI), "cached_content_token_count")  # any of them identifies it
_GEMINI_KEYS: Final = frozenset(_GEMINI_NAMES)
_GEMINI_AUDIO: Final = (  # lists with a count for each kind of content
    ("prompt_tokens_details", "audio"),
    ("tool_use_prompt_tokens_details", "audio"),
    ("cache_tokens_details", "cached_audio"),
    ("candidates_tokens_details", "audio_output"),
    ("response_tokens_details", "audio_output"),
)


@cache
def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


@dataclass(slots=True)
class Counts:
    """The figures that were reported of one call. Zero means not reported.

    How each kind of token counts:

    - Tool-use prompt tokens belong to the input, as in google-genai's total.
    - Cached tokens and cache writes are parts of the input. Where they do not fit into it, they were reported beside it
      and are added.
    - Thinking belongs to the output. Some models report it within the answer, some beside it: the total shows which.
    - Audio tokens are counted apart, because they have prices of their own. Images and video count as the text around
      them; where a model charges more for them, its price for that whole direction is the higher one.
    - Web searches that the provider makes for the model are counted beside the tokens.
    """

    input: int = 0  # the whole prompt
    answer: int = 0  # candidates, completion
    beside: int = 0  # thinking that the answer may not include
    total: int = 0
    cached: int = 0
    cache_write: int = 0
    audio: int = 0
    cached_audio: int = 0
    audio_output: int = 0
    thinking: int = 0
    searches: int = 0
    cache_write_1h: int = 0
    tools: int = 0  # of input: what tools have answered

    def add(self, later: "Counts") -> bool:
        """Take in another report of the same call. Return True when a figure has grown.

        No figure falls: a last chunk of zeros takes nothing back.
        """
        changed = False
        for name in _FIGURES:
            if (figure := getattr(later, name)) > getattr(self, name):
                setattr(self, name, figure)
                changed = True
        return changed

    def usage(self) -> Usage:
        prompt, apart = self.input, self.cached + self.cache_write
        if apart > prompt:  # ADK 2.3 reports Anthropic's prompt without them
            prompt += apart
        output = self.total - prompt if self.total >= prompt + self.answer else self.answer + self.beside
        return Usage(
            prompt,
            output,
            self.cached,
            self.cache_write,
            self.audio,
            self.cached_audio,
            self.audio_output,
            self.thinking,
            self.searches,
            min(self.cache_write_1h, self.cache_write),
        )

    @property
    def is_undivided(self) -> bool:
        """Only a total is known. All of it counts as output, the most expensive that it can have been."""
        return not (self.input or self.answer or self.beside or self.cached or self.cache_write)

    @property
    def lacks_input(self) -> bool:
        """An answer was counted and its prompt was not."""
        return not (self.input or self.cached or self.cache_write) and not self.is_undivided

    @property
    def lacks_output(self) -> bool:
        """A prompt was counted and its answer was not, nor a total that includes it."""
        return not (self.answer or self.beside or self.total)


_FIGURES: Final = tuple(field.name for field in dataclass_fields(Counts))


def read_usage(report: Any, problems: list[str]) -> Counts | None:
    """Return the figures of a report; None when nothing was reported.

    Add a sentence to ``problems`` for every figure that cannot be true. Reports are recognised by the names of their
    fields, not by the class or the place they come from: proxies, gateways and recorded sessions use the same names.
    A report of zeros, and one without valid counts of tokens, count as not reported.
    """
    kind = type(report)
    if kind is int or kind is float:
        return total_of(report, problems)
    given = report if kind is dict else fields(report)
    get, before = given.get, len(problems)
    counts: Counts | None
    may_be_gemini = type(given) is not dict or not _GEMINI_KEYS.isdisjoint(given)
    if may_be_gemini and (type(get("prompt_token_count")) is int or _is_gemini(get)):
        counts = _gemini(get, problems)
    else:
        for form in _FORMS:
            if type(get(form.whole[0][0])) in _NUMBERS or type(get(form.whole[1][0])) in _NUMBERS:
                counts = _read(_OF_USAGE if kind is Usage else form, given, get, problems)
                break
        else:
            if not _is_gemini(in_camel := lambda name: get(_camel(name))):
                total = get("total_tokens")
                return total_of(total, problems) if type(total) in _NUMBERS else None
            counts = _gemini(in_camel, problems)
    if counts is None:
        return None
    if not (counts.input or counts.answer or counts.beside or counts.total or counts.cached or counts.cache_write):
        if len(problems) == before:
            problems.append("usage: zero tokens in and out, which means not reported")
        return None
    return counts


def total_of(tokens: Any, problems: list[str]) -> Counts | None:
    """Return counts with nothing but a total, for tokens of an unknown kind; None for zero or what is no count."""
    total = _count("tokens", tokens, problems)
    return Counts(total=total) if total else None


def _count(name: str, value: Any, problems: list[str]) -> int:
    if type(value) is int and 0 <= value <= MOST_TOKENS:
        return value
    if type(value) in _COUNTS:
        problems.append(f"{name}: not a count of tokens")
    return 0


def _is_gemini(get: Any) -> bool:
    for name in _GEMINI_NAMES:  # noqa: SIM110 - a generator costs a call for each name
        if type(get(name)) in _COUNTS:
            return True
    return False


def _read(form: _Form, given: Any, get: Any, problems: list[str]) -> Counts | None:
    """Read a report. ``get``: gives a figure of ``given`` by its name."""
    if form is _ANTHROPIC:
        if rounds := get("iterations"):
            return _rounds(items(rounds), problems)
        if get("input_tokens_details") is not None:
            form = _RESPONSES
    counts, before = Counts(), len(problems)
    _take(counts, get, form.whole, problems)
    if len(problems) > before:
        return None
    if type(given) is not dict or not form.names.isdisjoint(given):
        _take(counts, get, form.parts, problems)
    if form.leaves_out_caches or (form is _MICROSOFT and any(get(name) is not None for name in _FROM_ANTHROPIC)):
        counts.input += counts.cached + counts.cache_write
    return counts


def _take(counts: Counts, get: Any, names: "_Names", problems: list[str]) -> None:
    """Set the figures that a report gives. Zero and a figure that cannot be true change nothing."""
    for name, figure in names:
        value = get(name)
        if value is None:
            continue
        if isinstance(figure, tuple):
            _take(counts, fields(value).get, figure, problems)
        elif type(value) is int and 0 < value <= MOST_TOKENS:  # a call of ``_count`` costs more than this line
            setattr(counts, figure, value)
        else:
            _count(name, value, problems)


def _rounds(rounds: Any, problems: list[str]) -> Counts | None:
    """Add up the samplings of a message that Anthropic compacted on the way; None when one of them cannot be read.

    The figures beside the list leave some of them out.
    """
    whole = Counts()
    for report in rounds[:_ENTRIES]:
        of = fields(report).get
        counts = None if of("iterations") else _read(_ANTHROPIC, None, of, problems)
        if counts is None:
            return None
        for name in _FIGURES:
            setattr(whole, name, getattr(whole, name) + getattr(counts, name))
    return whole


def _gemini(get: Any, problems: list[str]) -> Counts | None:
    counts, before = Counts(), len(problems)
    _take(counts, get, _GEMINI, problems)
    if len(problems) > before:
        return None
    _take(counts, get, _GEMINI_PARTS, problems)
    counts.input, counts.beside = counts.input + counts.tools, counts.thinking
    for name, figure in _GEMINI_AUDIO:
        if details := get(name):
            setattr(counts, figure, getattr(counts, figure) + _audio(details, problems))
    return counts


def _audio(details: Any, problems: list[str]) -> int:
    audio = 0
    for detail in items(details)[:_ENTRIES]:
        of = fields(detail).get
        modality = of("modality")
        if isinstance(modality, str) and str.upper(modality) == "AUDIO":
            count = of("token_count")
            audio += _count("token_count", of("tokenCount") if count is None else count, problems)
    return audio


def checked_usage(usage: Usage | None) -> Usage | None:
    """Return the usage with only the figures that can be true; None when it reports neither input nor output."""
    if usage is None or (usage.is_possible and usage.cached + usage.cache_write <= usage.input > 0):  # the usual ones
        return usage
    counts = read_usage(usage, [])
    return None if counts is None else counts.usage()


def searches_in(grounding: Any) -> int:
    """Return the number of web searches in Gemini's grounding metadata."""
    get = fields(grounding).get
    return len(items(get("web_search_queries") or get("webSearchQueries"))[:_ENTRIES])


# ---- The cost that a provider, a gateway or the caller states in dollars.

_EXACT: Final = Context(prec=60)  # the host program may have changed its own
_DATA: Final = (int, float, Decimal, str, list, tuple, dict)  # anything else is a stand-in, which states nothing


def dollars(value: Any, name: str, problems: list[str]) -> Decimal | None:
    """Return an amount of USD; None for anything else.

    Add a sentence that begins with ``name`` to ``problems`` when the value was meant as an amount and is not valid.
    """
    usd = stated_usd(value)
    if usd is None and isinstance(value, _DATA):
        problems.append(f"{name}: not an amount of USD from 0 to a billion")
    return usd


def stated_cost(response: Any, usage: Any, problems: list[str]) -> Decimal | None:
    """Return the cost in USD that LiteLLM calculated or a gateway such as OpenRouter charged.

    None: no cost is stated, or not a valid one.
    """
    hidden = response.get("_hidden_params") if type(response) is dict else private(response, "_hidden_params")
    if hidden is not None and (cost := fields(hidden).get("response_cost")) is not None:
        return dollars(cost, "response_cost", problems)
    if usage is None:
        return None
    get = fields(usage).get
    cost = get("cost")
    if cost is None:
        return None
    if not isinstance(cost, int | float | Decimal | str):
        cost = fields(cost).get("total_cost")  # Perplexity gives a table
    charged = dollars(cost, "usage.cost", problems)
    if charged is not None and get("is_byok") is True:  # with the user's own key, the provider's bill comes on top
        beside = dollars(
            fields(get("cost_details")).get("upstream_inference_cost"), "upstream_inference_cost", problems
        )
        return None if beside is None else _EXACT.add(charged, beside)
    return charged


# ---- How large a prompt or an answer is, in bytes of text: media count as the text that would have as many tokens.

UPPER: Final = 3  # bytes of text per token when tokens are estimated high, for reservations
LIKELY: Final = CHARS_PER_TOKEN  # bytes of text per token in most answers, for what came back
_NODES: Final = 250_000
_ENOUGH: Final = 64_000_000  # bytes; assumed for anything that holds more values than that
_ENTRY: Final = 6  # quotes, colon and comma around a name and its value
_ITEM: Final = 2
_NUMBER: Final = 4
_FRACTION: Final = 12
_DECLARED: Final = 64  # for a function or a schema given as a class, and for each of its arguments or fields
IMAGE_TOKENS: Final = 1_600  # the most expensive of the usual tariffs for an image of common size
_AUDIO_BYTES: Final = 500  # per token: 32 tokens a second at a common rate of 16 kB a second
_VIDEO_BYTES: Final = 400
_DOCUMENT_BYTES: Final = 100
_DATA_URL: Final = 64  # a text this short counts as text even if it is a data URL

_MARKS: Final = frozenset({"data", "file_uri", "fileUri", "size_bytes", "sizeBytes"})
_IMAGES: Final = frozenset({"image_url", "input_image", "image"})
_FILES: Final = frozenset({"file", "input_file", "document"})
_MEDIA: Final = _IMAGES | _FILES
_SOUNDS: Final = frozenset({"wav", "mp3", "flac", "opus", "pcm16", "aac", "ogg", "m4a"})
_MIMES: Final = ("mime_type", "mimeType", "media_type", "mediaType", "format")


def text_size(text: str) -> int:
    """Return the size of a text in bytes of UTF-8.

    Other scripts take more bytes per character, and more tokens in the same proportion.
    """
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def size_of(value: Any) -> int:
    """Return the size of any value in bytes, as ``measure`` counts it."""
    return measure(value)[0]


def tokens_in(size: int) -> int:
    """Return the likely number of tokens in so many bytes that a model wrote."""
    return -(-size // LIKELY)


def answer_size(content: Any) -> int:
    """Return the bytes of a content of Gemini or ADK, as an object or as JSON, thinking and function calls included."""
    if type(content) is str:
        return text_size(content)
    size = 0
    for part in items(fields(content).get("parts")):
        get = fields(part).get
        if type(text := get("text")) is str:
            size += text_size(text)
        elif (call := get("function_call") or get("functionCall")) is not None:
            get = fields(call).get
            size += size_of(get("name")) + size_of(get("args"))
        elif (answer := get("function_response") or get("functionResponse")) is not None:
            get = fields(answer).get
            size += size_of(get("name")) + size_of(get("response"))
        else:
            size += size_of(part)
    return size


def measure(value: Any) -> tuple[int, int]:
    """Return the size of a value in bytes, and how many of its tokens are audio.

    A text takes the same short time however long it is, and numbers and texts are counted where they are held. No code
    of the values runs, and the work is bounded: linear in the text, and in the number of values up to ``_NODES``.
    """
    size = audio = nodes = 0
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind is dict:
            nodes += len(item)
            may_be_media = not _MARKS.isdisjoint(item) or (type(named := item.get("type")) is str and named in _MEDIA)
            if may_be_media and (media := _media_in(item)) is not None:
                tokens, audio_tokens, deeper = media
                size, audio = size + tokens * UPPER, audio + audio_tokens
                if not deeper:
                    continue
            for name, entry in item.items():
                if entry is not None:
                    size += len(name) + _ENTRY if type(name) is str else _ENTRY
                    kind = type(entry)
                    if kind is str and entry.isascii() and (len(entry) <= _DATA_URL or entry[:5] != "data:"):
                        size += len(entry)
                    elif kind is int or kind is bool:
                        size += _NUMBER
                    else:
                        pending.append(entry)
        elif kind is list or kind is tuple:
            nodes += len(item)
            if len(item) > 16 and type(item[0]) in _NUMBERS and (kinds := set(map(type, item))) <= _NUMBERS:
                size += len(item) * (_FRACTION if float in kinds else _NUMBER)
                nodes -= len(item)
            else:
                size += len(item) * _ITEM
                for entry in item:
                    if type(entry) is str and entry.isascii() and (len(entry) <= _DATA_URL or entry[:5] != "data:"):
                        size += len(entry)
                    elif entry is not None:
                        pending.append(entry)
        elif kind is str:
            if len(item) > _DATA_URL and item.startswith("data:"):
                mime = item[5:69].partition(",")[0].partition(";")[0]
                tokens, audio_tokens = media_tokens(mime, len(item) * 3 // 4)
                size, audio = size + tokens * UPPER, audio + audio_tokens
            else:
                size += len(item) if item.isascii() else len(item.encode("utf-8", "replace"))
        elif item is not None:
            size += _other(item, kind, pending)
            nodes += 1
        if nodes > _NODES:
            return max(size, _ENOUGH), audio
    return size, audio


def _itself(message: Any) -> list[Any]:
    return [message]


class GrowingPrompts:
    """Measures lists of messages that grow from call to call, each time only the new messages.

    A list counts as grown as long as it begins with the known messages: the same objects, or equal dicts where a
    framework writes them anew for every request. Objects can be changed in place, so each call measures the newest ones
    and one of the older ones in turn again, and the whole list if their size has changed. Not safe for threads: the
    worst that can happen is that a list is measured anew.
    """

    _known: "tuple[_Measured, ...]" = ()  # the newest last

    def measure(self, messages: Any, read: Callable[[Any], list[Any]] = _itself) -> tuple[int, int]:
        """Return the size in bytes and the audio tokens, as the function ``measure`` does.

        ``read``: returns what a message says, as values that ``measure`` can read. Always give the same function.
        """
        if type(messages) is not list or not _FEW <= len(messages) <= _MANY or type(messages[0]) in _NUMBERS:
            return measure(messages if read is _itself else [value for message in messages for value in read(message)])
        known = next((one for one in self._known if one.is_beginning_of(messages)), None)
        if known is None:
            known = _Measured()
            self._known = (*self._known[1 - _CONVERSATIONS :], known)
        elif known.has_changed(messages, read):
            known.forget()
        if len(known.messages) < len(messages):
            known.grow(messages, read)
        return known.size, known.audio


_FEW: Final = 8  # fewer messages are measured faster than looked up
_MANY: Final = 20_000
_CONVERSATIONS: Final = 2  # of one run


class _Measured:
    """A list of messages whose sizes are known."""

    __slots__ = ("_next", "_sizes", "audio", "messages", "size")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all messages."""
        self.messages: list[Any] = []
        self._sizes: list[tuple[int, int]] = []
        self._next = 0  # of the older messages, the one to measure again
        self.size = self.audio = 0

    def is_beginning_of(self, messages: list[Any]) -> bool:
        """Return whether a list begins with the known messages."""
        known, number = self.messages, len(self.messages)
        if number > len(messages):
            return False
        last = messages[number - 1]
        # Equal dicts say the same. Other objects are compared by their own code, which may say anything.
        if last is not known[-1] and (type(last) is not dict or type(known[-1]) is not dict):
            return False
        try:
            return bool(last == known[-1] and (messages if number == len(messages) else messages[:number]) == known)
        except Exception:  # a value in a message cannot be compared
            return False

    def has_changed(self, messages: list[Any], read: Callable[[Any], list[Any]]) -> bool:
        """Measure the two newest of the known messages and an older one again: return whether one has changed."""
        number, older = len(self.messages), self._next
        self._next = (older + 1) % number
        looked_at: list[Any] = []
        size = audio = 0
        for n in (number - 1, number - 2, older):
            looked_at += read(messages[n])
            size += self._sizes[n][0]
            audio += self._sizes[n][1]
        return measure(looked_at) != (size, audio)

    def grow(self, messages: list[Any], read: Callable[[Any], list[Any]]) -> None:
        """Measure the messages beyond the known ones and add them."""
        for message in messages[len(self.messages) :]:
            size, audio = measure(read(message))
            self.messages.append(message)
            self._sizes.append((size, audio))
            self.size, self.audio = self.size + size, self.audio + audio


def _other(item: Any, kind: type, pending: list[Any]) -> int:
    """Return the bytes of a value that is neither a plain text, list nor dict.

    What a container or an object holds is added to ``pending`` and measured later.
    """
    if kind is bool or kind is int:
        return _NUMBER
    if kind is float:
        return _FRACTION
    if issubclass(kind, str):
        return text_size(str.__getitem__(item, slice(None)))
    if issubclass(kind, (bytes, bytearray)):
        return len(item) * UPPER // _DOCUMENT_BYTES
    if issubclass(kind, (list, tuple, set, frozenset)):
        base: Any = next(base for base in (list, tuple, set, frozenset) if issubclass(kind, base))
        pending.append(list(base.__iter__(item)))
        return 0
    if issubclass(kind, (type, FunctionType, MethodType)):
        return _declaration(item)
    if kind.__module__.startswith("PIL."):
        return IMAGE_TOKENS * UPPER
    if kind.__module__ != "unittest.mock" and (held := attributes(item)):
        pending.append(held)
    return 0


def _declaration(item: Any) -> int:
    """Return the estimated bytes of the declaration that a library writes from a function or a class.

    A function is given as a tool, a class as a schema; the description and the annotations tell the size.
    """
    held: Any = getattr(item, "__annotations__", None)
    given: Any = getattr(item, "__doc__", None)
    return (len(given) if type(given) is str else 0) + _DECLARED * (1 + (len(held) if type(held) is dict else 0))


def _media_in(item: dict[Any, Any]) -> tuple[int, int, bool] | None:
    """Return the tokens and audio tokens of a part with media, and whether to measure the rest of the part as well.

    None: the part holds no media.
    """
    kind = item.get("type")
    if type(kind) is str:
        if kind in _IMAGES:
            return IMAGE_TOKENS, 0, False
        if kind in _FILES:
            return IMAGE_TOKENS, 0, True  # its length may be unknown
    if "file_uri" in item or "fileUri" in item:
        return IMAGE_TOKENS, 0, True
    mime = next((given for name in _MIMES if type(given := item.get(name)) is str), None)
    if mime is None:
        return None
    data = item.get("data")
    if type(data) is bytes:
        return (*media_tokens(mime, len(data)), False)
    if type(data) is str:
        return (
            (text_size(data) // UPPER + 1, 0, False)
            if mime.startswith("text/")
            else (*media_tokens(mime, len(data) * 3 // 4), False)
        )
    length = item.get("size_bytes", item.get("sizeBytes"))
    return (*media_tokens(mime, length), False) if type(length) is int and length >= 0 else None


def media_tokens(mime: str, length: int) -> tuple[int, int]:
    """Return the tokens of ``length`` bytes of media, and how many of them are audio."""
    if mime.startswith("audio/") or mime in _SOUNDS:
        return length // _AUDIO_BYTES + 1, length // _AUDIO_BYTES + 1
    if mime.startswith("image/"):
        return IMAGE_TOKENS, 0
    if mime.startswith("video/"):
        return length // _VIDEO_BYTES, 0
    if mime.startswith("text/"):
        return length // UPPER, 0
    return length // _DOCUMENT_BYTES, 0


# ---- Fields of any object by their names: of dicts, pydantic models, anything else.

_KINDS: Final = 512  # classes remembered
_NOTHING: Final[dict[str, Any]] = {}  # never written to
_ATOMS: Final = (
    str,
    bytes,
    bytearray,
    memoryview,
    int,
    float,
    complex,
    list,
    tuple,
    set,
    frozenset,
    type,
    FunctionType,
    MethodType,
    ModuleType,
    type(None),
)
_ways: dict[type, Callable[[Any], Any]] = {}


def fields(value: Any) -> Any:
    """Return something whose ``get(name)`` gives None for what is not there.

    Pydantic models keep their values in two plain dicts. Reading those takes a tenth of the time of ``getattr``, above
    all for a missing field. From any other object, each property is read when it is asked for.
    """
    kind = type(value)
    if kind is dict:
        return value
    way = _ways.get(kind)
    if way is _model:  # most of what is read, so it is read here and saves a call
        try:
            extra = value.__pydantic_extra__
        except AttributeError:  # made without its constructor
            extra = None
        # libraries keep there what a provider added to its API
        return {**value.__dict__, **extra} if extra else value.__dict__
    return (way or _learn(kind))(value)


def _learn(kind: type) -> Callable[[Any], Any]:
    """Find and remember how to read objects of a class; answers are of few classes."""
    way: Callable[[Any], Any]
    if issubclass(kind, _ATOMS):
        way = _empty
    elif issubclass(kind, dict):
        way = dict.copy  # a subclass may have a ``get`` of its own
    elif issubclass(kind, Mapping):
        way = dict
    elif _is_model(kind):
        way = _model
    else:
        way = AttributeReader
    if len(_ways) >= _KINDS:  # a program with so many classes makes them on the fly; none is worth keeping
        _ways.clear()
    _ways[kind] = way
    return way


def _is_model(kind: type) -> bool:
    return any("__pydantic_extra__" in vars(base) and "__pydantic_private__" in vars(base) for base in kind.__mro__)


def _empty(_: Any) -> dict[str, Any]:
    return _NOTHING


def _model(value: Any) -> Any:
    return fields(value)  # its class is known by now


class AttributeReader:
    """Reads attributes of an object whose class may run code of its own, which may fail."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, name: str) -> Any:
        try:
            return getattr(self._value, name, None)
        except Exception:
            return None


def private(value: Any, name: str) -> Any:
    """Return a private attribute of a pydantic object, or a field of any other object; None when it is missing."""
    # read from where pydantic keeps them: looking for one by its name is slow where there is none
    kept = AttributeReader(value).get("__pydantic_private__")
    return kept.get(name) if type(kept) is dict else fields(value).get(name)


def attributes(value: Any) -> dict[Any, Any]:
    """Return what an object holds, by name, without running any of its code.

    Safe for walking through arguments of the host program.
    """
    kind = type(value)
    if kind is dict:
        return value  # type: ignore[no-any-return]
    if issubclass(kind, dict):
        return dict.copy(value)
    if issubclass(kind, _ATOMS):
        return _NOTHING
    if (_ways.get(kind) or _learn(kind)) is _model:
        return fields(value)  # type: ignore[no-any-return]
    return {name: entry for name, entry in stored_attributes(value) if not name.startswith("_")}


def items(value: Any) -> Any:
    """Return a list or tuple as it is, and an empty tuple for anything else.

    The real class decides, which a mock cannot fake.
    """
    kind = type(value)
    return value if kind is list or kind is tuple or issubclass(kind, (list, tuple)) else ()


def name_of_tool(tool: Any) -> str:
    """Return the name of a tool that a request declares; "" where it has none, as those that providers execute."""
    of = fields(tool).get
    name = of("name") or fields(of("function")).get("name")
    return name if type(name) is str else ""
