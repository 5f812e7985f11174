"""The tokens and the cost that a provider states, in our terms.

Providers are told apart by the names they use, not by where the numbers stand: the same names come back from proxies and gateways.
"""

from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final

from runguard.pricing import Usage
from runguard.reading.fields import fields, items, private

_NUMBERS: Final = frozenset({int, float})  # exact types: True is no count, and neither is a stand-in of a test
_MOST: Final = 10**12  # tokens of one call; more is a fault of whoever counted
_DEAREST: Final = 1_000_000  # USD for one call
_EXACT: Final = Context(prec=60)  # the host program may have changed its own
_ENTRIES: Final = 64  # of a list that are looked at

_SNAKE: Final = (
    "prompt_token_count",
    "candidates_token_count",
    "total_token_count",
    "tool_use_prompt_token_count",
    "thoughts_token_count",
    "cached_content_token_count",
    "response_token_count",
    "prompt_tokens_details",
    "tool_use_prompt_tokens_details",
    "cache_tokens_details",
    "candidates_tokens_details",
)


_CACHE: Final = (("cache_read_input_tokens", "cached"), ("cache_creation_input_tokens", "cache_write"))
_OF_INPUT: Final = (
    ("cached_tokens", "cached"),
    ("audio_tokens", "audio"),
    ("cache_creation_tokens", "cache_write"),
    ("cache_write_tokens", "cache_write"),
)
_OF_OUTPUT: Final = (("reasoning_tokens", "thinking"), ("thinking_tokens", "thinking"), ("audio_tokens", "audio_output"))


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


_CAMEL: Final = tuple(_camel(name) for name in _SNAKE)


def usage_of(told: Any, problems: list[str]) -> Usage | None:
    """None: not told. So are zeros alone, which libraries fill in when the provider said nothing."""
    kind = type(told)
    if kind is Usage:
        return told  # type: ignore[no-any-return]
    if kind is int or kind is float:
        return total_of(told, problems)
    get = fields(told).get
    if type(get("prompt_tokens")) in _NUMBERS or type(get("completion_tokens")) in _NUMBERS:
        read = _chat
    elif type(get("input_tokens")) in _NUMBERS or type(get("output_tokens")) in _NUMBERS:
        read = _split
    elif type(get("prompt_token_count")) in _NUMBERS or type(get("total_token_count")) in _NUMBERS:
        read = _gemini_snake
    elif type(get("promptTokenCount")) in _NUMBERS or type(get("totalTokenCount")) in _NUMBERS:
        read = _gemini_camel
    elif type(get("input")) in _NUMBERS or type(get("output")) in _NUMBERS:
        read = _plain
    elif type(get("total_tokens")) in _NUMBERS:
        return total_of(get("total_tokens"), problems)
    else:
        return None
    usage = read(get, problems)
    if usage is not None and not usage.input:
        if not usage.output:
            problems.append("usage: zero tokens in and out, taken as not told")
            return None
        problems.append("usage: input tokens are not told")
    return usage


def total_of(told: Any, problems: list[str]) -> Usage | None:
    """Tokens without a word about their kind count as output: the dearest that they can have been."""
    tokens = _count({"tokens": told}.get, "tokens", problems)
    return Usage(output=tokens) if tokens else None


def _count(get: Any, name: str, problems: list[str]) -> int:
    value = get(name)
    if value is None:
        return 0
    if type(value) is int and 0 <= value <= _MOST:
        return value
    if type(value) in _NUMBERS:
        problems.append(f"{name}: not a count of tokens")
    return 0


def _parts(usage: Usage, told: Any, names: tuple[tuple[str, str], ...], problems: list[str]) -> None:
    """Counts that are parts of others. Most are not told or zero, and one that is broken leaves the rest."""
    get = fields(told).get
    for name, part in names:
        count = get(name)
        if type(count) is int and 0 <= count <= _MOST:
            if count:
                setattr(usage, part, count)
        elif type(count) in _NUMBERS:
            problems.append(f"{name}: not a count of tokens")


def _chat(get: Any, problems: list[str]) -> Usage | None:
    """OpenAI's chat completions, LiteLLM, and all that speak like them: the prompt includes what was cached."""
    before = len(problems)
    prompt, output, total = _count(get, "prompt_tokens", problems), _count(get, "completion_tokens", problems), _count(get, "total_tokens", problems)
    if len(problems) > before:
        return None
    # some leave the thinking out of the completion, none out of the total
    usage = Usage(prompt, output if output + prompt >= total else total - prompt)
    if get("cache_read_input_tokens") is not None or get("cache_creation_input_tokens") is not None:  # LiteLLM, as Anthropic said it
        _parts(usage, {name: get(name) for name, _ in _CACHE}, _CACHE, problems)
    if (details := get("prompt_tokens_details")) is not None:
        _parts(usage, details, _OF_INPUT, problems)
    if (details := get("completion_tokens_details")) is not None:
        _parts(usage, details, _OF_OUTPUT, problems)
    return usage


def _split(get: Any, problems: list[str]) -> Usage | None:
    """Input and output by these names: OpenAI's responses, which tell what of the input was cached; or Anthropic's."""
    if (details := get("input_tokens_details")) is None:
        return _anthropic(get, problems)
    before = len(problems)
    tokens, output, total = _count(get, "input_tokens", problems), _count(get, "output_tokens", problems), _count(get, "total_tokens", problems)
    if len(problems) > before:
        return None
    usage = Usage(tokens, output if output + tokens >= total else total - tokens)
    _parts(usage, details, _OF_INPUT, problems)
    if (details := get("output_tokens_details")) is not None:
        _parts(usage, details, _OF_OUTPUT, problems)
    return usage


