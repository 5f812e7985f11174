"""Commands around a policy: init, check and prices; and the policy that a command uses.

``main`` declares the commands. ``doctor`` and the other commands share the policy and the prices.
"""

import contextlib
import json
import os
import time
import tomllib
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import Any, Final

import click

from runguard.cli.main import CommandError, answer, noted, print_json
from runguard.console import console, print_table, table
from runguard.core.decision import printable
from runguard.core.errors import PolicyError, RunGuardError, did_you_mean
from runguard.core.money import nanos, to_usd, usd_text
from runguard.ledger.memory import in_memory, store_name
from runguard.policy.settings import (
    FILE_NAME,
    RULES,
    Policy,
    PolicyFile,
    find_policy_file,
    load_policy_file,
    policy_schema,
)
from runguard.pricing import book
from runguard.pricing.book import (
    LIMITS,
    PricesSource,
    PriceTable,
    Pricing,
    current_table,
    listed_models,
    price_list,
    prices_per_token,
    updated_path,
)
from runguard.pricing.rates import Band, Rates, normalise
from runguard.view.store import TOOLS, StoreView

# ---- the policy that a command uses


def policy_here(store: str | None = None) -> Policy:
    """Return the policy that a run started here would use; ``store`` overrides the file and the environment."""
    if store is None:
        return Policy.build()
    path = find_policy_file()
    values = load_policy_file(path) if path is not None else {}
    if mode := os.environ.get("RUNGUARD_MODE"):
        values = {**values, "mode": mode}
    sources = [str(path)] * (path is not None) + ["RUNGUARD_MODE"] * bool(mode) + ["--store"]
    return Policy.validated({**values, "store": store}, " and ".join(sources))


def load(path: Path | None) -> Policy:
    """Return the policy of a file without the environment, or the defaults if there is no file."""
    return Policy.validated({} if path is None else load_policy_file(path), str(path or ""))


# ---- ``runguard init``: write a commented ``runguard.toml`` to start from

_TEMPLATE: Final = Template("""\
# RunGuard's policy for agents started in this folder or below; written by: runguard init --preset $preset
# Check it with `runguard check`. Keywords in code have the same names and override this file.

# enforce acts; shadow decides and records everything but changes nothing. RUNGUARD_MODE=shadow overrides this line,
# $shadow
mode = "enforce"

# Dollars per run: one user turn with all its sub-agents, tools and branches.
# $why_usd
# Once you have recorded runs, `runguard calibrate` proposes the number: 2.5 times the 95th percentile.
max_usd = $max_usd

# RunGuard refuses a call that does not fit, before it is made. You can also limit tokens, calls and time:
# max_tokens = 500_000
# max_model_calls = 60      # for the whole tree; without it ADK's own 500
# max_seconds = 300

# Where accounts, breakers, stops and trips are kept. $why_store
$store

# The text for the end user after a stop, instead of the built-in sentence:
# stop_text = "I could not finish this. Please ask again, or ask our team."

# Keep room for the answer in models with a window of a million tokens:
# context_headroom = 100_000

# RunGuard refuses a model of unknown price while dollars are limited. `runguard prices MODEL` shows known prices.
# Set your own in dollars per million tokens:
# [prices."my-model"]
# input = 0.30
# output = 2.50

# Budgets beyond one run: per session, user, app, agent, model, tool or label; 1h, 1d, 1w or month.
$budgets

# Receivers of alerts about stops, thresholds and outages. Never write secrets here; use env:NAME.
$alerts

# Describe your tools, by name or glob.
# [tools.check_job]
# polling = true            # judged by time without change, not by count
# [tools."send_*"]
# writes = true
# once = true               # runs only once per session with the same arguments

# The loop rules have measured defaults; `runguard check` shows the default of each changed setting. The rules are
# $rules.
# Rungs are counts; false switches a rule off:
# [rules]
# repetition = { stop = 6 }
# growth = false
""")
_BUDGETS: Final = """\
# [[budgets]]
# usd = 5
# per = "user"
# window = "1d\""""
_ALERTS: Final = """\
# slack_webhook = "env:SLACK_URL"
# pagerduty_key = "env:PAGERDUTY_KEY\""""
PRESETS: Final[dict[str, dict[str, str]]] = {
    "development": {
        "shadow": "for example to try a policy first.",
        "why_usd": (
            "Half a dollar ends a runaway early during development; a hundred calls of 5,000 tokens to a small model "
            "cost less than a tenth of it."
        ),
        "max_usd": "0.50",
        "why_store": "In memory they end with the process.",
        "store": (
            'store = "memory"              # or "sqlite:///guard.db", to see them with `runguard status` and '
            "`runguard dashboard`"
        ),
        "budgets": _BUDGETS,
        "alerts": f"# [alerts]\n{_ALERTS}",
    },
    "production": {
        "shadow": "for the first days of a rollout; `runguard trips` then lists what would have been stopped.",
        "why_usd": "Five dollars fit agents whose runs have a limited scope.",
        "max_usd": "5.00",
        "why_store": "A file works for all processes of one machine; several machines need Redis, Valkey or Postgres.",
        "store": 'store = "sqlite:///guard.db"  # next to this file; or "redis://host:6379/0", "postgresql://user@host/database"',
        "budgets": _BUDGETS,
        "alerts": f'[alerts]\nlog = "warning"\n{_ALERTS}',
    },
}


