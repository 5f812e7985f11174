"""Prices as people ask for them: one line per model, in dollars per million tokens."""

import json
import time
from decimal import Decimal
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Final

from runguard.console.screen import console, print_table, table
from runguard.core.budget import to_usd
from runguard.core.exceptions import RunGuardError
from runguard.core.printable import printable
from runguard.policy.settings import Policy
from runguard.pricing.book import Pricing
from runguard.pricing.model_ids import normalise
from runguard.pricing.model_limits import LIMITS
from runguard.pricing.price_list import listed_models
from runguard.pricing.rates import Band, Rates
from runguard.view.store_view import StoreView

_KINDS: Final = ("input", "output", "cached", "cache_write", "audio", "cached_audio", "audio_output")
_SOURCES: Final = {"prices": "this policy, prices", "on_unpriced": "this policy, on_unpriced"}
_SAME_AS: Final = {
    "cached": "input",
    "cache_write": "input",
    "audio": "input",
    "cached_audio": "cached",
    "audio_output": "output",
}


def asked_models(policy: Policy, asked: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The models to show, and what to say beside them."""
    notes: list[str] = []
    names: list[str] = []
    for model in asked:
        is_glob = any(sign in model for sign in "*?[") and model not in policy.prices
        matching = (
            [name for name in _known_models(policy) if fnmatchcase(name, normalise(model))] if is_glob else [model]
        )
        if not matching:
            notes.append(f"no known model fits {model!r}")
        names += matching
    if not asked:
        names = [*policy.prices, *policy.models]
        try:
            names += seen_models(policy)
        except RunGuardError as error:
            notes.append(f"which models were seen is not known: {error}")
        if not names:
            notes.append(
                "the policy names no model and no store has seen one; name one: runguard prices gemini-2.5-flash"
            )
    return list(dict.fromkeys(names)), notes


def seen_models(policy: Policy) -> list[str]:
    """The models of the last 30 days' calls in the policy's store; none without a durable one."""
    if policy.store == "memory":
        return []
    view = StoreView(policy.store)
    now = view.now()
    spend = view.spend(now - 30 * 86_400, now, by="model")
    return [figures.name for figures in spend.totals if figures.name and figures.name != "others"]


def limits_usd(policy: Policy) -> bool:
    """Whether this policy limits dollars at all: only then an unknown price refuses anything."""
    return policy.max_usd is not None or any(budget.usd is not None for budget in policy.budgets)


def _known_models(policy: Policy) -> list[str]:
    """Known ids: of the limits' table, of the makers in the price list, and of the policy."""
    return sorted({*LIMITS, *listed_models(), *policy.prices, *policy.models})


def price_of(policy: Policy, model: str) -> dict[str, Any]:
    """One model's price with its source, its limits, and what it would do without a price."""
    pricing = Pricing(policy.prices, policy.models, policy.unknown_price)
    found = pricing.rates(model, time.time())  # noqa: TID251 - prices of now
    window, output = pricing.limits(model)
    line: dict[str, Any] = {
        "model": model,
        "known_as": normalise(model),
        "source": None,
        "estimated": False,
        "usd_per_million": None,
        "tiers": [],
    }
    if isinstance(found, Rates):
        base, *long = found.bands
        line |= {
            "source": _SOURCES.get(found.source, found.source),
            "estimated": found.estimated,
            "usd_per_million": _dollars(base),
        }
        line["tiers"] = [{"above": band.above, "usd_per_million": _dollars(band)} for band in long]
        line["usd_per_call"] = str(to_usd(found.nano_per_call)) if found.nano_per_call else None
        line["unpriced"] = line["add"] = None
    else:
        near = get_close_matches(normalise(model), _known_models(policy), n=2, cutoff=0.8)
        reason = found.reason + (f"; did you mean {' or '.join(near)}?" if near else "")
        line |= {
            "usd_per_call": None,
            "unpriced": reason,
            "add": (
                f"[prices.{json.dumps(model, ensure_ascii=False)}]\ninput = …   # dollars per million "
                "tokens\noutput = …"
            ),
        }
    return {**line, "context_window": window, "max_output_tokens": output}


def _dollars(band: Band) -> dict[str, str]:
    """Every kind of token whose price says something: the others cost as the kind they belong to."""
    prices = {kind: getattr(band, kind) for kind in _KINDS}
    told = {kind: nano for kind, nano in prices.items() if kind not in _SAME_AS or nano != prices[_SAME_AS[kind]]}
    return {kind: f"{to_usd(nano):f}" for kind, nano in told.items()}


def print_prices(told: dict[str, Any]) -> None:
    out, told = (
        console(),
        printable(told | {"models": [line | {"add": (line["add"] or "").split("\n")} for line in told["models"]]}),
    )
    priced = [line for line in told["models"] if line["source"] is not None]
    if priced:
        shown = table(
            "model",
            "input",
            "output",
            "cached",
            "window",
            "max output",
            "from",
            right=("input", "output", "cached", "window", "max output"),
            whole=(),
        )
        for line in priced:
            source = line["source"] + (", estimated" if line["estimated"] else "")
            shown.add_row(
                line["model"],
                *_cells(line["usd_per_million"]),
                _count(line["context_window"]),
                _count(line["max_output_tokens"]),
                source,
            )
            for tier in line["tiers"]:
                shown.add_row(f"  above {tier['above']:,} input", *_cells(tier["usd_per_million"]), "", "", "")
        out.print("dollars per million tokens", style="dim")
        print_table(out, shown)
    for line in (line for line in told["models"] if line["source"] is None):
        out.print(f"\n{line['model']}: no price: {line['unpriced']}", style="yellow", soft_wrap=True)
        out.print(f"  {_what_follows(told)}", soft_wrap=True)
        out.print("  add to runguard.toml:", soft_wrap=True)
        for row in line["add"]:
            out.print(f"    {row}", soft_wrap=True)
    for note in told["notes"]:
        out.print(f"note: {note}", soft_wrap=True)


def _cells(prices: dict[str, str]) -> tuple[str, str, str]:
    return (
        usd_rate(prices["input"]),
        usd_rate(prices["output"]),
        usd_rate(prices["cached"]) if "cached" in prices else "",
    )


def usd_rate(text: str) -> str:
    """A rate as price lists write it: at least two decimals, all that matter."""
    whole, _, cents = f"{Decimal(text).normalize():f}".partition(".")
    return f"${whole}.{cents.ljust(2, '0')}"


def _what_follows(told: dict[str, Any]) -> str:
    if not told["limits_usd"]:
        return (
            "calls to it are counted in tokens, their cost is unknown; no limit in dollars is set, so none is refused"
        )
    if told["on_unpriced"] == "tokens":
        return 'on_unpriced = "tokens": calls to it are made and counted in tokens; limits in dollars do not see them'
    return "calls to it are refused, because the policy limits dollars"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"
