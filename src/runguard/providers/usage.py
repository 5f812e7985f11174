"""The one reader of token usage: what a provider reports of a call, in our terms.

Reports are recognised by the names of their fields, not by the class or the place they come from: proxies, gateways and
recorded sessions use the same names. How each kind of token counts is decided here, once:

- **Tool-use prompt tokens** belong to the input, as in google-genai's total.
- **Cached tokens and cache writes** are parts of the input. Where they do not fit into it, they were reported beside it
  and are added.
- **Thinking** belongs to the output. Some models report it within the answer, some beside it: the total shows which.
- **Audio tokens** are counted apart, because they have prices of their own. **Images and video** count as the text
  around them; where a model charges more for them, its price for that whole direction is the higher one.
- **Web searches** that the provider makes for the model are counted beside the tokens.
- **Only zeros** mean that nothing was reported. So does a figure that is not a count of tokens.
"""

from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Final

from runguard.pricing.rates import Usage
from runguard.providers.fields import fields, items

_NUMBERS: Final = frozenset({int, float})  # exact types: a bool is not a count, and neither is a mock
_WRONG: Final = frozenset({float, bool, str})  # meant as a count, and not one
_COUNTS: Final = _WRONG | {int}
_MOST: Final = 10**12  # tokens of one call; more is a fault of the counter
_ENTRIES: Final = 64  # of a list that are looked at
NO_INPUT: Final = "usage: no input tokens reported"

_SNAKE: Final = (
    "prompt_token_count",
    "candidates_token_count",
    "total_token_count",
    "tool_use_prompt_token_count",
    "thoughts_token_count",
    "response_token_count",
    "cached_content_token_count",
    "cache_creation_input_tokens",
    "prompt_tokens_details",
    "tool_use_prompt_tokens_details",
    "cache_tokens_details",
    "candidates_tokens_details",
    "response_tokens_details",
)
_TELLING: Final = 7  # how many of them say that this is a report of Gemini or ADK: the next is Anthropic's name

_CACHE: Final = (("cache_read_input_tokens", "cached"), ("cache_creation_input_tokens", "cache_write"))
_OF_INPUT: Final = (
    ("cached_tokens", "cached"),
    ("audio_tokens", "audio"),
    ("cache_creation_tokens", "cache_write"),
    ("cache_write_tokens", "cache_write"),
    ("web_search_requests", "searches"),  # LiteLLM
)
_SERVER_TOOLS: Final = (("web_search_requests", "searches"),)
_OF_OUTPUT: Final = (
    ("reasoning_tokens", "thinking"),
    ("thinking_tokens", "thinking"),
    ("audio_tokens", "audio_output"),
)

_CHAT_DETAILS: Final = frozenset(
    {*dict(_CACHE), "prompt_tokens_details", "server_tool_use", "completion_tokens_details"}
)  # of a chat completion's usage


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


_CAMEL: Final = tuple(_camel(name) for name in _SNAKE)
_SNAKE_TELLING: Final = frozenset(_SNAKE[:_TELLING])