def _anthropic(get: Any, problems: list[str]) -> Usage | None:
    """The input leaves out what was read from a cache and what was written to one."""
    if rounds := get("iterations"):
        return _rounds(items(rounds), problems)
    before = len(problems)
    tokens, output = _count(get, "input_tokens", problems), _count(get, "output_tokens", problems)
    cached, write = _count(get, "cache_read_input_tokens", problems), _count(get, "cache_creation_input_tokens", problems)
    if len(problems) > before:
        return None
    usage = Usage(tokens + cached + write, output, cached, write)
    if (details := get("output_tokens_details")) is not None:
        _parts(usage, details, _OF_OUTPUT, problems)
    return usage


def _rounds(rounds: Any, problems: list[str]) -> Usage | None:
    """A message that Anthropic compacted on the way was sampled several times; the counts beside the list leave some of that out."""
    whole = Usage()
    for told in rounds[:_ENTRIES]:
        of = fields(told).get
        usage = None if of("iterations") else _anthropic(of, problems)
        if usage is None:
            return None
        whole.input, whole.output = whole.input + usage.input, whole.output + usage.output
        whole.cached, whole.cache_write = whole.cached + usage.cached, whole.cache_write + usage.cache_write
        whole.thinking += usage.thinking
    return whole


def _gemini_snake(get: Any, problems: list[str]) -> Usage | None:
    return _gemini(get, _SNAKE, problems)


def _gemini_camel(get: Any, problems: list[str]) -> Usage | None:
    return _gemini(get, _CAMEL, problems)


def _gemini(get: Any, names: tuple[str, ...], problems: list[str]) -> Usage | None:
    """Models differ in whether candidates include thoughts, so output is what the total leaves."""
    prompt_name, output_name, total_name, tool_name, thought_name, cached_name, live_name, heard, tool_heard, cached_heard, spoken = names
    before = len(problems)
    prompt = _count(get, prompt_name, problems) + _count(get, tool_name, problems)
    output = _count(get, output_name, problems) or _count(get, live_name, problems)
    thinking, total = _count(get, thought_name, problems), _count(get, total_name, problems)
    if len(problems) > before:
        return None
    usage = Usage(prompt, total - prompt if total >= prompt + output else output + thinking, _count(get, cached_name, problems))
    usage.thinking = thinking
    usage.cache_write = _count(get, "cache_creation_input_tokens", problems)  # ADK's other models
    if details := get(heard):
        usage.audio = _audio(details, problems)
    if details := get(tool_heard):
        usage.audio += _audio(details, problems)
    if details := get(cached_heard):
        usage.cached_audio = _audio(details, problems)
    if details := get(spoken):
        usage.audio_output = _audio(details, problems)
    return usage


def _audio(details: Any, problems: list[str]) -> int:
    heard = 0
    for detail in items(details)[:_ENTRIES]:
        of = fields(detail).get
        if of("modality") == "AUDIO":
            heard += _count(of, "token_count", problems) or _count(of, "tokenCount", problems)
    return heard


def _plain(get: Any, problems: list[str]) -> Usage | None:
    before = len(problems)
    usage = Usage(_count(get, "input", problems), _count(get, "output", problems), _count(get, "cached", problems))
    return usage if len(problems) == before else None


def dollars(value: Any, name: str, problems: list[str]) -> Decimal | None:
    """An amount that can have been meant; anything else is not told, and that is said."""
    if value is None:
        return None
    kind = type(value)
    usd: Decimal | None = None
    if kind is Decimal:
        usd = value
    elif kind is int:
        usd = Decimal(value) if abs(value) <= _DEAREST else Decimal("Infinity")
    elif kind is float or (kind is str and len(value) <= 64):
        try:
            usd = Decimal(str(value))  # 0.1 means 0.1, not the binary fraction nearest to it
        except InvalidOperation:
            usd = None
    if usd is not None and usd.is_finite() and 0 <= usd <= _DEAREST:
        return usd
    if usd is not None or kind in (str, bool):
        problems.append(f"{name}: not an amount of USD from 0 to a million")
    return None


def stated_cost(response: Any, usage: Any, problems: list[str]) -> Decimal | None:
    """What LiteLLM reckoned for the call, or a gateway such as OpenRouter charged for it."""
    if (hidden := private(response, "_hidden_params")) is not None and (cost := fields(hidden).get("response_cost")) is not None:
        return dollars(cost, "response_cost", problems)
    if usage is None:
        return None
    get = fields(usage).get
    cost = get("cost")
    if cost is None:
        return None
    if type(cost) not in _NUMBERS:
        cost = fields(cost).get("total_cost")  # Perplexity gives a table
    charged = dollars(cost, "usage.cost", problems)
    if charged is not None and get("is_byok") is True:  # with a key of one's own, the provider's bill comes on top
        beside = dollars(fields(get("cost_details")).get("upstream_inference_cost"), "upstream_inference_cost", problems)
        return None if beside is None else _EXACT.add(charged, beside)
    return charged
