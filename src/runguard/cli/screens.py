"""What commands use and show: the policy and the store in force, and the screens of status, trips and prices.

``policy_commands``, ``store_commands`` and ``doctor`` call it; the two former import it inside of their commands.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runguard.cli.main import CommandError
from runguard.console import amount, console, heading, moment, print_table, span, table, usd
from runguard.core.decision import printable
from runguard.core.errors import PolicyError, RunGuardError, did_you_mean
from runguard.core.events import RunInfo
from runguard.core.money import nanos, to_usd, usd_text
from runguard.engine.guard import Guard
from runguard.engine.spending import scopes_of
from runguard.ledger.ledger import ALL, StoreDeniedError, StoreOutage, StoreSession
from runguard.ledger.memory import in_memory, store_of
from runguard.ledger.sqlite import SqliteStore
from runguard.policy.settings import Policy, find_policy_file, load_policy_file
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
from runguard.view.store import TOOLS, StoreView
from runguard.view.story import (
    WITHOUT_A_COUNT,
    BreakerRow,
    BudgetRow,
    Figures,
    RunForecast,
    RunningRow,
    Spend,
    Story,
    StoryRow,
    counted,
    hint,
    whole,
    why_of,
)

# ---- the store that a command reads or changes, ``--store`` or the store of the policy in force

_ALERTS_S: Final = 5.0
_LOOK_S: Final = 3.0
_SHOWN: Final = 20


def look_at(store: str | None) -> tuple[StoreView, Policy]:
    """Return a view of the store and the policy in force; raise if the store is not durable or does not answer.

    The view is closed when the command ends.
    """
    policy = _policy(store)
    check_file(policy.store)
    # an outage ends the command with one message; do not log it as well
    logging.getLogger("runguard").addHandler(logging.NullHandler())
    view = StoreView(policy.store, _LOOK_S)
    click.get_current_context().call_on_close(view.close)
    try:
        view.now()
    except StoreOutage as error:
        if isinstance(error, StoreDeniedError) or policy.store.startswith("sqlite:"):
            raise
        message = str(error)
        raise CommandError(
            f"{message}{' ' if message.endswith(('.', '?')) else '. '}"
            "Start the store, check host and port, or pass another --store"
        ) from None
    return view, policy


@contextlib.contextmanager
def named_store(store: str | None) -> Iterator[tuple[str, StoreSession]]:
    """Connect to the store; give its name and the connection. Initialize an empty store."""
    policy = _policy(store)
    if in_memory(policy.store):
        raise CommandError(
            f"store = '{policy.store}' ends with its process; name a durable store, in the policy or with --store"
        )
    check_file(policy.store)
    found = store_of(policy.store)
    with contextlib.closing(found.connect(_LOOK_S)) as session:
        yield found.name, session


def _policy(store: str | None) -> Policy:
    """Return the policy in force. With ``--store``, an invalid policy must not block status or the kill switch."""
    if store is None:
        try:
            return policy_here()
        except PolicyError as error:
            raise CommandError(f"{error}\npass --store URL to work without this policy") from None
    alone = Policy.validated({"store": store}, "--store")
    try:
        return policy_here(store)
    except PolicyError as error:
        click.echo(f"note: ignoring the local policy; its alerts will not be sent: {error}", err=True)
        return alone


def check_file(store: str) -> None:
    """Reject a directory as a SQLite store; it would look like a file that does not exist yet."""
    if store.startswith("sqlite:") and (path := SqliteStore(store).path).is_dir():
        raise CommandError(
            f"sqlite:///{path}: is a directory; name a file in it, such as sqlite:///{path / 'guard.db'}"
        )


def desk(policy: Policy) -> Guard:
    """Return a guard for operators: it changes accounts and the kill switch and sends the policy's alerts."""
    return Guard(policy.model_copy(update={"telemetry": False}), switches_models=True)


def tell_alerts(guard: Guard) -> list[str]:
    """Wait until the policy's alerts are sent; return a note if they were not."""
    if guard.flush(_ALERTS_S) or guard.alarms is None:
        return []
    return [f"the alerts of the policy were not sent within {_ALERTS_S:g} s"]


def running_in(view: StoreView, scope: str) -> list[str]:
    """Return the ids of the active runs of a scope."""
    return [row.run for row in view.running() if scope == ALL or scope in _scopes(row)]