@dataclass(slots=True)
class Counts:
    """The figures that were reported of one call. Zero: not reported."""

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

    def add(self, later: "Counts") -> bool:
        """Take in another report of the same call.

        No figure falls: a last chunk of zeros takes nothing back. True: something is new.
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
        )

    @property
    def is_undivided(self) -> bool:
        """Only a total is known. All of it counts as output, the most expensive that it can have been."""
        return not (self.input or self.answer or self.beside or self.cached or self.cache_write)

    @property
    def lacks_input(self) -> bool:
        """An answer was counted and its prompt was not."""
        return not (self.input or self.cached or self.cache_write) and not self.is_undivided

    @classmethod
    def of(cls, usage: Usage) -> "Counts":
        parts = (usage.cached, usage.cache_write, usage.audio, usage.cached_audio, usage.audio_output, usage.thinking)
        return cls(usage.input, usage.output, 0, 0, *parts, usage.searches)


_FIGURES: Final = tuple(field.name for field in dataclass_fields(Counts))


def read_usage(report: Any, problems: list[str]) -> Counts | None:
    """None: nothing was reported. What cannot be true goes to ``problems``."""
    kind = type(report)
    if kind is Usage:
        return Counts.of(report)
    if kind is int or kind is float:
        return total_of(report, problems)
    given = report if kind is dict else fields(report)
    get, before = given.get, len(problems)
    if (type(given) is not dict or not _SNAKE_TELLING.isdisjoint(given)) and _has_counts(get, _SNAKE):
        counts = _gemini(get, _SNAKE, problems)
    elif type(get("prompt_tokens")) in _NUMBERS or type(get("completion_tokens")) in _NUMBERS:
        counts = _chat(given, problems)
    elif type(get("input_tokens")) in _NUMBERS or type(get("output_tokens")) in _NUMBERS:
        counts = _split(get, problems)
    elif _has_counts(get, _CAMEL):
        counts = _gemini(get, _CAMEL, problems)
    elif type(get("input")) in _NUMBERS or type(get("output")) in _NUMBERS:
        counts = _plain(get, problems)
    elif type(get("total_tokens")) in _NUMBERS:
        return total_of(get("total_tokens"), problems)
    else:
        return None
    if counts is None:
        return None
    if not (counts.input or counts.answer or counts.beside or counts.total or counts.cached or counts.cache_write):
        if len(problems) == before:
            problems.append("usage: zero tokens in and out, which means not reported")
        return None
    return counts


def total_of(tokens: Any, problems: list[str]) -> Counts | None:
    """Tokens of an unknown kind."""
    total = _count({"tokens": tokens}.get, "tokens", problems)
    return Counts(total=total) if total else None


def _count(get: Any, name: str, problems: list[str]) -> int:
    value = get(name)
    if value is None:
        return 0
    if type(value) is int and 0 <= value <= _MOST:
        return value
    if type(value) in _COUNTS:
        problems.append(f"{name}: not a count of tokens")
    return 0


def _parts(counts: Counts, report: Any, names: tuple[tuple[str, str], ...], problems: list[str]) -> None:
    """Figures that are parts of others. Most are missing or zero, and a broken one leaves the rest."""
    get = fields(report).get
    for name, part in names:
        if count := _count(get, name, problems):
            setattr(counts, part, count)


def _chat(given: Any, problems: list[str]) -> Counts | None:
    """OpenAI's chat completions, LiteLLM, and all with the same names: the prompt includes what was cached."""
    get = given.get
    asked, answered, whole = get("prompt_tokens"), get("completion_tokens"), get("total_tokens")
    if not (
        type(asked) is type(answered) is type(whole) is int
        and 0 <= asked <= _MOST
        and 0 < answered <= _MOST
        and 0 <= whole <= _MOST
    ):  # something is missing, zero or strange
        before = len(problems)
        asked, answered = _count(get, "prompt_tokens", problems), _count(get, "completion_tokens", problems)
        whole = _count(get, "total_tokens", problems)
        if len(problems) > before:
            return None
    counts = Counts(asked, answered, 0, whole)
    if type(given) is dict and _CHAT_DETAILS.isdisjoint(given):
        return counts
    # LiteLLM, of Anthropic
    if get("cache_read_input_tokens") is not None or get("cache_creation_input_tokens") is not None:
        _parts(counts, {name: get(name) for name, _ in _CACHE}, _CACHE, problems)
    if (details := get("prompt_tokens_details")) is not None:
        _parts(counts, details, _OF_INPUT, problems)
    if (tools := get("server_tool_use")) is not None:
        _parts(counts, tools, _SERVER_TOOLS, problems)
    if (details := get("completion_tokens_details")) is not None:
        _parts(counts, details, _OF_OUTPUT, problems)
    return counts


def _split(get: Any, problems: list[str]) -> Counts | None:
    """Input and output by these names: OpenAI's responses, which say what of the input was cached; or Anthropic's."""
    if (details := get("input_tokens_details")) is None:
        return _anthropic(get, problems)
    before = len(problems)
    counts = Counts(
        _count(get, "input_tokens", problems),
        _count(get, "output_tokens", problems),
        total=_count(get, "total_tokens", problems),
    )
    if len(problems) > before:
        return None
    _parts(counts, details, _OF_INPUT, problems)
    if (details := get("output_tokens_details")) is not None:
        _parts(counts, details, _OF_OUTPUT, problems)
    return counts


