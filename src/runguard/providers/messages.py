"""Read a complete answer of any provider: its usage, the tools it requests, its text."""

import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from runguard.pricing.rates import Usage
from runguard.providers.fields import fields, items
from runguard.providers.sizes import UPPER, size_of, text_size
from runguard.providers.stated_cost import dollars, stated_cost
from runguard.providers.usage import NO_INPUT, Counts, read_usage, searches_in, total_of

TEXT_CHARS: Final = 10_000  # of the text that is kept
MAX_CALLS: Final = 256
MAX_PARTS: Final = 1_024
MAX_ARGUMENTS: Final = 262_144  # characters of arguments that are parsed; longer ones stay text
LONGEST_ID: Final = 512  # no model has a longer name
_NESTED: Final = 4  # {"response": {"response": ...}} is followed so far
_OWN: Final = frozenset(
    {
        "usd",
        "sig",
        "tokens",
        "input_tokens",
        "output_tokens",
        "prompt_tokens",
        "completion_tokens",
        "response",
        "results",
        "result",
    }
)
_PLAIN: Final = frozenset({"usd", "sig", "result"})
# every name that is looked for in a dict: one without any of them says nothing
_NAMES: Final = _OWN | {
    *("usage", "usage_metadata", "usageMetadata", "_hidden_params", "model", "model_version", "modelVersion"),
    *("choices", "candidates", "output", "content"),
}
_ACTIONS: Final = {
    # items of OpenAI's responses that the caller is to carry out, and where they say what to do; the rest OpenAI runs
    # by itself
    "function_call": "arguments",
    "custom_tool_call": "input",
    "computer_call": "action",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}

_parse: Final = json.JSONDecoder().decode

Call = tuple[str, object]
Result = tuple[str, object, object]


@dataclass(slots=True)
class Reading:
    """What an answer says. What it does not say is None or empty, never zero."""

    usage: Usage | None = None  # None: not reported
    model: str = ""  # "": not reported
    calls: tuple[Call, ...] = ()  # tools the model asks for: name, arguments (parsed; broken JSON as the text it is)
    text: str = ""  # what the model says aloud, thinking aside; its first TEXT_CHARS characters
    usd: Decimal | None = None  # only where someone stated it
    sig: object | None = None  # the caller's own name for this step
    result: object | None = None  # what the step came to, according to the caller
    results: tuple[Result, ...] = ()  # and of its tools: name, arguments, what came back
    problems: tuple[str, ...] = ()  # what was there and cannot be true
    # Requests that the client made by itself before the one that ``usage`` is of, the newest first; an input of 0 is
    # not reported.
    earlier: tuple[Usage, ...] = ()
    counts: Counts | None = field(default=None, compare=False, repr=False)  # what ``usage`` was made of
    size: int = field(default=0, compare=False)  # bytes of all that was said; only where ``measures`` is set
    searches: int = field(default=0, compare=False)  # on the model's side, as its content shows them
    measures: bool = field(default=False, compare=False, repr=False)  # no usage was reported

    @property
    def lacks_input(self) -> bool:
        """Whether the usage has output and no input."""
        return self.counts is not None and self.counts.lacks_input

    def say(self, text: Any, *, aloud: bool = True) -> None:
        if type(text) is not str:
            return
        if self.measures:
            self.size += text_size(text)
        if aloud and len(self.text) < TEXT_CHARS:
            self.text += text[: TEXT_CHARS - len(self.text)]

    def call(self, name: Any, given: Any) -> None:
        if type(name) is not str or not name:
            return
        if self.measures:
            self.size += len(name) + size_of(given)
        if len(self.calls) < MAX_CALLS:
            self.calls += ((name, arguments(given)),)

    def beside(self, value: Any) -> None:
        """What was paid for and is not the answer: other choices, for example."""
        if self.measures and value is not None:
            self.size += size_of(value)


def read(response: object, *, said: bool = True) -> Reading:
    """Read the result of a function. Never raises: unreadable parts count as not reported.

    ``said=False``: the caller has no use for the text and the calls of a chat completion that reports its usage.
    """
    if type(response) is dict:
        if _NAMES.isdisjoint(response):
            return Reading()
        if response.keys() <= _PLAIN:  # nothing else to look for
            problems: list[str] = []
            usd = dollars(response.get("usd"), "usd", problems)
            return Reading(usd=usd, sig=response.get("sig"), result=response.get("result"), problems=tuple(problems))
    try:
        return _read(response, 0, said)
    except Exception as error:
        return Reading(problems=(f"the response could not be read: {type(error).__name__}",))


