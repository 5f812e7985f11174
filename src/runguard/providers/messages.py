"""What a request and an answer say: prompts, answers and tool results of any provider, read by their shape.

``calls/function_calls`` reads the requests and answers of guarded functions,
``providers/streams`` the pieces of an answer. The adapters take ``arguments`` and the names of ADK's own tools.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, NamedTuple

from runguard.pricing.rates import Usage
from runguard.providers.usage import (
    NO_INPUT,
    UPPER,
    Counts,
    attributes,
    dollars,
    fields,
    items,
    measure,
    read_usage,
    searches_in,
    size_of,
    stated_cost,
    text_size,
    total_of,
)

_log: Final = logging.getLogger("runguard")

# ---- What a call to a model asks for, read before anything is paid from the arguments of the function that makes it.

_MOST_TOKENS: Final = 10**12
_MOST_CANDIDATES: Final = 1_024
_REQUEST_DEPTH: Final = 3  # a request in a body in an argument
_TOOLS: Final = 1_024  # that are looked at
_ROUNDS: Final = 10  # requests that google-genai makes for one call by default


# What an argument says. A body holds such names itself. "Elsewhere" is something that the provider adds to the prompt.
_MODEL, _PROMPT, _LIMIT, _CANDIDATES, _BODY, _ELSEWHERE = range(6)

_REQUEST_NAMES: Final[dict[str, int]] = {
    **dict.fromkeys(("model", "model_name", "model_id"), _MODEL),
    **dict.fromkeys(
        (
            *("messages", "contents", "input", "prompt", "system", "instructions", "tools", "functions", "history"),
            *("system_instruction", "systemInstruction", "response_format", "response_schema", "responseSchema"),
            *("response_json_schema", "responseJsonSchema", "text_format", "question", "query", "message"),
            *("user_prompt", "system_prompt", "new_message"),
        ),
        _PROMPT,
    ),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens", "max_tokens_to_sample"),
        _LIMIT,
    ),
    **dict.fromkeys(("n", "best_of", "candidate_count", "candidateCount"), _CANDIDATES),
    **dict.fromkeys(
        (
            *("config", "generation_config", "generationConfig", "request", "llm_request"),
            *("body", "extra_body", "extra_args", "model_kwargs", "json", "payload"),
        ),
        _BODY,
    ),
    **dict.fromkeys(
        ("previous_response_id", "conversation", "cached_content", "cachedContent", "previous_interaction_id"),
        _ELSEWHERE,
    ),
}
# A lone first text is a model only if it looks like one: "hello" is a prompt.
_MODEL_NAME: Final = re.compile(
    r"(?:[\w.@-]+/)*(?:gpt|chatgpt|o\d|codex|claude|gemini|gemma|models|llama|mistral|mixtral|magistral|ministral|codestral|deepseek|qwen|grok|command|nova|kimi|glm|phi)"
    r"[\w.:@/-]*",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Request:
    """What is known of a call before it is made."""

    model: str = ""  # "": not reported
    input_tokens: int | None = None  # estimated high; None: nothing was recognised as a prompt
    max_output_tokens: int | None = None  # of all candidates together; None: no limit was given
    audio_tokens: int = 0  # of input_tokens
    candidates: int = 1  # answers asked for: without a limit of its own, each may reach the model's
    # the provider adds a conversation or a cache that it keeps, so the input is larger than what is seen
    unseen: bool = False
    kept: str = ""  # the name of what the provider adds, where the request says it
    conversation: str = ""  # the name of a conversation, to which the provider adds each answer
    rounds: int = 1  # requests that it may become: google-genai calls functions by itself and asks again
    answered: int = 0  # rounds of function calling that the contents already end with
    hides_rounds: bool = False  # the answer will not say how many rounds there were
    size: int = 0  # bytes of the prompt
    limit: int | None = None  # output tokens of one candidate


def read_request(
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    sizes: Callable[[Any], tuple[int, int]] = measure,
) -> Request:
    """Return what the arguments of a call ask for. Never raise: unreadable parts count as not reported.

    ``sizes``: measures a list of messages; a ``GrowingPrompts`` measures only the new ones.
    """
    request = Request()
    try:
        if kwargs:
            _take(request, kwargs, sizes, 0)
        for value in args:
            _take_positional(request, value, sizes)
    except Exception:
        _log.debug("runguard.unreadable: a part of a request could not be measured", exc_info=True)
        request.unseen = True
    if request.size:
        request.input_tokens = -(-request.size // UPPER)
    if request.limit is not None:
        request.max_output_tokens = request.limit * request.candidates
    if request.rounds > 1:
        request.answered = len(rounds_of(kwargs.get("contents")))
    return request


def read_options(held: Mapping[str, object]) -> Request:
    """Return what options ask for that a framework passes on as they are. No prompt is measured."""
    request = Request()
    _take(request, held, None, 0)
    return request


_Sizes = Callable[[Any], tuple[int, int]]


def _take(request: Request, held: Mapping[Any, Any], sizes: _Sizes | None, depth: int) -> None:
    """Take in every entry of ``held`` that has a known name, and those of a body inside it.

    ``sizes`` None: without prompts.
    """
    for name, value in held.items():
        if value is None or type(name) is not str or (what := _REQUEST_NAMES.get(name)) is None:
            continue
        if what == _PROMPT:
            if sizes is not None:
                size, audio = sizes(value) if type(value) is list else measure(value)
                request.size += size
                request.audio_tokens += audio
        elif what == _MODEL:
            if not request.model and type(value) is str and len(value) <= LONGEST_ID:
                request.model = value
        elif what == _LIMIT:
            if type(value) is int and 0 <= value <= _MOST_TOKENS:
                request.limit = value if request.limit is None else max(request.limit, value)
        elif what == _CANDIDATES:
            if type(value) is int and 1 < value <= _MOST_CANDIDATES:
                request.candidates = max(request.candidates, value)
        elif what == _ELSEWHERE:
            request.unseen = True
            kept = value if type(value) is str else attributes(value).get("id")
            if type(kept) is str and len(kept) <= LONGEST_ID:
                request.kept = request.kept or kept
                request.conversation = kept if name == "conversation" else request.conversation
        elif depth < _REQUEST_DEPTH:
            inner = attributes(value)
            _take(request, inner, sizes, depth + 1)
            if inner.get("tools"):
                _take_automatic(request, inner)


def _take_automatic(request: Request, config: dict[Any, Any]) -> None:
    """Note how many requests google-genai may make for one call.

    By default its client calls the functions among the tools and asks again.
    """
    tools = config["tools"]
    if not any(
        callable(tool) or hasattr(type(tool), "call_tool") for tool in (tools[:_TOOLS] if type(tools) is list else ())
    ):
        return
    given = attributes(config.get("automatic_function_calling", config.get("automaticFunctionCalling")))
    most = given.get("maximum_remote_calls", given.get("maximumRemoteCalls"))
    if not given.get("disable"):
        rounds = request.rounds = max(_ROUNDS if type(most) is not int else most, 1)
        hidden = given.get("ignore_call_history", given.get("ignoreCallHistory"))
        request.hides_rounds = bool(hidden) and rounds > 1


def _take_positional(request: Request, value: Any, sizes: _Sizes) -> None:
    kind = type(value)
    if kind is str:
        if not request.model and len(value) <= LONGEST_ID and _MODEL_NAME.fullmatch(value):
            request.model = value
            return
    elif kind is list or kind is tuple:
        if not value or type(value[0]) in (int, float, bool):
            return
    else:
        held, before = attributes(value), request.size
        _take(request, held, sizes, 0)
        if request.size != before or not ("parts" in held or "role" in held):  # not one message by itself
            return
    size, audio = sizes(value) if kind is list else measure(value)
    request.size += size
    request.audio_tokens += audio


# ---- The newest tool results in a request: what became of the tools that the model's last answer asked for.

_MESSAGES: Final = ("messages", "contents", "input", "message", "content", "prompt")
_BODIES: Final = ("request", "llm_request", "body", "json", "payload")
_NODES: Final = 512  # values of a request that are compared with the request before
_MESSAGES_COMPARED: Final = _NODES // 4
_ATOMS: Final = frozenset({str, bytes, int, float, bool, type(None)})
_MODEL_ROLES: Final = frozenset({"assistant", "model"})


class ToolResult(NamedTuple):
    """One result. ``tool`` is empty where the request does not name it."""

    tool: str
    value: object
    is_error: bool = False  # the request marks it as an error


def newest_results(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[ToolResult]:
    """Return the results after the model's last answer, in order; empty where the request shows none.

    They are recognised by their shapes: OpenAI (chat completions and responses), Anthropic, google-genai and LiteLLM,
    as objects or as plain JSON.
    """
    newest = next(rounds_of_turn(items(_messages(args, kwargs, 0))[-MAX_PARTS:]), None)
    if newest is None:
        return []
    names = {id_: tool for id_, tool, _ in newest.calls}
    return [result if result.tool else result._replace(tool=names.get(id_, "")) for id_, result in newest.results]


class Round(NamedTuple):
    """One answer of the model that called tools, and what came of those calls."""

    at: int  # the place of its first result among the messages
    calls: tuple[tuple[str, str, object], ...]  # id, tool, arguments; empty where the provider keeps the answer
    results: tuple[tuple[str, ToolResult], ...]  # id of the call, with its result


def rounds_of_turn(messages: object, clean: Callable[[str], str] | None = None) -> Iterator[Round]:
    """Yield the answers with tool calls since the last word of the user, the newest first.

    A conversation that ends with the user's word has none. ``clean`` takes the host program's own words out of a text:
    a message of which it leaves nothing is no word of the user. None: only the newest answer is of interest, and what
    the user says beside its results does not matter.
    """
    given, at = items(messages), 0
    calls: list[tuple[str, str, object]] = []
    results: list[tuple[str, ToolResult]] = []
    for index in range(len(given) - 1, -1, -1):
        of = fields(given[index]).get
        if of("role") not in _MODEL_ROLES and (found := _results_in(of, clean)):
            if calls:
                yield Round(at, tuple(reversed(calls)), tuple(reversed(results)))
                calls, results = [], []
            results += reversed(found)
            at = index
        elif results and (asked := _calls_in(given[index], of)):
            calls += reversed(asked)
        elif clean is None:
            if calls or of("role") in _MODEL_ROLES or (not results and text_in(of("type")).endswith("_call")):
                break
        elif of("role") == "user" and clean(_said(of)):
            break
    if results:
        yield Round(at, tuple(reversed(calls)), tuple(reversed(results)))


def _results_in(of: Any, clean: Callable[[str], str] | None) -> list[tuple[str, ToolResult]]:
    """Return the results in one message, each with the id of its call."""
    found: list[tuple[object, ToolResult]] = []
    if text_in(of("type")).endswith("_call_output"):
        found = [(of("call_id"), ToolResult("", of("output")))]
    elif of("role") in ("tool", "function") and of("content") is not None:
        found = [(of("tool_call_id"), ToolResult(text_in(of("name")), of("content")))]
    else:
        parts = items(of("parts")) or items(of("content"))
        for get in [fields(part).get for part in parts[:MAX_PARTS]] or [of]:  # or it is such a part itself
            if (response := get("function_response") or get("functionResponse")) is not None:
                held = fields(response).get
                found.append((held("id"), ToolResult(text_in(held("name")), held("response"))))
            elif get("type") == "tool_result":
                found.append((get("tool_use_id"), ToolResult("", get("content"), get("is_error") is True)))
    return [(text_in(key), result._replace(value=_plain(result.value, clean))) for key, result in found[:MAX_CALLS]]


def _calls_in(message: Any, of: Any) -> list[tuple[str, str, object]]:
    parts = Reading()
    if text_in(of("type")) in _ACTIONS:
        responses_item(of, parts)
    elif of("role") in _MODEL_ROLES:
        for call in items(of("tool_calls"))[:MAX_CALLS]:
            chat_call(fields(call).get, parts)
        if not parts.calls:
            gemini_parts(message, parts)
            _content(None, of, parts)
    return [(id_, tool, args) for id_, (tool, args) in zip(parts.ids, parts.calls, strict=True)]


def _said(of: Any) -> str:
    """Return the text of a message; what is no text, such as an image, counts as said."""
    content = of("content") if of("parts") is None else of("parts")
    if type(content) is str:
        return content
    texts = [fields(part).get("text") for part in items(content)]
    return "".join(text if type(text) is str else "[media]" for text in texts)


def _messages(args: tuple[object, ...], kwargs: Mapping[str, object], depth: int) -> Any:
    for name in _MESSAGES:
        if (value := kwargs.get(name)) is not None:
            return value if items(value) else (value,)
    if depth >= _REQUEST_DEPTH:
        return ()
    for value in (*args, *(kwargs.get(name) for name in _BODIES)):
        if items(value):
            return value
        held = attributes(value)
        if "function_response" in held or "functionResponse" in held or "role" in held:  # a message or a part by itself
            return (value,)
        if held and (inner := _messages((), held, depth + 1)):
            return inner
    return ()


def _plain(content: Any, clean: Callable[[str], str] | None) -> object:
    """Return a result as data, with the texts in blocks joined and JSON parsed."""
    texts = [fields(block).get("text") for block in items(content)[:MAX_PARTS]]
    if texts and all(type(text) is str for text in texts):
        content = "\n".join(texts)
    if clean is not None and type(content) is str:
        content = clean(content)
    return arguments(content) if type(content) is str and content[:1] in ("{", "[") else content


def text_in(value: Any) -> str:
    """Return a text as it is, and an empty one for anything else."""
    return value if type(value) is str else ""


def request_mark(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """Return a hash that is equal for two requests that say the same.

    None: there is nothing to compare, or it cannot be compared.
    """
    if not args and not kwargs:
        return None
    seen: list[object] = []
    level: list[Any] = [args, kwargs]
    while level:
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _ATOMS:
                seen.append(value)
            elif kind is list or kind is tuple:
                if len(value) > _MESSAGES_COMPARED and type(value[0]) is dict and len(value[0]) > 1:
                    return None  # each has two names and two values: these are too many
                seen.append(len(value))
                below += value
            elif kind is dict:
                seen += value or (kind,)  # its names
                below += value.values()
            elif held := attributes(value):
                seen += held  # its names
                below += held.values()
            elif callable(value):
                seen.append(id(value))
            else:
                return None
            if len(seen) + len(below) > _NODES:
                return None
        level = below
    return hash(tuple(seen))


# ---- What a complete answer of any provider says: its usage, the tools it requests, its text.

TEXT_CHARS: Final = 10_000  # of the text that is kept
MAX_CALLS: Final = 256
MAX_PARTS: Final = 1_024
MAX_ARGUMENTS: Final = 262_144  # characters of arguments that are parsed; longer ones stay text
LONGEST_ID: Final = 512  # no model has a longer name
_ANSWER_DEPTH: Final = 4  # {"response": {"response": ...}} is followed so far
# what the caller reports by itself
_OWN: Final = frozenset(
    {
        *("usd", "sig", "response", "results", "result"),
        *("tokens", "input_tokens", "output_tokens", "prompt_tokens", "completion_tokens"),
    }
)
_ONLY_OWN: Final = frozenset({"usd", "sig", "result"})
# every name that is looked for in a dict: one without any of them says nothing
_ANSWER_NAMES: Final = _OWN | {
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
    result: object | None = None  # the result of the step, according to the caller
    results: tuple[Result, ...] = ()  # and those of its tools: name, arguments, what came back
    problems: tuple[str, ...] = ()  # what the answer reports and cannot be true
    # The usage of requests that the client made by itself before the last one, whose usage is ``usage``; the newest
    # first. An input of 0 was not reported.
    earlier: tuple[Usage, ...] = ()
    counts: Counts | None = field(default=None, compare=False, repr=False)  # what ``usage`` was made of
    size: int = field(default=0, compare=False)  # bytes of all that was said; only where ``measures`` is set
    searches: int = field(default=0, compare=False)  # on the model's side, as its content shows them
    ids: tuple[str, ...] = field(default=(), compare=False)  # of the calls, "" where the provider gives none
    measures: bool = field(default=False, compare=False, repr=False)  # no output was reported

    @property
    def lacks_input(self) -> bool:
        """Whether the usage has output and no input."""
        return self.counts is not None and self.counts.lacks_input

    def say(self, text: Any, *, aloud: bool = True) -> None:
        """Add text of the answer. ``aloud=False``: it is thinking, which counts in the size and is not kept."""
        if type(text) is not str:
            return
        if self.measures:
            self.size += text_size(text)
        if aloud and len(self.text) < TEXT_CHARS:
            self.text += text[: TEXT_CHARS - len(self.text)]

    def call(self, name: Any, given: Any, id_: Any = None) -> None:
        if type(name) is not str or not name:
            return
        if self.measures:
            self.size += len(name) + size_of(given)
        if len(self.calls) < MAX_CALLS:
            self.calls += ((name, arguments(given)),)
            self.ids += (text_in(id_),)

    def beside(self, value: Any) -> None:
        """Count what was paid for and is not the answer, such as other choices."""
        if self.measures and value is not None:
            self.size += size_of(value)


_NOTHING_SAID: Final = Reading()  # shared, so nobody may change what ``read`` returns


def read(response: object, *, said: bool = True) -> Reading:
    """Read the result of a function. Never raise: unreadable parts count as not reported.

    ``said=False``: the caller has no use for the text and the calls of a chat completion that reports its usage.
    """
    if type(response) is dict:
        if _ANSWER_NAMES.isdisjoint(response):
            return _NOTHING_SAID
        if response.keys() <= _ONLY_OWN:  # nothing else to look for
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
    reading = Reading(None, model_of(get), usd=usd, measures=counts is None or counts.lacks_output)
    try:
        choices = None if said or reading.measures else get("choices")
        # the content of anything but a chat completion may show searches, which cost money
        if type(choices) is not list or not choices:
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
    for name in ("model", "model_version", "modelVersion"):
        if type(model := get(name)) is str and 0 < len(model) <= LONGEST_ID:
            return model
    return ""


def earlier_in(history: Any) -> tuple[Usage, ...]:
    """Return the usage of the requests before the last one in a history of google-genai, the newest first."""
    return tuple(Usage(output=tokens) for tokens in rounds_of(history))


def rounds_of(contents: Any) -> list[int]:
    """Return how many tokens the model said in each round of function calling at the end of Gemini's contents.

    The newest round comes first. google-genai calls functions by itself and asks again. Rounds before the last word of
    the user belong to earlier calls.
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