def begins_with(row: RunningRow, prefix: str) -> bool:
    """Return whether a scope of the run starts with ``prefix``; True for scopes that a run does not tell, as model:."""
    scopes, kind = _scopes(row), prefix.partition(":")[0]
    return any(scope.startswith(prefix) for scope in scopes) or not any(scope.startswith(kind) for scope in scopes)


def known_scopes(view: StoreView) -> list[str]:
    """Return every scope that has a budget in the store or an active run."""
    running = {scope for row in view.running() for scope in _scopes(row)}
    return sorted({row.scope for row in view.budgets()} | running)


def near(scope: str, known: list[str]) -> str:
    """Return a hint for an unknown scope: the nearest one, or the first ones of the store."""
    if not known:
        return "this store has no scope yet"
    return did_you_mean(scope, printable(known), cutoff=0.8, shown=_SHOWN)


def _scopes(row: RunningRow) -> tuple[str, ...]:
    return scopes_of(RunInfo(run=row.run, app=row.app, user=row.user, session=row.session))


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


# ---- ``runguard status`` on a screen

_NAMES: Final = 15
_RUNS: Final = 25


def print_status(
    view: StoreView, policy: Policy, state: dict[str, Any], rows: int | None, store: str | None, scope: str
) -> None:
    hints = [hint("resume", stop.scope, store) for stop in state["stops"]]
    state = printable(state)
    out, now = console(), state["now"]
    out.print(f"{view.name}, {moment(now)}; mode {policy.mode} in the local policy", style="dim", soft_wrap=True)
    for stop, back in zip(state["stops"], hints, strict=True):
        words = f"stopped: {stop.scope}, by {stop.actor} {span(now - stop.at)} ago{stop.because}  ({back})"
        out.print(words, style="bold red", soft_wrap=True)
    _running(out, state["running"])
    _budgets(out, state, rows, printable(scope))
    _spend(out, state["spend"])
    _breakers(out, state["breakers"], now)
    if state["unreadable"]:
        out.print(
            f"\n{state['unreadable']} records could not be read and are not in these figures",
            style="yellow",
            soft_wrap=True,
        )


def _running(out: Console, running: list[RunningRow]) -> None:
    out.print(Text.assemble("\n", heading(f"running now: {len(running)}")))
    if not running:
        return
    shown = table(
        "run",
        "app",
        "user",
        "for",
        "model calls",
        "tool calls",
        "tokens",
        "spent",
        "reserved",
        "",
        right=("for", "model calls", "tool calls", "tokens"),
    )
    for row in running[:_RUNS]:
        remarks = [f"stopped by {row.stopped}"] if row.stopped else []
        remarks += [f"{row.in_flight} in flight"] if row.in_flight else []
        remarks += [f"{row.waiting} waiting"] if row.waiting else []
        remarks += _forecast(row.forecast)
        remarks += row.notes
        spent = usd(row.spent_usd) + (f" + {row.unpriced_calls} unpriced" if row.unpriced_calls else "")
        counts = (_count(row.model_calls), _count(row.tool_calls), _count(row.tokens))
        shown.add_row(
            row.run,
            row.app,
            row.user,
            span(row.seconds or 0),
            *counts,
            spent,
            usd(row.reserved_usd),
            ", ".join(remarks),
        )
    print_table(out, shown)
    if len(running) > _RUNS:
        out.print(f"and {len(running) - _RUNS} more; --json lists all", style="dim")


def _forecast(forecast: RunForecast | None) -> list[str]:
    """Return the nearest limit of a run, as at most one line."""
    if forecast is None:
        return []
    named = (("cap", forecast.cap), ("context window", forecast.window), ("higher price", forecast.tier))
    found = [(ahead.calls_left, name, ahead) for name, ahead in named if ahead is not None]
    if not found:
        return []
    calls, name, ahead = min(found, key=lambda entry: entry[0])
    money = f", {usd(ahead.usd)}" if ahead.usd is not None else ""
    return [f"{name} in about {calls:,} call{'' if calls == 1 else 's'}{money}"]


