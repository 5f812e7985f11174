"""Commands on a store: status, spend, trips, stop, resume, extend and store; what they read, change and print.

``main`` declares them.
"""

import contextlib
import csv
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runguard.cli.main import CommandError, answer, check_dollars, noted, print_json
from runguard.cli.policy_commands import policy_here
from runguard.console import amount, console, heading, moment, print_table, span, table, usd
from runguard.core.decision import printable
from runguard.core.errors import PolicyError, did_you_mean
from runguard.core.events import RunInfo
from runguard.core.money import KINDS, Per
from runguard.engine.guard import Guard, this_user
from runguard.engine.spending import scopes_of
from runguard.ledger import ledger
from runguard.ledger.ledger import ALL, StoreDeniedError, StoreOutage, StoreSession, check_scope, is_id
from runguard.ledger.memory import in_memory, store_of
from runguard.ledger.sqlite import SqliteStore
from runguard.policy.settings import Policy
from runguard.view.store import BillRow, StoreView, bill_of, check_groups
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
    plain,
    whole,
    why_of,
)

# ---- the store that a command reads or changes, ``--store`` or the store of the policy in force

_ALERTS_S: Final = 5.0
_LOOK_S: Final = 3.0
_SCOPES: Final = 20


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
    return did_you_mean(scope, printable(known), cutoff=0.8, shown=_SCOPES)


def _scopes(row: RunningRow) -> tuple[str, ...]:
    return scopes_of(RunInfo(run=row.run, app=row.app, user=row.user, session=row.session))


# ---- ``runguard status``: show the current state of a store

_ROWS: Final = 25
_NAMES: Final = 15
_RUNS: Final = 25


def status(scope: str, by: str, since: float, every: bool, store: str | None, as_json: bool) -> int:
    kind = scope.partition(":")[0].partition("+")[0]
    if not any(known.startswith(kind) for known in KINDS):
        raise CommandError(f"--scope {scope}: no such scope; {did_you_mean(kind, KINDS)}")
    view, policy = look_at(store)
    state = _gather(view, scope, by, since)
    limits = _rate_limits(policy)
    attention = (
        bool(state["stops"])
        or any(b.state != "closed" for b in state["breakers"])
        or any(_is_used_up(row) and (row.scope.partition(":")[0], row.window) not in limits for row in state["budgets"])
    )
    if as_json:
        names = ("by", "since", "until", "total", "totals", "capped_at", "scope")
        spend = {name: getattr(state["spend"], name) for name in names}
        print_json({"ok": not attention, "store": view.name, "mode": policy.mode, **state, "spend": spend})
    else:
        print_status(view, policy, state, None if every else _ROWS, store, scope)
    return int(attention)


def _gather(view: StoreView, scope: str, by: str, since: float) -> dict[str, Any]:
    now = view.now()
    budgets = [row for row in view.budgets() if row.scope.startswith(scope)]
    return {
        "now": now,
        "stops": view.stops(),
        "running": [row for row in view.running() if begins_with(row, scope)],
        "budgets": budgets,
        "spend": view.spend(since, now, by, scope),
        "breakers": view.breakers(),
        "unreadable": view.unreadable.total,
    }


def _rate_limits(policy: Policy) -> set[tuple[str, str | None]]:
    """Return kind and window of the budgets that wait: they are meant to be used up."""
    ways: dict[tuple[str, str | None], set[str]] = {}
    for budget in policy.budgets:
        ways.setdefault((Per.parse(budget.per).kind, budget.window), set()).add(budget.on_exhausted)
    return {key for key, found in ways.items() if found == {"wait"}}


def _is_used_up(row: BudgetRow) -> bool:
    """Return whether a budget is spent; an unspent cap of 0 is a plan without money, not a used-up budget."""
    return row.closed or (row.spent > 0 and row.spent >= row.limit + row.granted)


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


# ---- ``runguard spend``: what the calls of a store cost, grouped for a bill

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins with one of these


def spend(by: str, since: date, until: date, as_csv: bool, store: str | None, as_json: bool) -> None:
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    if since > until:
        raise click.UsageError(f"--since {since} is after --until {until}")
    groups = check_groups([name.strip() for name in by.split(",") if name.strip()] or ["app"])
    view, _ = look_at(store)
    days = view.daily_sums(since, until)
    unreadable = sum(sums.unreadable for sums in days.values())
    rows, total = bill_of(days, groups)
    if as_json:
        named = [dict(zip(groups, row.names, strict=True)) | _sums_of(row) for row in rows]
        facts = {"ok": True, "store": view.name, "since": str(since), "until": str(until), "by": groups}
        print_json({**facts, "rows": named, "total": _sums_of(total), "unreadable": unreadable})
    elif as_csv:
        _print_csv(groups, rows)
    else:
        _print_bill(f"{view.name}: {since} to {until} (UTC)", groups, rows, total, unreadable)


def _sums_of(row: BillRow) -> dict[str, Any]:
    return {name: value for name, value in plain(row).items() if name != "names"}


