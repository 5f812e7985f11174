"""Which entry of a price table a model id means."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from runguard.pricing.model_ids import split_id
from runguard.pricing.model_limits import is_release_of
from runguard.pricing.price_table import Clause, PricedModel, PriceTable, Provider

MAKERS: Final = frozenset({"anthropic", "google", "openai"})  # whose models go by their bare names
_VERSION: Final = re.compile(r"-(?:\d{3}|\d{8}|\d{4}-\d{2}-\d{2})$")
_COMPACT_DATE: Final = re.compile(r"-(20\d{2})(\d{2})(\d{2})$")


@lru_cache(maxsize=256)  # a search looks at every entry, and every guard of a process asks for the same models
def entry_of(table: PriceTable, model: str) -> tuple[PricedModel, bool] | None:
    """The entry for a model, and whether it belongs to the provider that the id names (or names none).

    Stricter than the lookup of genai-prices, which takes a name that merely begins like a model for that model.
    """
    provider, name, named = split_id(model)
    seller = table.provider(provider)
    if seller is not None:
        for spelling in dict.fromkeys((named, *_spellings(name))):
            for listing in (seller, *_fallbacks(seller, table)):
                if (entry := _find(listing, spelling, paths=True)) is not None:
                    return entry, True
    for spelling in _spellings(name):
        for maker in table.providers:
            known_by_name = maker.id in MAKERS or (maker.match is not None and _fits(maker.match, spelling))
            if known_by_name and (entry := _find(maker, spelling)) is not None:
                return entry, provider in (None, maker.id)
    return None


def _fallbacks(seller: Provider, table: PriceTable) -> Iterator[Provider]:
    for other in seller.fallbacks:
        if (provider := table.provider(other)) is not None:
            yield provider


def _spellings(name: str) -> tuple[str, ...]:
    """A name as given, with a compact date written out, and without the release it is pinned to."""
    return tuple(dict.fromkeys((name, _COMPACT_DATE.sub(r"-\1-\2-\3", name), _VERSION.sub("", name))))


def _find(provider: Provider, name: str, *, paths: bool = False) -> PricedModel | None:
    return next((entry for entry in provider.entries if _names_it(entry.match, name, paths)), None)


def _fits(clause: Clause, name: str) -> bool:
    """Whether genai-prices' own rule accepts the name, which is in lower case as the table's texts are."""
    ((kind, value),) = clause.items()
    if kind == "equals":
        return bool(name == value)
    if kind == "or":
        return any(_fits(part, name) for part in value)
    if kind == "and":
        return all(_fits(part, name) for part in value)
    if kind == "starts_with":
        return name.startswith(value)
    if kind == "ends_with":
        return name.endswith(value)
    if kind == "contains":
        return value in name
    return re.search(value, name) is not None


def _names_it(clause: Clause, name: str, paths: bool) -> bool:
    """Whether a clause means exactly this model. ``paths``: a region or vendor may come before the name."""
    ((kind, value),) = clause.items()
    if kind == "equals":
        return bool(name == value)
    if kind == "or":
        return any(_names_it(part, name, paths) for part in value)
    if kind == "and":
        # conditions beside the name, such as "no TTS", only narrow it down
        return all(_fits(part, name) for part in value) and any(_names_it(part, name, paths) for part in value)
    if not _fits(clause, name):
        return False
    if kind == "regex":
        found = re.search(value, name)
        start, end = found.span() if found is not None else (0, 0)
    else:
        start = name.rfind(value) if kind == "ends_with" else name.find(value)
        end = start + len(value)
    if end <= start or (start and not (paths and name[start - 1] in "./")):
        return False
    return is_release_of(name[start:end], name[end:])