def _budgets(out: Console, state: dict[str, Any], rows: int | None, scope: str) -> None:
    budgets = state["budgets"]
    out.print(Text.assemble("\n", heading(f"budgets: {len(budgets)}")))
    if not budgets and scope:
        out.print(f"no scope of a budget starts with {scope}; omit --scope to show all", style="dim", soft_wrap=True)
        return
    if not budgets:
        out.print("no budget beyond single runs; set budgets = [...] in the policy", style="dim", soft_wrap=True)
        return
    print_table(out, budget_table(budgets[:rows], state["now"]))
    if rows is not None and len(budgets) > rows:
        out.print(f"and {len(budgets) - rows} more, less full; --all shows them, --scope filters", style="dim")


def _spend(out: Console, spend: Spend) -> None:
    where = f"in {spend.scope} " if spend.scope else ""
    out.print(Text.assemble("\n", heading(f"spent {where}since {moment(spend.since)}: {_figures(spend.total)}")))
    if spend.total.calls or spend.total.tool_calls:
        shown = table(spend.by, "cost", "tokens", "model calls", "", right=("cost", "tokens", "model calls"))
        for row in spend.totals[:_NAMES]:
            shown.add_row(row.name or "(no name)", usd(row.usd), f"{row.tokens:,}", f"{row.calls:,}", _remarks(row))
        print_table(out, shown)
        if len(spend.totals) > _NAMES:
            out.print(f"and {len(spend.totals) - _NAMES} more; --json lists all", style="dim")
    if spend.capped_at is not None:
        out.print(
            f"only the last {spend.capped_at:,} calls were read; earlier calls are missing",
            style="yellow",
            soft_wrap=True,
        )


def _figures(row: Figures) -> str:
    remarks = _remarks(row)
    calls = f"{row.calls:,} model call{'' if row.calls == 1 else 's'}"
    if row.tool_calls:
        calls += f", {row.tool_calls:,} paid tool call{'' if row.tool_calls == 1 else 's'}"
    return f"{usd(row.usd)}, {row.tokens:,} tokens, {calls}" + (f" ({remarks})" if remarks else "")


def _remarks(row: Figures) -> str:
    remarks = [f"{row.unpriced} without a price, not in the cost"] if row.unpriced else []
    remarks += [f"{row.estimated} estimated"] if row.estimated else []
    return ", ".join(remarks)


def _breakers(out: Console, breakers: list[BreakerRow], now: float) -> None:
    if not breakers:
        return
    out.print(Text.assemble("\n", heading("breakers")))
    shown = table("tool", "state", "failures", "in runs", "since", right=("failures", "in runs"))
    for row in breakers:
        state = Text(row.state, "red" if row.state != "closed" else "")
        shown.add_row(
            row.tool,
            state,
            str(row.failures),
            str(row.runs),
            f"{span(now - row.opened_at)} ago" if row.opened_at else "",
        )
    print_table(out, shown)


def _count(number: int | None, unknown: str = "?") -> str:
    return unknown if number is None else f"{number:,}"


def budget_table(rows: Sequence[BudgetRow], now: float) -> Table:
    shown = table(
        "scope",
        "window",
        "spent",
        "reserved",
        "limit",
        "used",
        "",
        right=("spent", "reserved", "limit", "used"),
        whole=("limit",),
    )
    for row in rows:
        what = {"usd": ""}.get(row.unit, f" {row.unit}")
        limit = f"{amount(row.unit, row.limit + row.granted)}{what}"
        colour = "red" if row.closed or row.share >= 1 else "yellow" if row.share >= 0.8 else ""
        shown.add_row(
            row.scope,
            row.window or "",
            amount(row.unit, row.spent),
            amount(row.unit, row.reserved),
            limit,
            Text(f"{row.share:.0%}", colour),
            _budget_remarks(row, now),
        )
    return shown


def _budget_remarks(row: BudgetRow, now: float) -> str:
    remarks = [f"{amount(row.unit, row.granted)} extension"] if row.granted else []
    remarks += [f"{amount(row.unit, row.overrun)} over"] if row.overrun else []
    remarks += ["closed until it is extended" + (" or the next window" if row.ends else "")] if row.closed else []
    remarks += [f"resets in {span(row.ends - now)}"] if row.ends else []
    if row.forecast is not None and row.share < 1:
        at, share = row.forecast.used_up_at, row.forecast.share_at_end
        remarks.append(f"about {share:.0%} by then" if at is None else f"used up in about {span(at - now)}")
    return ", ".join(remarks)


# ---- ``runguard trips`` on a screen

_STORY_ROWS: Final = 60
_WIDE: Final = 130
_COLOURS: Final = {"stop": "red", "block": "yellow", "nudge": "cyan", "warn": "dim"}


