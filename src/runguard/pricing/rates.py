"""What a model's tokens cost: usage against rates, in whole nano-USD, rounded up once per call.

``pricing/book`` finds the ``Rates`` of a model; the engine, replay and the adapters bill a ``Usage`` with them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NamedTuple

from runguard.core.money import NANO

# ---- Usage and rates.

UNLIMITED: Final = 2**63 - 1  # affordable_output() when output costs nothing
PER_MILLION: Final = 1_000_000
MOST_TOKENS: Final = 10**12  # of one call; more is a fault of the counter
_AN_HOUR: Final = 2  # times the input price, for tokens that a cache keeps for an hour; Anthropic alone reports them


@dataclass(slots=True)
class Usage:
    """The tokens of one model call, and the searches that the model made on its side."""

    input: int = 0  # every input token: cached, audio, tool-use prompt tokens included
    output: int = 0  # every output token, thinking included
    cached: int = 0  # of input: read from a cache
    cache_write: int = 0  # of input: written to a cache
    audio: int = 0  # of input
    cached_audio: int = 0  # of cached, and of audio
    audio_output: int = 0  # of output
    thinking: int = 0  # of output; billed as output
    searches: int = 0  # web searches by the provider, as it reports them
    cache_write_1h: int = 0  # of cache_write: kept for an hour

    @property
    def is_possible(self) -> bool:
        """Whether every figure is a count. NaN, a negative or endless number, a bool or a text is none."""
        prompt = (self.input, self.cached, self.cache_write, self.cache_write_1h, self.audio, self.cached_audio)
        for figure in (*prompt, self.output, self.audio_output, self.thinking, self.searches):
            if type(figure) is not int or not 0 <= figure <= MOST_TOKENS:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Unpriced:
    """Says that a model has no price, and why."""

    model: str
    reason: str

    def __str__(self) -> str:
        return f"model '{self.model}' has no price: {self.reason}"


class Band(NamedTuple):
    """Rates in nano-USD per million tokens, for calls with more than ``above`` input tokens."""

    above: int
    input: int
    output: int
    cached: int
    cache_write: int
    audio: int
    cached_audio: int
    audio_output: int


class SearchPrice(NamedTuple):
    """The price of searches on the model's side."""

    nano: int  # of one search, or of all searches of a call
    most: int  # searches of one call that are reserved for
    per_call: bool  # all searches of a call cost as much as one

    def cost(self, searches: int) -> int:
        return self.nano * (min(searches, 1) if self.per_call else searches)


NO_SEARCH_PRICE: Final = SearchPrice(0, 0, True)