def _read(response: Any, depth: int, said: bool = True) -> Reading:
    get = response.get if type(response) is dict else fields(response).get
    problems: list[str] = []
    counts: Counts | None = None
    usd: Decimal | None = None
    try:
        given = get("usage")
        if given is not None:
            counts = read_usage(given, problems)
        if counts is None and (other := get("usage_metadata") or get("usageMetadata")) is not None:
            counts = read_usage(other, problems)
        usd = stated_cost(response, given, problems)
    except Exception as error:
        problems.append(f"the usage could not be read: {type(error).__name__}")
        counts = None
    reading = Reading(None, model_of(get), usd=usd, measures=counts is None)
    try:
        choices = None if said or counts is None else get("choices")
        if type(choices) is not list or not choices:  # the content of others shows searches, which cost money
            _content(response, get, reading)
    except Exception as error:
        problems.append(f"the content could not be read: {type(error).__name__}")
    if counts is not None:
        if reading.searches > counts.searches:
            counts.searches = reading.searches
        _report(reading, counts, problems)
    if type(response) is dict:
        if not _OWN.isdisjoint(response):
            try:
                _own_word(response, reading, problems, depth, said)
            except Exception as error:
                problems.append(f"what the caller reported could not be read: {type(error).__name__}")
    elif history := items(get("automatic_function_calling_history")):
        reading.earlier = earlier_in(history)
    if problems:
        reading.problems = (*reading.problems, *problems)
    return reading


def _report(reading: Reading, counts: Counts, problems: list[str]) -> None:
    reading.usage, reading.counts = usage, _ = counts.usage(), counts
    if not usage.input and counts.lacks_input:
        problems.append(NO_INPUT)


def model_of(get: Any) -> str:
    if type(model := get("model")) is str and 0 < len(model) <= LONGEST_ID:
        return model
    for name in ("model_version", "modelVersion"):
        model = get(name)
        if type(model) is str and 0 < len(model) <= LONGEST_ID:
            return model
    return ""


def earlier_in(history: Any) -> tuple[Usage, ...]:
    """The requests before the last one in a history of google-genai."""
    return tuple(Usage(output=tokens) for tokens in rounds_of(history))


