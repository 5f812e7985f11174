"""Output limits and context windows of models: a dated table of our own where the price data has none.

A limit that is too small would refuse good calls, so where a provider names two figures (a beta header, a second
platform) the larger one is in the table. What is not known for certain is left out.
"""

import re
from typing import Final

AS_OF: Final = "2026-11"

# What may follow a model's name without making it another model: dates, pinned versions, release stages. Everything
# else ("-lite", "-image", "-tts", "-8b", "-pro") names a different model, with other limits and other prices.
_RELEASE: Final = re.compile(
    r"(?:[-@:](?:\d{2,8}|v\d+(?:\.\d+)?|latest|default|stable|preview|exp|experimental|beta|thinking|customtools|high|medium|low)|:\d+)*"
)
_MINOR: Final = re.compile(r"-\d{1,2}(?!\d)")
_END_NUMBER: Final = re.compile(r"\d+$")
_FIRST_NUMBER: Final = re.compile(r"\d+")


def is_release_of(name: str, rest: str) -> bool:
    """Whether ``name + rest`` is the model ``name`` in some release, and no other model that merely begins alike."""
    if not rest:
        return True
    if name.startswith("ft:") or name.endswith(".ft-"):
        return True  # a fine-tuned model carries the owner's words, and costs what its base costs tuned
    if "live" in name:
        rest = rest.replace("-native-audio", "")
    before, after = _END_NUMBER.search(name), _FIRST_NUMBER.match(rest)
    if before and after:  # cut within a number: "4-1" + "0" is version 4.10, "flash-0" + "01" is the pinned release 001
        if len(before[0] + after[0]) not in (3, 8):
            return False
        rest = rest[after.end() :]
    elif before and _MINOR.match(rest):  # "opus-4" + "-10" is version 4.10; a day or month follows a year or a word
        return False
    elif name[-1] in "-@:":
        rest = name[-1] + rest
    return _RELEASE.fullmatch(rest) is not None


# name: (context window, most output tokens), as of AS_OF, from the providers' public model pages; GPT-5.4 and later
# from pages of resellers. For OpenAI and Anthropic the window holds input and output together.
LIMITS: Final[dict[str, tuple[int | None, int | None]]] = {
    # Google: the model pages of the Gemini API
    "gemini-2.0-flash": (1_048_576, 8_192),
    "gemini-2.0-flash-lite": (1_048_576, 8_192),
    "gemini-2.5-flash": (1_048_576, 65_536),
    "gemini-2.5-flash-lite": (1_048_576, 65_536),
    "gemini-2.5-pro": (1_048_576, 65_536),
    "gemini-3-flash-preview": (1_048_576, 65_536),
    "gemini-3-pro-preview": (1_048_576, 65_536),
    "gemini-3.1-pro-preview": (1_048_576, 65_536),
    "gemini-3.1-flash-lite": (1_048_576, 65_536),
    "gemini-3.5-flash": (1_048_576, 65_536),
    "gemini-3.5-flash-lite": (1_048_576, 65_536),
    "gemini-3.7-flash": (1_048_576, 65_536),
    "gemini-3.8-flash": (1_048_576, 65_536),
    "gemini-flash-latest": (1_048_576, 65_536),
    # DeepSeek: the pricing page; older lists still have the 64,000 of the first version
    "deepseek-chat": (131_072, 8_192),
    "deepseek-reasoner": (131_072, 65_536),
    # Anthropic: the models overview. Sonnet 4 and 4.5 have 200,000 tokens, a million with a beta header
    "claude-3-5-haiku": (200_000, 8_192),
    "claude-3-5-sonnet": (200_000, 8_192),
    "claude-3-7-sonnet": (200_000, 128_000),
    "claude-sonnet-4": (1_000_000, 64_000),
    "claude-sonnet-4-0": (1_000_000, 64_000),
    "claude-opus-4": (200_000, 32_000),
    "claude-opus-4-0": (200_000, 32_000),
    "claude-opus-4-1": (200_000, 32_000),
    "claude-sonnet-4-5": (1_000_000, 64_000),
    "claude-haiku-4-5": (200_000, 64_000),
    "claude-opus-4-5": (200_000, 64_000),
    "claude-sonnet-4-6": (1_000_000, 128_000),
    "claude-opus-4-6": (1_000_000, 128_000),
    "claude-opus-4-7": (1_000_000, 128_000),
    "claude-opus-4-8": (1_000_000, 128_000),
    "claude-sonnet-5": (1_000_000, 128_000),
    "claude-opus-5": (1_000_000, 128_000),
    "claude-haiku-5-5": (1_000_000, 128_000),
    "claude-sonnet-5-5": (1_000_000, 128_000),
    "claude-opus-5-5": (1_000_000, 128_000),
    "claude-fable-5-1": (1_000_000, 128_000),
    # OpenAI: the model pages
    "gpt-4o": (128_000, 16_384),
    "gpt-4o-2024-05-13": (128_000, 4_096),
    "gpt-4o-mini": (128_000, 16_384),
    "gpt-4.1": (1_047_576, 32_768),
    "gpt-4.1-mini": (1_047_576, 32_768),
    "gpt-4.1-nano": (1_047_576, 32_768),
    "gpt-5": (400_000, 128_000),
    "gpt-5-codex": (400_000, 128_000),
    "gpt-5-mini": (400_000, 128_000),
    "gpt-5-nano": (400_000, 128_000),
    "gpt-5-pro": (400_000, 272_000),
    "gpt-5.1": (400_000, 128_000),
    "gpt-5.1-codex": (400_000, 128_000),
    "gpt-5.2": (400_000, 128_000),
    "gpt-5.4": (1_050_000, 128_000),
    "gpt-5.5": (1_050_000, 128_000),
    "gpt-5.5-pro": (1_050_000, 128_000),
    "o1": (200_000, 100_000),
    "o1-pro": (200_000, 100_000),
    "o3": (200_000, 100_000),
    "o3-pro": (200_000, 100_000),
    "o3-mini": (200_000, 100_000),
    "o4-mini": (200_000, 100_000),
}
_LONGEST_FIRST: Final = tuple(sorted(LIMITS, key=len, reverse=True))


def limits_of(model: str) -> tuple[int | None, int | None]:
    """Context window and most output tokens of a model, by its normalised id; None where the table has no answer."""
    if model.startswith("claude-"):
        model = model.replace(".", "-")  # resellers write claude-sonnet-4.5
    for name in _LONGEST_FIRST:
        if model.startswith(name) and is_release_of(name, model[len(name) :]):
            return LIMITS[name]
    return None, None