def _print_csv(groups: tuple[str, ...], rows: list[BillRow]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*groups, "calls", "tool_calls", "input_tokens", "output_tokens", "usd", "unpriced", "estimated"])
    for row in rows:
        names = [f"'{name}" if name.startswith(_FORMULA) else name for name in row.names]
        out.writerow([*names, *_sums_of(row).values()])


def _print_bill(title: str, groups: tuple[str, ...], rows: list[BillRow], total: BillRow, unreadable: int) -> None:
    out = console()
    if not rows:
        out.print(f"{title}: no call is recorded", soft_wrap=True)
        return
    out.print(heading(title), soft_wrap=True)
    right = ("calls", "priced tool calls", "input", "output", "cost")
    shown = table(*groups, *right, "", right=right, whole=(*right,))
    for row in [*rows, total] if len(rows) > 1 else rows:
        names = ["total", *[""] * (len(groups) - 1)] if row is total else [printable(name) or "–" for name in row.names]
        remarks = [
            f"{row.unpriced:,} without a price" if row.unpriced else "",
            f"{row.estimated:,} estimated" if row.estimated else "",
        ]
        counts = (row.calls, row.tool_calls, row.input_tokens, row.output_tokens)
        shown.add_row(*names, *[f"{count:,}" for count in counts], usd(row.usd), ", ".join(filter(None, remarks)))
    print_table(out, shown)
    if unreadable:
        out.print(f"{unreadable} records could not be read", style="yellow")


# ---- ``runguard trips``: list the trips of a store, or show one with its story

_READ: Final = 10_000
_NAMED: Final = 10
_STORY_ROWS: Final = 60
_WIDE: Final = 130
_COLOURS: Final = {"stop": "red", "block": "yellow", "nudge": "cyan", "warn": "dim"}


def trips(
    rule: str | None, user: str | None, since: float | None, limit: int, store: str | None, as_json: bool
) -> None:
    view, _ = look_at(store)
    known = view.trips(_READ)
    wanted = {"rule": rule, "user_id": user}
    found = [
        t
        for t in known
        if all(value is None or t.get(key) == value for key, value in wanted.items())
        and (since is None or (t.get("at") or 0) >= since)
    ]
    if as_json:
        facts = {"count": len(found), "trips": found[:limit], "unreadable": view.unreadable.total}
        print_json({"ok": True, "store": view.name, **facts})
    else:
        print_trips(view, found, limit, known)


def show_trip(trip: str, store: str | None, as_json: bool) -> None:
    view, _ = look_at(store)
    story = view.story(_trip_id(view, trip))
    assert story is not None
    if as_json:
        print_json({"ok": True, "store": view.name, **asdict(story), "do": how_to_continue(story)})
    else:
        print_trip(story)


def _trip_id(view: StoreView, given: str) -> str:
    """Return the full id of a trip; the error message names existing ones."""
    if given != "last" and view.trip(given) is not None:
        return given
    known = [str(trip["id"]) for trip in view.trips(_READ)]
    matching = known[:1] if given == "last" else [name for name in known if name.startswith(given)]
    if len(matching) == 1:
        return matching[0]
    if not known:
        raise CommandError(f"{view.name}: no trip yet")
    if matching:
        raise CommandError(f"{given!r} matches several trips: {', '.join(matching[:_NAMED])}")
    raise CommandError(
        f"{given!r}: no such trip. The last ones are {', '.join(known[:_NAMED])}; `runguard trips` lists them"
    )


def print_trips(view: StoreView, found: list[dict[str, Any]], limit: int, known: list[dict[str, Any]]) -> None:
    out = console()
    if not found:
        rules = sorted({str(trip.get("rule")) for trip in known})
        matches = f"none of {len(known)} trips matches; their rules are {', '.join(printable(rules))}"
        none = matches if known else "no trip yet"
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


# ---- ``runguard stop``: the kill switch for every worker that shares a store


def stop(scope: str, reason: str, actor: str | None, store: str | None, as_json: bool) -> None:
    check_scope(scope)
    actor = this_user() if actor is None else actor
    if not actor.strip():
        raise CommandError("--actor: must not be empty")
    reason = reason if reason.strip() else ""
    view, policy = look_at(store)
    before = next((stop for stop in view.stops() if stop.scope == scope), None)
    runs = running_in(view, scope)
    guard = desk(policy)
    guard.operator_stops.throw(scope, actor, reason)
    notes = [f"it was already stopped by {before.actor}{before.because}"] if before is not None else []
    if not runs and before is None and scope != ALL and scope not in (known := known_scopes(view)):
        notes.append(f"the store has no budget and no active run of {scope}; {near(scope, known)}")
    notes += tell_alerts(guard)
    facts = {"scope": scope, "actor": actor, "reason": reason, "store": view.name, "running": runs, "notes": notes}
    lines = [f"stopped: {scope}, by {actor}" + (f": {reason}" if reason else "")]
    if runs:
        named = f"{', '.join(runs[:5])}{' and more' if len(runs) > 5 else ''}"
        lines.append(f"  {len(runs)} running now; they end within about a second: {named}")
    answer(as_json, {"ok": True, **facts}, [*lines, *noted(notes), f"  lift it with: {hint('resume', scope, store)}"])


# ---- ``runguard resume``: lift a stop