def rounds_of(contents: Any) -> list[int]:
    """The rounds of function calling that contents of Gemini end with, the newest first: tokens of what the model
    said in each.

    google-genai calls functions by itself and asks again. Further back than the last word of the user, the rounds
    are of earlier calls.
    """
    rounds: list[int] = []
    for content in reversed(items(contents)[-MAX_PARTS:]):
        of = fields(content).get
        if of("role") == "model":
            if rounds:
                rounds[-1] += -(-size_of(content) // UPPER)
        elif any(
            fields(part).get("function_response") or fields(part).get("functionResponse")
            for part in items(of("parts"))[:MAX_PARTS]
        ):
            rounds.append(0)
        else:
            break
    return rounds


# ---- what was said and asked for ------------------------------------------------------------------------------------


def _content(response: Any, get: Any, parts: Reading) -> None:
    if (found := get("choices")) and (choices := items(found)):
        _choice(fields(choices[0]).get, parts)
        if len(choices) > 1:
            parts.beside(choices[1:])
    elif (found := get("candidates")) and (candidates := items(found)):
        of = fields(candidates[0]).get
        gemini_parts(of("content"), parts)
        if (grounding := of("grounding_metadata") or of("groundingMetadata")) is not None:
            parts.searches = searches_in(grounding)
        parts.beside(candidates[1:])
    elif (found := get("output")) and (output := items(found)):
        for item in output[:MAX_PARTS]:
            responses_item(fields(item).get, parts)
    elif (content := get("content")) is not None:
        if blocks := items(content):
            for block in blocks[:MAX_PARTS]:
                anthropic_block(fields(block).get, parts)
        elif type(content) is str:
            parts.say(content)
        else:
            gemini_parts(content, parts)
    elif type(response) is str:
        parts.say(response)


def _choice(get: Any, parts: Reading) -> None:
    """One choice of a chat completion; of a chunk, what it adds; of the older completions, its text."""
    message = get("message")
    of = fields(get("delta") if message is None else message).get
    content = of("content")
    if (thoughts := of("reasoning_content")) is not None:
        parts.say(thoughts, aloud=False)
    if type(content) is str:
        parts.say(content)
    elif content is None:
        parts.say(of("refusal"))
        parts.say(get("text"))
    else:
        for part in items(content)[:MAX_PARTS]:
            parts.say(fields(part).get("text"))
    if asked := of("tool_calls"):
        for call in items(asked)[:MAX_CALLS]:
            chat_call(fields(call).get, parts)
    if (older := of("function_call")) is not None:
        of = fields(older).get
        parts.call(of("name"), of("arguments"))


def chat_call(get: Any, parts: Reading) -> None:
    function = get("function")
    if function is not None:
        of = fields(function).get
        parts.call(of("name"), of("arguments"))
    elif (custom := get("custom")) is not None:
        of = fields(custom).get
        parts.call(of("name"), of("input"))


def gemini_parts(content: Any, parts: Reading) -> None:
    for part in items(fields(content).get("parts"))[:MAX_PARTS]:
        of = fields(part).get
        if (text := of("text")) is not None:
            parts.say(text, aloud=of("thought") is not True)
        elif (call := of("function_call") or of("functionCall")) is not None:
            of = fields(call).get
            parts.call(of("name"), of("args"))


def responses_item(get: Any, parts: Reading) -> None:
    kind = get("type")
    if type(kind) is not str:
        return
    if kind == "message":
        for part in items(get("content"))[:MAX_PARTS]:
            of = fields(part).get
            text = of("text")
            parts.say(of("refusal") if text is None else text)
    elif (where := _ACTIONS.get(kind)) is not None:
        name = get("name")
        parts.call(kind.removesuffix("_call") if name is None else name, get(where))
    elif kind == "web_search_call":
        parts.searches += is_search(get)
    elif kind == "reasoning":
        parts.beside([get("summary"), get("content")])


def is_search(get: Any) -> bool:
    """Whether an item of OpenAI's responses is a web search. Opening a page it has found is not a search."""
    return get("type") == "web_search_call" and fields(get("action")).get("type") in (None, "search")


def anthropic_block(get: Any, parts: Reading) -> None:
    kind = get("type")
    if type(kind) is not str:
        return
    if kind == "text":
        parts.say(get("text"))
    elif kind == "tool_use":
        parts.call(get("name"), get("input"))
    elif kind == "thinking":
        parts.say(get("thinking"), aloud=False)


def arguments(given: Any) -> object:
    """Parsed if they are JSON, and otherwise as they came: a model may break off in the middle."""
    if given is None or given == "":
        return {}
    if type(given) is not str or len(given) > MAX_ARGUMENTS:
        return given
    try:
        return _parse(given)
    except (ValueError, RecursionError):
        return given


# ---- what the caller reports itself ---------------------------------------------------------------------------------


def _own_word(given: dict[Any, Any], reading: Reading, problems: list[str], depth: int, said: bool) -> None:
    """What the caller reports in ``{"usd": 0.01, "sig": "search", "tokens": 900, "response": ...}``. It takes
    precedence over what the response says.
    """
    if (inner := given.get("response")) is not None and depth < _NESTED:
        _fill(reading, _read(inner, depth + 1, said))
    counts = read_usage(given, problems)
    if counts is None and (tokens := given.get("tokens")) is not None:
        counts = _tokens(tokens, problems)
    if counts is not None:
        _report(reading, counts, problems)
    usd = dollars(given.get("usd"), "usd", problems)
    reading.usd = reading.usd if usd is None else usd
    sig = given.get("sig")
    reading.sig = reading.sig if sig is None else sig
    result = given.get("result")
    reading.result = reading.result if result is None else result
    if results := _results(given.get("results"), problems):
        reading.results = results


def _fill(reading: Reading, inner: Reading) -> None:
    if reading.usage is None:
        reading.usage, reading.counts, reading.size = inner.usage, inner.counts, max(reading.size, inner.size)
    reading.usd = inner.usd if reading.usd is None else reading.usd
    reading.sig = inner.sig
    reading.model = reading.model or inner.model
    reading.calls = reading.calls or inner.calls
    reading.text = reading.text or inner.text
    reading.result, reading.results, reading.problems, reading.earlier = (
        inner.result,
        inner.results,
        inner.problems,
        inner.earlier,
    )


def _tokens(given: Any, problems: list[str]) -> Counts | None:
    if len(pair := items(given)) == 2:
        return read_usage({"input_tokens": pair[0], "output_tokens": pair[1]}, problems)
    return total_of(given, problems) if type(given) in (int, float) else read_usage(given, problems)


def _results(given: Any, problems: list[str]) -> tuple[Result, ...]:
    """Triples, or dicts with names of their own."""
    found: list[Result] = []
    for entry in items(given)[:MAX_CALLS]:
        if (result := _result(entry)) is not None:
            found.append(result)
        else:
            problems.append("results: an entry names no tool")
            break
    return tuple(found)


def _result(entry: Any) -> Result | None:
    if triple := items(entry):
        return (triple[0], triple[1], triple[2]) if len(triple) == 3 and type(triple[0]) is str else None
    get = fields(entry).get
    name = next((named for key in ("name", "tool") if type(named := get(key)) is str), None)
    if name is None:
        return None
    args = next((found for key in ("args", "arguments", "input") if (found := get(key)) is not None), None)
    return (
        name,
        args,
        next((found for key in ("result", "response", "output", "content") if (found := get(key)) is not None), None),
    )