def init(file: Path, preset: str, force: bool, as_json: bool) -> None:
    if file.exists() and not force:
        raise CommandError(
            f"{file} already exists and was not changed; pass --force to replace it, or name another FILE"
        )
    if file.name == "pyproject.toml":
        raise CommandError(
            f"{file}: this command writes separate files such as runguard.toml; a policy in pyproject.toml "
            "belongs under [tool.runguard]"
        )
    text = _TEMPLATE.substitute(PRESETS[preset], preset=preset, rules=", ".join(RULES))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        do = f"; create the folder {file.parent} first" if not file.parent.exists() else ""
        raise CommandError(f"{file}: cannot write the file: {error.strerror or error}{do}") from None
    notes = _why_unused(file)
    lines = [
        f"written: {file} ({preset})",
        *noted(notes),
        "  next: read it, then `runguard check` and `runguard doctor`",
    ]
    answer(as_json, {"ok": True, "file": str(file), "preset": preset, "notes": notes}, lines)


def _why_unused(file: Path) -> list[str]:
    """Return why runs started here would not use the new file."""
    if file.name != FILE_NAME:
        return [
            f"RunGuard finds only files named {FILE_NAME} automatically; set RUNGUARD_POLICY={file} to use this one"
        ]
    used = find_policy_file()
    if used is None or used.resolve() != file.resolve():
        return [
            (
                f"runs started in {file.resolve().parent} or below use it; runs started "
                f"here use {used or 'no policy file'}"
            )
        ]
    return []


# ---- ``runguard check``: validate a policy and show what it changes


def check(file: Path | None, schema: bool, as_json: bool) -> int:
    if schema:
        click.echo(json.dumps(policy_schema(), indent=2))
        return 0
    path = file
    try:
        path = path or find_policy_file()
        policy = load(path)
        for name in ("mode", "store"):  # the environment overrides every file
            if value := os.environ.get(f"RUNGUARD_{name.upper()}"):
                Policy.validated({name: value}, f"RUNGUARD_{name.upper()}")
    except PolicyError as error:
        raise CommandError(str(error), file=str(path) if path else None) from None
    changed = _changed(policy)
    notes = _overrides() + prices_per_token(policy.prices, policy.prices_source)
    sets_nothing = path is not None and not _has_table(path)
    settings = {name: {"value": value, "default": default} for name, (value, default) in changed.items()}
    facts = {"ok": not sets_nothing, "file": str(path) if path else None, "settings": settings}
    lines = [f"ok: {path or 'no policy file in this folder or its parents'}"]
    if sets_nothing:
        lines = [f"{path}: no [tool.runguard] table, so this file sets nothing"]
    width = max((len(name) for name in changed), default=0)
    for name, (value, default) in changed.items():
        usual = "" if name.startswith("tools.") else f"  (default {_shown(default)})"
        lines.append(f"  {name:<{width}}  {_shown(value)}{usual}")
    if not changed:
        lines.append("  every setting at its default")
    answer(as_json, {**facts, "policy": policy.digest, "notes": notes}, [*lines, *noted(notes)])
    return int(sets_nothing)


def _has_table(path: Path) -> bool:
    """Return whether the file can set anything: a pyproject.toml needs a [tool.runguard] table."""
    if path.name != "pyproject.toml":
        return True
    tool = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("tool", {})
    return isinstance(tool, dict) and "runguard" in tool


def _overrides() -> list[str]:
    """Return the environment variables that override the file."""
    notes = []
    if mode := os.environ.get("RUNGUARD_MODE"):
        notes.append(f"RUNGUARD_MODE={mode} overrides the mode of every run started here")
    if os.environ.get("RUNGUARD_STORE"):
        notes.append("RUNGUARD_STORE overrides the store of every run started here")
    return notes


def _changed(policy: Policy) -> dict[str, tuple[Any, Any]]:
    """Return settings that differ from the defaults: name -> (value, default). Rules appear as their final rungs."""
    changed: dict[str, tuple[Any, Any]] = {}
    current, defaults = (_plain(each) for each in (policy, Policy.validated({}, "")))
    for name in PolicyFile.model_fields:
        if name not in ("rules", "tools") and current.get(name) != defaults.get(name):
            changed[name] = (current.get(name), defaults.get(name))
    if "store" in changed:
        changed["store"] = (store_name(policy.store), "memory")  # a URL may hold a password
    if "alerts" in changed:
        changed["alerts"] = ([receiver.name for receiver in policy.alerts.receivers], [])
    for rule, (default, _) in RULES.items():
        rungs = policy.rungs(rule)
        if rungs != default:
            changed[f"rules.{rule}"] = (_rungs(rungs) if rungs is not None else False, _rungs(default))
    for pattern, tool in policy.tools.items():
        changed[f"tools.{pattern}"] = (tool.model_dump(mode="json", exclude_defaults=True), {})
    return changed


