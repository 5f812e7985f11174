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


_NAMES: Final[dict[str, _Is]] = {
    **dict.fromkeys(("model", "model_name", "model_id"), _Is.MODEL),
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
        _Is.PROMPT,
    ),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens", "max_tokens_to_sample"),
        _Is.LIMIT,
    ),
    **dict.fromkeys(("n", "best_of", "candidate_count", "candidateCount"), _Is.CANDIDATES),
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
        _Is.BODY,
    ),
    **dict.fromkeys(
        ("previous_response_id", "conversation", "cached_content", "cachedContent", "previous_interaction_id"),
        _Is.ELSEWHERE,
    ),
}
# A lone first text is a model only if it looks like one: "hello" is a prompt.
_MODEL: Final = re.compile(
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


class _Reader:
    __slots__ = ("limit", "request", "size")

    def __init__(self) -> None:
        self.request = Request()
        self.size = 0  # bytes of the prompt
        self.limit: int | None = None  # output tokens of one candidate

    def take(self, entries: Iterable[tuple[Any, Any]], depth: int) -> None:
        for name, value in entries:
            if value is None or type(name) is not str or (what := _NAMES.get(name)) is None:
                continue
            if what is _Is.PROMPT:
                self.prompt(value)
            elif what is _Is.MODEL:
                if not self.request.model and type(value) is str and len(value) <= LONGEST_ID:
                    self.request.model = value
            elif what is _Is.LIMIT:
                if type(value) is int and 0 <= value <= _MOST_TOKENS:
                    self.limit = value if self.limit is None else max(self.limit, value)
            elif what is _Is.CANDIDATES:
                if type(value) is int and 1 < value <= _MOST_CANDIDATES:
                    self.request.candidates = max(self.request.candidates, value)
            elif what is _Is.ELSEWHERE:
                self.request.unseen = True
            elif depth < _NESTED:
                held = attributes(value)
                self.take(held.items(), depth + 1)
                if held.get("tools"):
                    self.automatic(held)

    def automatic(self, config: dict[Any, Any]) -> None:
        """Functions among the tools of google-genai: by default the client calls them and asks again."""
        tools = config["tools"]
        if not any(
            callable(tool) or hasattr(type(tool), "call_tool")
            for tool in (tools[:_TOOLS] if type(tools) is list else ())
        ):
            return
        given = attributes(config.get("automatic_function_calling", config.get("automaticFunctionCalling")))
        most = given.get("maximum_remote_calls", given.get("maximumRemoteCalls"))
        if not given.get("disable"):
            rounds = self.request.rounds = max(_ROUNDS if type(most) is not int else most, 1)
            hidden = given.get("ignore_call_history", given.get("ignoreCallHistory"))
            self.request.hides_rounds = bool(hidden) and rounds > 1

    def prompt(self, value: Any) -> None:
        size, audio = measure(value)
        self.size += size
        self.request.audio_tokens += audio

    def positional(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            if not self.request.model and len(value) <= LONGEST_ID and _MODEL.fullmatch(value):
                self.request.model = value
            else:
                self.prompt(value)
        elif kind is list or kind is tuple:
            if value and type(value[0]) not in (int, float, bool):
                self.prompt(value)
        elif held := attributes(value):
            before = self.size
            self.take(held.items(), 0)
            if self.size == before and ("parts" in held or "role" in held):  # one message by itself
                self.prompt(value)


def read_request(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Request:
    """Never raises: unreadable parts count as not reported."""
    reader = _Reader()
    request = reader.request
    try:
        reader.take(kwargs.items(), 0)
        for value in args:
            reader.positional(value)
    except Exception:
        _log.debug("runguard.unreadable: a part of a request could not be measured", exc_info=True)
        request.unseen = True
    request.input_tokens = -(-reader.size // UPPER) if reader.size else None
    request.max_output_tokens = None if reader.limit is None else reader.limit * request.candidates
    if request.rounds > 1:
        request.answered = len(rounds_of(kwargs.get("contents")))
    return request