def resume(scope: str, store: str | None, as_json: bool) -> int:
    try:
        check_scope(scope)
    except PolicyError as error:
        raise CommandError(str(error).replace(" cannot be stopped;", " cannot be resumed;")) from None
    view, policy = look_at(store)
    stops = {stop.scope: stop for stop in view.stops()}
    before = stops.pop(scope, None)
    notes: list[str] = []
    if before is not None:
        guard = desk(policy)
        guard.operator_stops.release(scope)
        notes = tell_alerts(guard)
    facts = {"ok": before is not None, "scope": scope, "store": view.name, "stop": before}
    lines = [f"resumed: {scope}, stopped by {before.actor}{before.because}"] if before is not None else []
    lines += [f"  still stopped: {other.scope}, by {other.actor}{other.because}" for other in stops.values()]
    if before is None and not as_json:
        click.echo(printable(f"{scope} is not stopped"), err=True)
    answer(as_json, {**facts, "stops": list(stops.values()), "notes": notes}, [*lines, *noted(notes)])
    return int(before is None)


# ---- ``runguard extend``: raise the budget of a scope in its current period


def extend(
    scope: str, usd: str | None, tokens: int | None, calls: int | None, store: str | None, as_json: bool
) -> None:
    if usd is None and tokens is None and calls is None:
        raise CommandError("nothing to add: pass --usd, --tokens or --calls")
    check_dollars("--usd", usd)
    view, policy = look_at(store)
    known = known_scopes(view)
    guard = desk(policy)
    try:
        moved = {
            (status.scope, status.window, status.unit) for status in guard.accounts.extend(scope, usd, tokens, calls)
        }
    except PolicyError:
        units = sorted({row.unit for row in view.budgets(ended_runs=True) if row.scope == scope})
        if units:
            raise CommandError(
                f"{scope}: its budgets limit {' and '.join(units)}; pass --{' or --'.join(units)}"
            ) from None
        raise CommandError(f"{scope}: no budget of that scope; {near(scope, known)}") from None
    notes = tell_alerts(guard)
    if scope not in known and not scope.startswith("run:"):  # a run that has ended may go on
        notes.append(f"until now the store had no budget and no active run of {scope}; {near(scope, known)}")
    rows = [row for row in view.budgets(ended_runs=True) if (row.scope, row.window, row.unit) in moved]
    if as_json:
        print_json({"ok": True, "scope": scope, "budgets": rows, "store": view.name, "notes": notes})
        return
    click.echo(f"extended: {printable(scope)}")
    print_table(console(), budget_table(printable(rows), view.now()))
    answer(as_json, {}, noted(notes))


# ---- ``runguard store``: show the id of a store, accept a replaced one, repair it, delete what is old

_TRIES: Final = 5


def identify(store: str | None, as_json: bool) -> int:
    view, _ = look_at(store)
    own, *replaced = view.identity()
    damage = view.damage()
    facts = {"store": view.name, "id": own or None, "replaces": replaced, "damage": damage or None}
    lines = [view.name, f"  id: {own or 'none yet; the next worker creates it'}"]
    lines += [f"  replaces: {old}" for old in replaced]
    answer(as_json, {"ok": not damage, **facts}, [*lines, f"  {damage}"] if damage else lines)
    return int(bool(damage))


def adopt(replaced: str, store: str | None, as_json: bool) -> None:
    if not is_id(replaced):
        raise CommandError(
            f"{replaced}: an id has 16 digits of 0-9 and a-f; find it in the alert or in the log line "
            "runguard.store_replaced"
        )
    with named_store(store) as (name, session):
        own, *others = ledger.adopt(session, name, replaced)
        accounts = len(session.read())
    known = (
        f"has {accounts} accounts: budgets continue from them" if accounts else "is empty: all budgets start at zero"
    )
    lines = [
        f"adopted: {name}, id {own}, replaces {replaced}",
        f"  it {known}. Stops of the old store are not in force: repeat `runguard stop` for each one you need",
    ]
    answer(as_json, {"ok": True, "store": name, "id": own, "replaces": others, "accounts": accounts}, lines)


def repair(store: str | None, as_json: bool) -> None:
    with named_store(store) as (name, session):
        found = ledger.repair_control(session, name)
    lines = ["nothing to repair: the control document is readable"]
    if found:
        lines = [f"removed: {found}", "  no stop is in force now: repeat `runguard stop` for each one you need"]
    answer(as_json, {"ok": True, "store": name, "repaired": bool(found), "found": found or None}, lines)


def purge(since: float, store: str | None, as_json: bool) -> None:
    older_than = time.time() - since  # noqa: TID251 - a command uses the system's clock
    if older_than <= 0:
        raise CommandError("--older-than names a time in the future: use a span such as 7d")
    with named_store(store) as (name, session):
        if not any(ledger.purge(session, older_than) for _ in range(_TRIES)):
            raise CommandError(f"{name}: a worker is summing up its records at this moment; try again")
    facts = {"ok": True, "store": name, "older_than_seconds": round(older_than)}
    answer(as_json, facts, [f"purged: {name}; what calls cost is kept as sums of days"])