def print_trips(view: StoreView, found: list[dict[str, Any]], limit: int, in_all: int, rules: list[str]) -> None:
    out = console()
    if not found:
        none = (
            "no trip yet"
            if not in_all
            else f"none of {in_all} trips matches; their rules are {', '.join(printable(rules))}"
        )
        out.print(f"{view.name}: {none}", soft_wrap=True)
        return
    shown = found[:limit]
    costs = view.costs(shown)  # the cost of each run; the trip of a budget contains only the spending of the budget
    (_narrow if out.width < _WIDE else _wide)(
        out, printable([{**trip, "cost": usd(costs[trip["id"]])} for trip in shown])
    )
    if len(found) > limit:
        out.print(f"and {len(found) - limit} older; --limit shows more", style="dim")
    if view.unreadable.total:
        out.print(f"{view.unreadable.total} records could not be read", style="yellow")
    out.print("runguard trips show ID explains one and says how to continue", style="dim")


def _wide(out: Console, found: list[dict[str, Any]]) -> None:
    shown = table("when", "id", "rule", "where", "what", "cost", "", right=("cost",), whole=("when", "id", "rule"))
    for trip in found:
        mark = Text("shadow: not enforced", "cyan") if trip["shadow"] else Text("")
        shown.add_row(
            moment(trip.get("at")), trip["id"], str(trip.get("rule")), _where(trip), _what(trip), trip["cost"], mark
        )
    print_table(out, shown)


def _narrow(out: Console, found: list[dict[str, Any]]) -> None:
    """Print two lines per trip, because a table would wrap every cell."""
    for trip in found:
        mark = ("  shadow", "cyan") if trip["shadow"] else ("", "")
        out.print(Text.assemble(moment(trip.get("at")), "  ", (trip["id"], "bold"), f"  {trip.get('rule')}", mark))
        out.print(f"  {_where(trip)}  {_what(trip)}, cost {trip['cost']}", style="dim")


def _where(trip: dict[str, Any]) -> str:
    return "/".join(str(part) for part in (trip.get("app"), trip.get("user_id")) if part)


def _what(trip: dict[str, Any]) -> str:
    about = f"{trip['tool']}: " if trip.get("tool") else ""
    if trip.get("unit") == "usd":
        return f"{about}{usd(trip.get('observed'))} with the next call, limit {usd(trip.get('limit'))}"
    if trip.get("rule") in WITHOUT_A_COUNT:
        return about + why_of(trip)[0]
    return f"{about}{counted(trip.get('unit'), trip.get('observed'))}, limit {counted('', trip.get('limit'))}"


def print_trip(story: Story) -> None:
    story = printable(story)
    out, trip = console(), story.trip
    counts = [_count(whole(trip.get(name))) for name in ("model_calls", "tool_calls", "tokens")]
    out.print(str(trip.get("message")), style="bold", soft_wrap=True)
    if trip["shadow"]:
        out.print("shadow: decided but not enforced; the run continued", style="cyan", soft_wrap=True)
    facts = {
        "id": trip["id"],
        "when": moment(trip.get("at")),
        "rule": f"{trip.get('rule')}: {_what(trip)}",
        "scope": f"{trip.get('scope')} {trip.get('scope_id') or ''}".strip(),
        "run": (
            f"{trip.get('run_id')}, app {trip.get('app') or '–'}, user {trip.get('user_id') or '–'}, session "
            f"{trip.get('session_id') or '–'}"
        ),
        "agents": " → ".join(str(name) for name in trip.get("agent_path") or ()),
        "model": trip.get("model") or "",
        "so far": f"{counts[0]} model calls, {counts[1]} tool calls, {counts[2]} tokens, {_cost(story)}",
        "policy": trip.get("policy_digest") or "",
    }
    out.print()
    for name, fact in facts.items():
        if fact:
            out.print(Text.assemble((f"{name:<9}", "dim"), fact), soft_wrap=True)
    _evidence(out, trip)
    _timeline(out, story)
    out.print(Text.assemble("\n", heading("how to continue")))
    for line in how_to_continue(story):
        out.print(f"  {line}", soft_wrap=True)


def _cost(story: Story) -> str:
    cost = usd(story.usd) if story.usd is not None else "cost unknown"
    return f"about {cost}" if story.trip.get("estimated") else cost


