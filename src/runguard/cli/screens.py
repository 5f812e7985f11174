"""Model prices for people, in dollars per million tokens, and the price table that they come from."""

import contextlib
import json
import os
import time
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, Final

from runguard.cli.commands.command import CommandError
from runguard.console.screen import console, print_table, table
from runguard.core.decision import printable
from runguard.core.errors import RunGuardError, nearest
from runguard.core.money import nanos, to_usd, usd_text
from runguard.policy.settings import Policy
from runguard.pricing import book
from runguard.pricing.book import (
    LIMITS,
    PricesSource,
    PriceTable,
    Pricing,
    current_table,
    listed_models,
    price_list,
    updated_path,
)
from runguard.pricing.rates import Band, Rates, normalise
from runguard.view.spend_over_time import TOOLS
from runguard.view.store_view import StoreView

OLD_DAYS: Final = 90  # providers change prices several times a year
REFRESH: Final = "pip install -U 'runguard-agents[prices]' && runguard prices --update"
_KINDS: Final = ("input", "output", "cached", "cache_write", "audio", "cached_audio", "audio_output")
_SOURCES: Final = {"prices": "this policy, prices", "on_unpriced": "this policy, on_unpriced"}
_SAME_AS: Final = {
    "cached": "input",
    "cache_write": "input",
    "audio": "input",
    "cached_audio": "cached",
    "audio_output": "output",
}


def list_in_use(source: PricesSource) -> dict[str, Any]:
    """Name, date and age of the price list that runs use."""
    used = price_list(source)
    if used is None:  # a policy with this source is not valid without the package
        return {"source": None, "date": None, "days_old": None, "old": True}
    today = datetime.fromtimestamp(time.time(), UTC).date()  # noqa: TID251 - how old it is now
    days = max((today - used.date).days, 0)
    return {"source": used.source, "date": used.date.isoformat(), "days_old": days, "old": days > OLD_DAYS}


def update_table() -> dict[str, Any]:
    """Write a table from the installed genai-prices; says where, or that the one in use is as new.

    It reads only the installed package and never uses the network.
    """
    try:
        prices = book.snapshot()
    except ImportError:
        raise CommandError(book.MISSING) from None
    text = book.table_text(prices, book.installed_on())
    if not PriceTable(text).is_newer_than(current_table()):
        return {"written": False, "file": None}
    try:
        path = updated_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # a program that reads meanwhile sees the old table or the new one
    except (OSError, RuntimeError) as error:
        raise CommandError(
            f"the price table cannot be written: {error}; name a file with the variable RUNGUARD_PRICES"
        ) from None
    current_table.cache_clear()
    return {"written": True, "file": str(path)}


def asked_models(policy: Policy, asked: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the models to show, and notes for the user."""
    notes: list[str] = []
    names: list[str] = []
    for model in asked:
        is_glob = any(sign in model for sign in "*?[") and model not in policy.prices
        matching = (
            [name for name in _known_models(policy) if fnmatchcase(name, normalise(model))] if is_glob else [model]
        )
        if not matching:
            notes.append(f"no known model matches {model!r}")
        names += matching
    if not asked:
        names = [*policy.prices, *policy.models]
        try:
            names += seen_models(policy)
        except RunGuardError as error:
            notes.append(f"cannot read the models seen in the store: {error}")
        if not names:
            notes.append("neither the policy nor its store names a model; pass one: runguard prices gemini-2.5-flash")
    return list(dict.fromkeys(names)), notes


def seen_models(policy: Policy) -> list[str]:
    """Return the models of the last 30 days in the policy's store; none if the store is in memory."""
    if policy.store == "memory":
        return []
    with contextlib.closing(StoreView(policy.store)) as view:
        now = view.now()
        spend = view.spend(now - 30 * 86_400, now, by="model")
    return [figures.name for figures in spend.totals if figures.name and figures.name not in ("others", TOOLS)]


def limits_usd(policy: Policy) -> bool:
    """Return whether this policy limits dollars; only then RunGuard refuses a model without a price."""
    return policy.max_usd is not None or any(budget.usd is not None for budget in policy.budgets)


def _known_models(policy: Policy) -> list[str]:
    """Return the known ids: of the table of limits, the price list and the policy."""
    return sorted({*LIMITS, *listed_models(policy.prices_source), *policy.prices, *policy.models})


def price_of(policy: Policy, model: str) -> dict[str, Any]:
    """Return a model's price with its source and its limits, or the reason why it has no price."""
    pricing = Pricing(policy.prices, policy.models, policy.unknown_price, policy.prices_source)
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
        near = nearest(normalise(model), _known_models(policy), cutoff=0.8, shown=0)
        reason = found.reason + (f"; {near}" if near else "")
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
    """Return the price of each kind of token, without kinds that cost the same as their parent kind."""
    prices = {kind: getattr(band, kind) for kind in _KINDS}
    own = {kind: nano for kind, nano in prices.items() if kind not in _SAME_AS or nano != prices[_SAME_AS[kind]]}
    return {kind: f"{to_usd(nano):f}" for kind, nano in own.items()}


def print_prices(result: dict[str, Any]) -> None:
    out, result = (
        console(),
        printable(result | {"models": [line | {"add": (line["add"] or "").split("\n")} for line in result["models"]]}),
    )
    priced = [line for line in result["models"] if line["source"] is not None]
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
    for line in (line for line in result["models"] if line["source"] is None):
        out.print(f"\n{line['model']}: no price: {line['unpriced']}", style="yellow", soft_wrap=True)
        out.print(f"  {_what_follows(result)}", soft_wrap=True)
        out.print("  add to runguard.toml:", soft_wrap=True)
        for row in line["add"]:
            out.print(f"    {row}", soft_wrap=True)
    if result["updated"] is not None:
        wrote = (
            f"wrote {result['updated']['file']}"
            if result["updated"]["written"]
            else "the installed genai-prices is not newer than the table in use: pip install -U genai-prices"
        )
        out.print(f"{wrote}\nprice list: {result['list']['source']}", soft_wrap=True)
    elif result["list"]["old"]:
        out.print(f"note: the price list is old ({result['list']['source']}); {REFRESH}", soft_wrap=True)
    for note in result["notes"]:
        out.print(f"note: {note}", soft_wrap=True)


def _cells(prices: dict[str, str]) -> list[str]:
    return [usd_text(nanos(Decimal(prices[kind]))) if kind in prices else "" for kind in ("input", "output", "cached")]


def _what_follows(result: dict[str, Any]) -> str:
    if not result["limits_usd"]:
        return "its calls are allowed and counted in tokens, because no limit in dollars is set; their cost is unknown"
    if result["on_unpriced"] == "tokens":
        return 'on_unpriced = "tokens": its calls are allowed and counted in tokens; limits in dollars ignore them'
    return "its calls are refused, because the policy limits dollars"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"