def _anthropic(get: Any, problems: list[str]) -> Counts | None:
    """The input leaves out what was read from a cache and what was written to one."""
    if rounds := get("iterations"):
        return _rounds(items(rounds), problems)
    before = len(problems)
    tokens, output = _count(get, "input_tokens", problems), _count(get, "output_tokens", problems)
    cached, write = (
        _count(get, "cache_read_input_tokens", problems),
        _count(get, "cache_creation_input_tokens", problems),
    )
    if len(problems) > before:
        return None
    counts = Counts(tokens + cached + write, output, cached=cached, cache_write=write)
    if (tools := get("server_tool_use")) is not None:
        _parts(counts, tools, _SERVER_TOOLS, problems)
    if (details := get("output_tokens_details")) is not None:
        _parts(counts, details, _OF_OUTPUT, problems)
    return counts


def _rounds(rounds: Any, problems: list[str]) -> Counts | None:
    """A message that Anthropic compacted on the way was sampled several times; the figures beside the list leave some
    of that out.
    """
    whole = Counts()
    for report in rounds[:_ENTRIES]:
        of = fields(report).get
        counts = None if of("iterations") else _anthropic(of, problems)
        if counts is None:
            return None
        for name in _FIGURES:
            setattr(whole, name, getattr(whole, name) + getattr(counts, name))
    return whole


def _has_counts(get: Any, names: tuple[str, ...]) -> bool:
    """Whether a report has one of Gemini's names."""
    for name in names[:_TELLING]:  # noqa: SIM110 - a generator costs a call for each name
        if type(get(name)) in _COUNTS:
            return True
    return False


def _gemini(get: Any, names: tuple[str, ...], problems: list[str]) -> Counts | None:
    """Gemini, and ADK, which uses its names for every model."""
    (
        prompt,
        answer,
        total,
        tool,
        thoughts,
        live,
        cached,
        write,
        audio,
        tool_audio,
        cached_audio,
        audio_output,
        live_audio_output,
    ) = names
    before = len(problems)
    # most reports leave most figures out
    thinking = _count(get, thoughts, problems) if get(thoughts) is not None else 0
    tools = _count(get, tool, problems) if get(tool) is not None else 0
    asked, answered, whole = get(prompt), get(answer), get(total)
    if not (
        type(asked) is type(answered) is type(whole) is int
        and 0 <= asked <= _MOST
        and 0 < answered <= _MOST
        and 0 <= whole <= _MOST
    ):
        # something is missing, zero or strange
        asked, answered = _count(get, prompt, problems), _count(get, answer, problems) or _count(get, live, problems)
        whole = _count(get, total, problems)
    counts = Counts(asked + tools, answered, thinking, whole, thinking=thinking)
    if len(problems) > before:
        return None
    if get(cached) is not None:
        counts.cached = _count(get, cached, problems)
    if get(write) is not None:
        counts.cache_write = _count(get, write, problems)
    if details := get(audio):
        counts.audio = _audio(details, problems)
    if details := get(tool_audio):
        counts.audio += _audio(details, problems)
    if details := get(cached_audio):
        counts.cached_audio = _audio(details, problems)
    if details := get(audio_output) or get(live_audio_output):
        counts.audio_output = _audio(details, problems)
    return counts


def _audio(details: Any, problems: list[str]) -> int:
    audio = 0
    for detail in items(details)[:_ENTRIES]:
        of = fields(detail).get
        modality = of("modality")
        if isinstance(modality, str) and str.upper(modality) == "AUDIO":
            audio += _count(of, "token_count", problems) or _count(of, "tokenCount", problems)
    return audio


def _plain(get: Any, problems: list[str]) -> Counts | None:
    before = len(problems)
    counts = Counts(
        _count(get, "input", problems), _count(get, "output", problems), cached=_count(get, "cached", problems)
    )
    return counts if len(problems) == before else None


def searches_in(grounding: Any) -> int:
    """The web searches in the grounding metadata of Gemini."""
    get = fields(grounding).get
    return len(items(get("web_search_queries") or get("webSearchQueries"))[:_ENTRIES])