def _plain(policy: Policy) -> dict[str, Any]:
    """Return the settings of a policy as plain data."""
    return policy.model_dump(
        mode="json", include=set(PolicyFile.model_fields), exclude_none=True, exclude={"tools", "rules"}
    )


def _rungs(rungs: Any) -> dict[str, float]:
    numbers = {name: getattr(rungs, name) for name in ("warn", "nudge", "withhold", "block", "stop")}
    return {
        name: int(number) if number == int(number) else number for name, number in numbers.items() if number is not None
    }


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if value is False:
        return "off"
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(entry)}" for name, entry in value.items()) or "nothing"
    return _word(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- ``runguard prices``: dollars per million tokens, and the price table that they come from

OLD_DAYS: Final = 90  # providers change prices several times a year
REFRESH: Final = "pip install -U genai-prices"
_KINDS: Final = ("input", "output", "cached", "cache_write", "audio", "cached_audio", "audio_output")
_SOURCES: Final = {"prices": "this policy, prices", "on_unpriced": "this policy, on_unpriced"}
_SAME_AS: Final = {
    "cached": "input",
    "cache_write": "input",
    "audio": "input",
    "cached_audio": "cached",
    "audio_output": "output",
}


def prices(models: tuple[str, ...], update: bool, table: Path | None, store: str | None, as_json: bool) -> int:
    if table is not None and not update:
        raise click.UsageError("--from FILE needs --update")
    updated = update_table(table) if update else None
    policy = policy_here(store)
    names, notes = asked_models(policy, models) if models or not update else ([], [])
    notes += prices_per_token(policy.prices, policy.prices_source)
    found = [price_of(policy, name) for name in names]
    ok = all(line["source"] is not None for line in found) and not (models and not found)
    result = {
        "ok": ok,
        "models": found,
        "on_unpriced": policy.model_dump(mode="json", include={"on_unpriced"}, exclude_none=True)["on_unpriced"],
        "limits_usd": limits_usd(policy),
        "list": list_in_use(policy.prices_source),
        "updated": updated,
        "notes": notes,
    }
    if as_json:
        print_json(result)
    else:
        print_prices(result)
    return int(not ok)


def list_in_use(source: PricesSource) -> dict[str, Any]:
    """Name, date and age of the price list that runs use."""
    used = price_list(source)
    if used is None:  # a policy with this source is not valid without the package
        return {"source": None, "date": None, "days_old": None, "old": True}
    today = datetime.fromtimestamp(time.time(), UTC).date()  # noqa: TID251 - how old it is now
    days = max((today - used.date).days, 0)
    return {"source": used.source, "date": used.date.isoformat(), "days_old": days, "old": days > OLD_DAYS}


def update_table(file: Path | None) -> dict[str, Any]:
    """Write a table from a file or the installed genai-prices. Return where, or why the table in use stays.

    It never uses the network.
    """
    try:
        text = book.table_text(book.snapshot(), book.installed_on()) if file is None else file.read_text("utf-8")
        new = PriceTable(text)
    except ImportError:
        raise CommandError(book.MISSING) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        what = "the installed genai-prices" if file is None else str(file)
        raise CommandError(
            f"{what} cannot be used: {error}; name a file that `runguard prices --update` wrote"
        ) from None
    if not new.is_newer_than(used := book.newest_file()):
        what = f"the installed genai-prices {new.release}" if file is None else f"{file} ({new.source})"
        do = ": pip install -U genai-prices" if file is None else ""
        return {"written": False, "file": None, "why": f"{what} is not newer than {used.source}{do}"}
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
    return {"written": True, "file": str(path), "why": None}


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
    if in_memory(policy.store):
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
        near = did_you_mean(normalise(model), _known_models(policy), cutoff=0.8, shown=0)
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
                _limit(line["context_window"]),
                _limit(line["max_output_tokens"]),
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
        wrote = f"wrote {result['updated']['file']}" if result["updated"]["written"] else result["updated"]["why"]
        out.print(f"{wrote}\nprice list: {result['list']['source']}", soft_wrap=True)
    elif result["list"]["old"]:
        out.print(f"note: the price list is old ({result['list']['source']}); {REFRESH}", soft_wrap=True)
    for note in result["notes"]:
        out.print(f"note: {note}", soft_wrap=True)


def _limit(tokens: int | None) -> str:
    return "unknown" if tokens is None else f"{tokens:,}"


def _cells(prices: dict[str, str]) -> list[str]:
    return [usd_text(nanos(Decimal(prices[kind]))) if kind in prices else "" for kind in ("input", "output", "cached")]


def _what_follows(result: dict[str, Any]) -> str:
    if not result["limits_usd"]:
        return "its calls are allowed and counted in tokens, because no limit in dollars is set; their cost is unknown"
    if result["on_unpriced"] == "tokens":
        return 'on_unpriced = "tokens": its calls are allowed and counted in tokens; limits in dollars ignore them'
    return "its calls are refused, because the policy limits dollars"