# ---- What was said and asked for.


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
    """Read one choice: of a chat completion, of a chunk (what it adds), or of the older completions (its text)."""
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
        parts.call(of("name"), of("arguments"), get("id"))
    elif (custom := get("custom")) is not None:
        of = fields(custom).get
        parts.call(of("name"), of("input"), get("id"))


def gemini_parts(content: Any, parts: Reading) -> None:
    for part in items(fields(content).get("parts"))[:MAX_PARTS]:
        of = fields(part).get
        if (text := of("text")) is not None:
            parts.say(text, aloud=of("thought") is not True)
        elif (call := of("function_call") or of("functionCall")) is not None:
            of = fields(call).get
            parts.call(of("name"), of("args"), of("id"))


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
        parts.call(kind.removesuffix("_call") if name is None else name, get(where), get("call_id"))
    elif kind == "web_search_call":
        parts.searches += is_search(get)
    elif kind == "reasoning":
        parts.beside([get("summary"), get("content")])


def is_search(get: Any) -> bool:
    """Return whether an item of OpenAI's responses is a web search. Opening a page it has found is not a search."""
    return get("type") == "web_search_call" and fields(get("action")).get("type") in (None, "search")


def anthropic_block(get: Any, parts: Reading) -> None:
    kind = get("type")
    if type(kind) is not str:
        return
    if kind == "text":
        parts.say(get("text"))
    elif kind == "tool_use":
        parts.call(get("name"), get("input"), get("id"))
    elif kind == "thinking":
        parts.say(get("thinking"), aloud=False)