class Rates:
    """The prices of a model's tokens and searches.

    ``estimated``: not the list price of exactly these tokens, but never below it on purpose.
    """

    __slots__ = ("_base", "_fee", "_first", "_long", "_most_fee", "_worst", "estimated", "search", "source")

    def __init__(
        self,
        bands: Sequence[Band],
        source: str,
        *,
        estimated: bool = False,
        fee: int = 0,
        search: SearchPrice = NO_SEARCH_PRICE,
    ) -> None:
        ascending = sorted(bands)
        self.search = search
        self.source = source
        self.estimated = estimated
        self._fee = fee  # per call, in nano-USD times a million like the sums of tokens, so that both are added
        self._most_fee = fee + search.cost(search.most) * PER_MILLION
        self._base = ascending[0]
        self._long = tuple(reversed(ascending[1:]))
        self._first = ascending[1].above if self._long else UNLIMITED
        # (above, text, audio, output), longest first. "At most" so many tokens may also mean fewer, so a cheaper long
        # tier must not lower the bound: each level costs at least as much as the one before.
        worst: list[tuple[int, int, int, int]] = []
        text = audio = out = 0
        for band in ascending:
            text = max(text, band.input, band.cached, band.cache_write)
            audio = max(audio, text, band.audio, band.cached_audio)
            out = max(out, band.output, band.audio_output)
            worst.append((band.above, text, audio, out))
        self._worst = tuple(reversed(worst))

    def with_searches(self, search: SearchPrice) -> "Rates":
        """Return the same rates with a price of searches."""
        return Rates(self.bands, self.source, estimated=self.estimated, fee=self._fee, search=search)

    @property
    def bands(self) -> tuple[Band, ...]:
        """The rates for short inputs, then those for longer ones."""
        return (self._base, *reversed(self._long))

    @property
    def nano_per_call(self) -> int:
        """What a call costs whatever its tokens."""
        return self._fee // PER_MILLION

    def __repr__(self) -> str:
        usd = Decimal(self._base.input) / NANO, Decimal(self._base.output) / NANO
        return (
            f"Rates({usd[0]:f}/{usd[1]:f} USD per million tokens in/out, "
            f"{self.source}{', estimated' if self.estimated else ''})"
        )

    def cost(self, usage: Usage) -> int:
        """Return the cost of a call in nano-USD, rounded up.

        Counts that contradict each other are reduced until they fit; those with discounts give way first.
        """
        tokens, cached, write, audio, cached_audio = (
            usage.input,
            usage.cached,
            usage.cache_write,
            usage.audio,
            usage.cached_audio,
        )
        output, audio_output = usage.output, usage.audio_output
        plain = tokens - cached - write - audio + cached_audio
        if plain < 0 or output < audio_output or audio_output < 0:
            return self.cost(_consistent(usage))
        if (cached or write or audio or cached_audio) and (
            cached_audio < 0 or cached < cached_audio or audio < cached_audio or write < 0
        ):
            return self.cost(_consistent(usage))
        band = self._base
        if tokens > self._first:
            for band in self._long:
                if tokens > band[0]:
                    break
        _, r_input, r_output, r_cached, r_write, r_audio, r_cached_audio, r_audio_output = band
        total = plain * r_input + (output - audio_output) * r_output + self._fee
        if cached:
            total += (cached - cached_audio) * r_cached
        if write:
            hour = min(max(usage.cache_write_1h, 0), write)
            total += (write - hour) * r_write + hour * max(_AN_HOUR * r_input, r_write)
        if audio:
            total += (audio - cached_audio) * r_audio + cached_audio * r_cached_audio
        if audio_output:
            total += audio_output * r_audio_output
        if usage.searches:
            total += self.search.cost(usage.searches) * PER_MILLION
        return -(-total // PER_MILLION)

    def worst(self, input: int, output: int, audio: int = 0) -> int:  # noqa: A002
        """Return the most nano-USD that a call with at most these tokens can cost.

        ``audio``: the part of ``input`` that may be audio.
        """
        total, rate = self._worst_input(input, audio)
        return -(-(total + max(output, 0) * rate) // PER_MILLION)

    def affordable_output(self, nano: int, input: int, audio: int = 0) -> int:  # noqa: A002
        """Return the most output tokens with which the worst case still costs no more than ``nano``.

        -1: the input alone costs more. ``UNLIMITED``: output costs nothing.
        """
        total, rate = self._worst_input(input, audio)
        left = nano * PER_MILLION - total
        if left < 0:
            return -1
        return left // rate if rate else UNLIMITED

    def _worst_input(self, tokens: int, audio: int) -> tuple[int, int]:
        if tokens < 0:
            tokens = 0
        if audio:
            audio = min(max(audio, 0), tokens)
        text_rate = audio_rate = output_rate = 0
        for above, text_rate, audio_rate, output_rate in self._worst:  # noqa: B007
            if tokens > above:
                break
        return (tokens - audio) * text_rate + audio * audio_rate + self._most_fee, output_rate


def _consistent(usage: Usage) -> Usage:
    """Return the same totals with parts that fit into them.

    When the parts cannot all be true, the discounted ones give way.
    """
    tokens, output = max(usage.input, 0), max(usage.output, 0)
    overlap = max(min(usage.cached_audio, usage.cached, usage.audio), 0)
    left = tokens
    write = min(max(usage.cache_write, 0), left)
    left -= write
    audio = min(max(usage.audio - overlap, 0), left)
    left -= audio
    overlap = min(overlap, left)
    left -= overlap
    cached = min(max(usage.cached - overlap, 0), left)
    return Usage(
        input=tokens,
        output=output,
        cached=cached + overlap,
        cache_write=write,
        cache_write_1h=usage.cache_write_1h,
        audio=audio + overlap,
        cached_audio=overlap,
        audio_output=min(max(usage.audio_output, 0), output),
        searches=max(usage.searches, 0),
    )


# ---- Model ids as price lists know them, and the provider that an id names.

_RESOURCE: Final = re.compile(r"(?:projects/[^/]+/locations/[^/]+/)?publishers/[^/]+/models/(?=.)")
_TUNED: Final = re.compile(r"(?:^|/)(?:endpoints|tunedmodels)/|^projects/[^/]+/locations/[^/]+/models/")
_PINNED: Final = re.compile(r"@(\d+)$")
_BEDROCK: Final = re.compile(
    r"(?:[a-z]{2,6}(?:-gov)?\.)?(?:anthropic|amazon|meta|mistral|cohere|ai21|deepseek|openai|qwen)\.(?=[a-z])"
)
_BEDROCK_RELEASE: Final = re.compile(r"(?:-v\d+)?(?::\d+)?$")
_PREFIXES: Final = {
    # first part of a model id as LiteLLM writes it: the provider as genai-prices names it
    "anthropic": "anthropic",
    "azure": "azure",
    "azure_ai": "azure",
    "bedrock": "aws",
    "bedrock_converse": "aws",
    "cerebras": "cerebras",
    "cohere": "cohere",
    "cohere_chat": "cohere",
    "databricks": "databricks",
    "deepseek": "deepseek",
    "fireworks_ai": "fireworks",
    "gemini": "google",
    "github_copilot": "github-copilot",
    "google": "google",
    "groq": "groq",
    "mistral": "mistral",
    "models": "google",
    "moonshot": "moonshotai",
    "novita": "novita",
    "openai": "openai",
    "openrouter": "openrouter",
    "perplexity": "perplexity",
    "together_ai": "together",
    "vertex_ai": "google",
    "vertex_ai_beta": "google",
    "voyage": "voyageai",
    "xai": "x-ai",
}


def normalise(model: str) -> str:
    """Return the model id as price lists write it.

    It has no resource path, no provider and no capitals, and ``@20250929`` becomes ``-20250929``.
    """
    return split_id(model)[1]


def split_id(model: str) -> tuple[str | None, str, str]:
    """Return the provider if the id names one, the id alone, and the id as that provider writes it."""
    name = model.strip().lower()
    provider: str | None = None
    named = ""
    if (path := _RESOURCE.match(name)) is not None:  # Vertex sells the models of all publishers
        provider, name = "google", name[path.end() :]
        named = name
    while (
        (slash := name.find("/")) > 0 and (prefix := _PREFIXES.get(name[:slash])) is not None and slash + 1 < len(name)
    ):
        name = name[slash + 1 :]
        if provider is None:
            provider, named = prefix, name
    if provider == "aws":  # bedrock/us-east-1/…, bedrock/converse/…, an inference profile's ARN
        name = named = name.rpartition("/")[2]
    elif name.startswith("ft:") and provider is None:
        provider = "openai"
    named = named or name
    name = name.removesuffix("@default").removesuffix("@latest")
    name = _PINNED.sub(r"-\1", name)
    if provider in (None, "aws") and (vendor := _BEDROCK.match(name)) is not None:
        provider = "aws"
        name = _BEDROCK_RELEASE.sub("", name[vendor.end() :])
    return provider, name, named


def is_tuned(model: str) -> bool:
    """Return whether an id is that of a tuned model or an endpoint, which does not tell the base model."""
    return _TUNED.search(model.lower()) is not None
