"""What a call to a model asks for, read from the arguments of the function that makes it: before anything is paid."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from runguard.providers.fields import attributes
from runguard.providers.responses import LONGEST_ID, rounds_of
from runguard.providers.sizes import UPPER, measure

_log: Final = logging.getLogger("runguard")
_MOST_TOKENS: Final = 10**12
_MOST_CANDIDATES: Final = 1_024
_NESTED: Final = 3  # a request in a body in an argument
_TOOLS: Final = 1_024  # that are looked at
_ROUNDS: Final = 10  # requests that google-genai makes for one call by default


class _Is(Enum):
    MODEL = auto()
    PROMPT = auto()
    LIMIT = auto()
    CANDIDATES = auto()
    BODY = auto()  # holds such names itself
    ELSEWHERE = auto()  # names something that the provider adds to the prompt


# Members bound once: looking one up on its enum costs as much as the rest of a line.
_MODEL, _PROMPT, _LIMIT, _CANDIDATES, _BODY, _ELSEWHERE = _Is

_NAMES: Final[dict[str, _Is]] = {
    **dict.fromkeys(("model", "model_name", "model_id"), _MODEL),
    **dict.fromkeys(
        (
            *("messages", "contents", "input", "prompt", "system", "instructions", "tools", "functions"),
            *(
                "system_instruction",
                "systemInstruction",
                "response_format",
                "response_schema",
                "responseSchema",
                "response_json_schema",
            ),
            *(
                "responseJsonSchema",
                "text_format",
                "history",
                "question",
                "query",
                "message",
                "user_prompt",
                "system_prompt",
                "new_message",
            ),
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
            "config",
            "generation_config",
            "generationConfig",
            "request",
            "llm_request",
            "body",
            "extra_body",
            "json",
            "payload",
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
    rounds: int = 1  # requests that it may become: google-genai calls functions by itself and asks again
    answered: int = 0  # rounds of function calling that the contents end with already
    hides_rounds: bool = False  # and the answer will not say how many there were
    size: int = 0  # bytes of the prompt
    limit: int | None = None  # output tokens of one candidate


def _take(request: Request, entries: Iterable[tuple[Any, Any]], depth: int) -> None:
    for name, value in entries:
        if value is None or type(name) is not str or (what := _NAMES.get(name)) is None:
            continue
        if what is _PROMPT:
            size, audio = measure(value)
            request.size += size
            request.audio_tokens += audio
        elif what is _MODEL:
            if not request.model and type(value) is str and len(value) <= LONGEST_ID:
                request.model = value
        elif what is _LIMIT:
            if type(value) is int and 0 <= value <= _MOST_TOKENS:
                request.limit = value if request.limit is None else max(request.limit, value)
        elif what is _CANDIDATES:
            if type(value) is int and 1 < value <= _MOST_CANDIDATES:
                request.candidates = max(request.candidates, value)
        elif what is _ELSEWHERE:
            request.unseen = True
        elif depth < _NESTED:
            held = attributes(value)
            _take(request, held.items(), depth + 1)
            if held.get("tools"):
                _take_automatic(request, held)


def _take_automatic(request: Request, config: dict[Any, Any]) -> None:
    """Functions among the tools of google-genai: by default the client calls them and asks again."""
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


def _take_positional(request: Request, value: Any) -> None:
    kind = type(value)
    if kind is str:
        if not request.model and len(value) <= LONGEST_ID and _MODEL_NAME.fullmatch(value):
            request.model = value
        else:
            _take(request, (("prompt", value),), 0)
    elif kind is list or kind is tuple:
        if value and type(value[0]) not in (int, float, bool):
            _take(request, (("prompt", value),), 0)
    elif held := attributes(value):
        before = request.size
        _take(request, held.items(), 0)
        if request.size == before and ("parts" in held or "role" in held):  # one message by itself
            _take(request, (("prompt", value),), 0)


def read_request(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Request:
    """Never raises: unreadable parts count as not reported."""
    request = Request()
    try:
        _take(request, kwargs.items(), 0)
        for value in args:
            _take_positional(request, value)
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