def arguments(given: Any) -> object:
    """Parse arguments that are JSON; return others as they came, because a model may break off in the middle."""
    if given is None or given == "":
        return {}
    if type(given) is not str or len(given) > MAX_ARGUMENTS:
        return given
    try:
        return _parse(given)
    except (ValueError, RecursionError):
        return given


# ---- What the caller reports itself.


def _own_word(given: dict[Any, Any], reading: Reading, problems: list[str], depth: int, said: bool) -> None:
    """Take in what the caller reports in ``{"usd": 0.01, "sig": "search", "tokens": 900, "response": ...}``.

    It takes precedence over what the response says.
    """
    if (inner := given.get("response")) is not None and depth < _ANSWER_DEPTH:
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
    if not reading.calls:
        reading.calls, reading.ids = inner.calls, inner.ids
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
    """Read results given as triples, or as dicts with names of their own."""
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


# ---- ADK's own control tools. Their calls are neither progress nor repetition.

TRANSFER: Final = "transfer_to_agent"
FRAMEWORK_TOOLS: Final = frozenset({TRANSFER, "finish_task", "set_model_response", "exit_loop"})
REQUESTS: Final = "adk_request_"  # asks the user for a confirmation, an input or a sign-in


def step_name(tool: str, args: object) -> str:
    """Return the name under which a call is shown: that of the tool, or of the agent that a transfer hands over to."""
    agent = args.get("agent_name") if tool == TRANSFER and type(args) is dict else None
    return agent if type(agent) is str and agent else tool


def is_framework_tool(name: str) -> bool:
    return name in FRAMEWORK_TOOLS or name.startswith(REQUESTS)