def _evidence(out: Console, trip: dict[str, Any]) -> None:
    evidence = [entry for entry in trip.get("evidence") or () if isinstance(entry, dict)]
    if not evidence:
        return
    out.print(Text.assemble("\n", heading("evidence"), ("  digests, not contents", "dim")))
    for entry in evidence:
        out.print("  " + ", ".join(f"{name} {value}" for name, value in entry.items() if value), soft_wrap=True)


def _timeline(out: Console, story: Story) -> None:
    for repeat in story.repeats:
        answers = f", {repeat.same_answer} times with the same answer" if repeat.same_answer > 1 else ""
        out.print(
            Text.assemble(
                "\n", heading("what repeated"), f"  {repeat.what} {repeat.name}: {repeat.times} times{answers}"
            ),
            soft_wrap=True,
        )
    if story.rows:
        source = "" if story.source == "steps" else "  model calls only: this run's steps were not stored"
        out.print(Text.assemble("\n", heading("the run"), (source, "dim")))
        shown = table(
            "after", "agent", "what", "", "tokens", "cost", right=("after", "tokens", "cost"), whole=("after",)
        )
        end = _end(story)
        rows = story.rows[max(end - _STORY_ROWS, 0) : end]
        if earlier := story.left_out + end - len(rows):
            shown.add_row("", "", f"… {earlier} earlier", "", "", "")
        for row in rows:
            tokens = f"{row.tokens_in or 0:,} + {row.tokens_out or 0:,}" if row.kind == "model" else ""
            shown.add_row(f"{row.after_s:.1f}s", row.agent, _row(row), _remark(row), tokens, _row_cost(row))
        if end < len(story.rows):
            shown.add_row("", "", f"… {len(story.rows) - end} later", "", "", "")
        print_table(out, shown)
    if story.usd is not None:
        later = f", {usd(story.later_usd)} after it" if story.later_usd else ""
        out.print(f"cost up to the stop: {usd(story.usd)}{later}", soft_wrap=True)
    if (ahead := story.projection) is not None:
        words = (
            f"projection: at {usd(ahead.mean_usd)} a call, ADK's own cap of {ahead.cap} calls would have let it "
            f"cost {usd(ahead.total_usd)}"
        )
        out.print(words, style="dim", soft_wrap=True)


def _row(row: StoryRow) -> Text:
    if row.kind == "decision":
        return Text(
            f"{row.decision} by {row.what}" + (f" of {row.name}" if row.name else ""), _COLOURS.get(row.decision, "")
        )
    return Text(f"{row.what} {row.name}".rstrip())


def _end(story: Story) -> int:
    """Return the position after the row of this stop; in shadow mode, and in other branches, the run continues."""
    rule = story.trip.get("rule")
    decided = [
        position
        for position, row in enumerate(story.rows, 1)
        if row.kind == "decision" and row.decision == "stop" and row.what == rule
    ]
    return decided[0] if decided else len(story.rows)


def _remark(row: StoryRow) -> str:
    again = f"same call {row.nth_call} times" if row.nth_call > 1 else ""
    same = f"same answer {row.nth_answer} times" if row.nth_answer > 1 else ""
    if row.nth_call == row.nth_answer > 1:
        again, same = f"same call and answer {row.nth_call} times", ""
    return ", ".join(part for part in (row.outcome, again, same) if part)


def _row_cost(row: StoryRow) -> str:
    if row.kind != "model":
        return ""
    return ("≈" if row.estimated else "") + usd(row.usd) if row.usd is not None else "?"


def how_to_continue(story: Story) -> list[str]:
    """Return the advice of the trip, and the command that does it if there is one."""
    return [line for line in (str(story.trip.get("resume") or ""), story.command) if line]


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
                _count(line["context_window"], "unknown"),
                _count(line["max_output_tokens"], "unknown"),
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


def _cells(prices: dict[str, str]) -> list[str]:
    return [usd_text(nanos(Decimal(prices[kind]))) if kind in prices else "" for kind in ("input", "output", "cached")]


def _what_follows(result: dict[str, Any]) -> str:
    if not result["limits_usd"]:
        return "its calls are allowed and counted in tokens, because no limit in dollars is set; their cost is unknown"
    if result["on_unpriced"] == "tokens":
        return 'on_unpriced = "tokens": its calls are allowed and counted in tokens; limits in dollars ignore them'
    return "its calls are refused, because the policy limits dollars"
