"""Model ids as price lists know them, and the provider that an id names."""

import re
from typing import Final

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
    """The model id as price lists know it: no resource path, no provider, lower case,
    ``@20250929`` as ``-20250929``.
    """
    return split_id(model)[1]


def split_id(model: str) -> tuple[str | None, str, str]:
    """Provider if the id names one, the id alone, and the id as that provider writes it."""
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
    """Whether an id is that of a tuned model or an endpoint, which does not tell the base model."""
    return _TUNED.search(model.lower()) is not None
