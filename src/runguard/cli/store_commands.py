"""Commands on a store: status, spend, trips, dashboard, stop, resume, extend and store.

``main`` imports this module for any of them, also for its help: everything heavy is imported inside of the commands.
"""

import json
import os
import re
import sys
import time
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from runguard.cli.main import (
    Command,
    CommandError,
    CommandGroup,
    Since,
    check_dollars,
    json_option,
    print_json,
    print_notes,
    store_option,
)

if TYPE_CHECKING:
    from runguard.policy import Policy
    from runguard.view.store import BillRow, StoreView
    from runguard.view.story import BudgetRow


# ---- ``runguard status``: show the current state of a store

_ROWS: Final = 25


@click.command(
    "status",
    cls=Command,
    examples="""
    runguard status
    runguard status --by user --since 7d
    runguard status --scope user:docs/ --all
    runguard status --store redis://cache:6379/0 --json
    """,
)
@click.option(
    "--scope",
    metavar="PREFIX",
    default="",
    help="Only budgets, runs and spending whose scope starts with this: user:, user:docs/alice.",
)
@click.option(
    "--by",
    type=click.Choice(["app", "agent", "model", "user", "tool"]),
    default="app",
    show_default=True,
    help="Group spending by this.",
)
@click.option(
    "--since",
    type=Since(),
    default="24h",
    show_default=True,
    help="Spending since this time: 90m, 24h, 7d, 2026-11-01.",
)
@click.option("--all", "every", is_flag=True, help="Every budget, not only the fullest.")
@store_option
@json_option
def status_command(scope: str, by: str, since: float, every: bool, store: str | None, as_json: bool) -> None:
    """Show budgets, spend, running runs, stops and breakers.

    Covers all workers that share the store. Budgets show what is spent and what calls in flight have reserved. Exit
    code 0 if nothing needs attention, 1 if a stop is in force, a breaker is open or a budget is used up, 2 if the store
    cannot be read.
    """
    from runguard.cli.screens import look_at, print_status
    from runguard.core.errors import did_you_mean
    from runguard.core.money import KINDS

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
    sys.exit(1 if attention else 0)


def _gather(view: "StoreView", scope: str, by: str, since: float) -> dict[str, Any]:
    from runguard.cli.screens import begins_with

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


def _rate_limits(policy: "Policy") -> set[tuple[str, str | None]]:
    """Return kind and window of the budgets that wait: they are meant to be used up."""
    from runguard.core.money import Per

    ways: dict[tuple[str, str | None], set[str]] = {}
    for budget in policy.budgets:
        ways.setdefault((Per.parse(budget.per).kind, budget.window), set()).add(budget.on_exhausted)
    return {key for key, found in ways.items() if found == {"wait"}}


def _is_used_up(row: "BudgetRow") -> bool:
    """Return whether a budget is spent; an unspent cap of 0 is a plan without money, not a used-up budget."""
    return row.closed or (row.spent > 0 and row.spent >= row.limit + row.granted)


# ---- ``runguard spend``: what the calls of a store cost, grouped for a bill

_DAYS: Final = re.compile(r"([1-9]\d{0,3})([dw])")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins with one of these


class Day(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A day in UTC: 30d or 4w back, today included, or 2026-11-01."""

    name = "day"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date:
        if isinstance(value, date):
            return value
        if (found := _DAYS.fullmatch(value.strip().lower())) is not None:
            days = int(found[1]) * (7 if found[2] == "w" else 1)
            return datetime.now(UTC).date() - timedelta(days - 1)  # noqa: TID251 - a command uses the system's clock
        try:
            return date.fromisoformat(value.strip())
        except ValueError:
            self.fail(f"{value!r} is not a day; sums are kept by day: use 30d, 4w or 2026-11-01", param, ctx)


@click.command(
    "spend",
    cls=Command,
    examples="""
    runguard spend --by app,user --since 30d
    runguard spend --by day,model --since 2026-11-01 --until 2026-11-30
    runguard spend --by label:team --csv > november.csv
    """,
)
@click.option(
    "--by",
    default="app",
    show_default=True,
    metavar="GROUPS",
    help="What to group by, with commas: day, app, user, agent, model, tool, label:NAME.",
)
@click.option("--since", type=Day(), default="30d", show_default=True, help="The first day: 30d, 4w, 2026-11-01.")
@click.option("--until", type=Day(), default="1d", help="The last day. Default: today.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
@store_option
@json_option
def spend_command(by: str, since: date, until: date, as_csv: bool, store: str | None, as_json: bool) -> None:
    """Show what calls cost by app, user, model or label, for a bill.

    Days are in UTC. Sums are exact and equal the budgets' accounts; they are kept when old records are purged. Exit
    code 0, also if nothing was spent, or 2 if the store cannot be read.
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    if since > until:
        raise click.UsageError(f"--since {since} is after --until {until}")
    from runguard.cli.screens import look_at
    from runguard.view.store import bill_of, check_groups

    groups = check_groups([name.strip() for name in by.split(",") if name.strip()] or ["app"])
    view, _ = look_at(store)
    days = view.daily_sums(since, until)
    unreadable = sum(sums.unreadable for sums in days.values())
    rows, total = bill_of(days, groups)
    if as_json:
        named = [dict(zip(groups, row.names, strict=True)) | _figures(row) for row in rows]
        facts = {"ok": True, "store": view.name, "since": str(since), "until": str(until), "by": groups}
        print_json({**facts, "rows": named, "total": _figures(total), "unreadable": unreadable})
    elif as_csv:
        _print_csv(groups, rows)
    else:
        _print_bill(f"{view.name}: {since} to {until} (UTC)", groups, rows, total, unreadable)


def _figures(row: "BillRow") -> dict[str, Any]:
    from runguard.view.story import plain

    return {name: value for name, value in plain(row).items() if name != "names"}


def _print_csv(groups: tuple[str, ...], rows: list["BillRow"]) -> None:
    import csv

    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*groups, "calls", "tool_calls", "input_tokens", "output_tokens", "usd", "unpriced", "estimated"])
    for row in rows:
        names = [f"'{name}" if name.startswith(_FORMULA) else name for name in row.names]
        out.writerow([*names, *_figures(row).values()])


def _print_bill(title: str, groups: tuple[str, ...], rows: list["BillRow"], total: "BillRow", unreadable: int) -> None:
    from runguard.console import console, heading, print_table, table, usd
    from runguard.core.decision import printable

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


@click.group(
    "trips",
    cls=CommandGroup,
    invoke_without_command=True,
    examples="""
    runguard trips
    runguard trips --rule budget --user alice --since 7d
    runguard trips show 3f2a9c
    runguard trips show last --json
    """,
)
@click.option("--rule", help="Only stops by this rule.")
@click.option("--user", help="Only stops of this user.")
@click.option("--since", type=Since(), help="Only since this time: 90m, 24h, 7d, 2026-11-01.")
@click.option(
    "--limit",
    type=click.IntRange(1, _READ),
    default=50,
    show_default=True,
    help="The highest number of trips, newest first.",
)
@store_option
@json_option
@click.pass_context
def trips_command(
    ctx: click.Context,
    rule: str | None,
    user: str | None,
    since: float | None,
    limit: int,
    store: str | None,
    as_json: bool,
) -> None:
    """List the trips in a store, or show one with its evidence.

    Newest first. Trips of shadow mode, which were not enforced, are marked. Exit code 0, also if there is none, or 2 if
    the store cannot be read.
    """
    if ctx.invoked_subcommand is not None:
        return
    from runguard.cli.screens import look_at, print_trips

    view, _ = look_at(store)
    trips = view.trips(_READ)
    rules = sorted({str(trip.get("rule")) for trip in trips})
    wanted = {"rule": rule, "user_id": user}
    found = [
        t
        for t in trips
        if all(value is None or t.get(key) == value for key, value in wanted.items())
        and (since is None or (t.get("at") or 0) >= since)
    ]
    if as_json:
        print_json(
            {
                "ok": True,
                "store": view.name,
                "count": len(found),
                "trips": found[:limit],
                "unreadable": view.unreadable.total,
            }
        )
        return
    print_trips(view, found, limit, len(trips), rules)


@trips_command.command(
    "show",
    cls=Command,
    examples="""
    runguard trips show 3f2a9c
    runguard trips show last
    """,
)
@click.argument("trip")
@store_option
@json_option
@click.pass_context
def show(ctx: click.Context, trip: str, store: str | None, as_json: bool) -> None:
    """Show one trip: its reason, its evidence, the story of the run, how to continue.

    TRIP is an id from the list, a unique prefix of one, or `last`. Exit code 0, or 2 if there is no such trip or the
    store cannot be read.
    """
    from dataclasses import asdict

    from runguard.cli.screens import how_to_continue, look_at, print_trip

    view, _ = look_at(store or (ctx.parent.params.get("store") if ctx.parent is not None else None))
    story = view.story(_trip_id(view, trip))
    assert story is not None
    if as_json or (ctx.parent is not None and ctx.parent.params.get("as_json")):
        print_json({"ok": True, "store": view.name, **asdict(story), "do": how_to_continue(story)})
    else:
        print_trip(story)


def _trip_id(view: "StoreView", given: str) -> str:
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


# ---- ``runguard dashboard``: serve a web page for a store, on loopback

_PORT = 8420


@click.command(
    "dashboard",
    cls=Command,
    examples="runguard dashboard\nrunguard dashboard --store sqlite:///guard.db --port auto --no-open",
)
@store_option
@click.option("--port", default=str(_PORT), show_default=True, help="The port; auto takes any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="A loopback address.")
@click.option("--no-open", is_flag=True, help="Print the address without opening a browser.")
@json_option
def dashboard_command(store: str | None, port: str, host: str, no_open: bool, as_json: bool) -> None:
    """Serve a web page for a store, on loopback.

    Shows spending over time, budgets, running runs, breakers, and trips with their stories; live and read-only. The
    address contains a token that works once. Needs a durable store: SQLite, Redis or Valkey, PostgreSQL. Exit code 2 if
    it cannot start.
    """
    import secrets
    import webbrowser

    from runguard.cli.gateway_commands import address_of, installed, listening_on
    from runguard.cli.screens import look_at

    with installed("dashboard"):
        from runguard.cli.dashboard.server import serve

        if not address_of(host, "a loopback address, 127.0.0.1 or ::1").is_loopback:
            raise CommandError(
                f"--host {host}: the page has no users or passwords, so it listens on loopback only (127.0.0.1 or "
                f"::1). From another machine, forward the port: ssh -L {_PORT}:127.0.0.1:{_PORT} this-machine"
            )
        if port != "auto" and not (port.isdecimal() and int(port) <= 65_535):
            raise CommandError(f"--port {port}: must be a number up to 65535, or auto")
    view, _ = look_at(store)
    do = ", perhaps by another dashboard; choose another one with --port, or pass --port auto for any free one"
    with listening_on(host, 0 if port == "auto" else int(port), do) as listening:
        token = secrets.token_urlsafe(24)
        name, number = listening.getsockname()[:2]
        address = f"http://{f'[{name}]' if ':' in name else name}:{number}/?token={token}"
        try:
            if as_json:
                # one line, because a caller reads it while this process runs
                click.echo(json.dumps({"ok": True, "url": address, "store": view.name}))
            else:
                click.echo(
                    f"RunGuard dashboard for {view.name}\n\n  {address}\n\nThe link works once, in one "
                    "browser. Ctrl+C ends it."
                )
            sys.stdout.flush()
            if not no_open and has_screen():
                webbrowser.open(address)
            serve(view, token, listening)
        except KeyboardInterrupt:
            pass


def has_screen() -> bool:
    """Return whether there is a screen; without one, a text browser would take over the terminal."""
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# ---- ``runguard stop``: the kill switch for every worker that shares a store


def _user() -> str:
    from runguard.engine.guard import this_user

    return this_user()


@click.command(
    "stop",
    cls=Command,
    examples="""
    runguard stop user:docs/alice --reason "looking into her bill"
    runguard stop app:docs --reason "bad release" --actor oncall
    runguard stop all --reason "provider incident" --store redis://cache:6379/0
    """,
)
@click.argument("scope")
@click.option("--reason", default="", help="The reason; every following trip contains it.")
@click.option("--actor", default=_user, show_default="the user of this system", help="Who stops the scope.")
@store_option
@json_option
def stop_command(scope: str, reason: str, actor: str, store: str | None, as_json: bool) -> None:
    """Stop a run, session, user, app or everything (the kill switch).

    SCOPE is run:ID, session:APP/USER/ID, user:APP/USER, app:APP or all. Every worker that shares the store ends
    model calls in flight within about a second and refuses later calls and new runs, until `runguard resume SCOPE`.
    Exit code 0 if the stop is in force, 2 if not.
    """
    from runguard.cli.screens import desk, known_scopes, look_at, near, running_in, tell_alerts
    from runguard.core.decision import printable
    from runguard.ledger.ledger import ALL, check_scope
    from runguard.view.story import hint

    check_scope(scope)
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
    if as_json:
        print_json(
            {
                "ok": True,
                "scope": scope,
                "actor": actor,
                "reason": reason,
                "store": view.name,
                "running": runs,
                "notes": notes,
            }
        )
        return
    click.echo(printable(f"stopped: {scope}, by {actor}" + (f": {reason}" if reason else "")))
    if runs:
        runs = printable(runs)
        click.echo(
            f"  {len(runs)} running now; they end within about a second: "
            f"{', '.join(runs[:5])}{' and more' if len(runs) > 5 else ''}"
        )
    print_notes(notes)
    click.echo(f"  lift it with: {hint('resume', scope, store)}")


# ---- ``runguard resume``: lift a stop


@click.command(
    "resume",
    cls=Command,
    examples="""
    runguard resume user:docs/alice
    runguard resume all
    """,
)
@click.argument("scope")
@store_option
@json_option
def resume_command(scope: str, store: str | None, as_json: bool) -> None:
    """Lift a stop.

    SCOPE is the scope given to `runguard stop`. The next turn continues where the last one ended. A spent budget is not
    a stop: see `runguard extend`. Exit code 0 if the stop was lifted, 1 if there was none, 2 if the store cannot be
    used.
    """
    from runguard.cli.screens import desk, look_at, tell_alerts
    from runguard.core.decision import printable
    from runguard.core.errors import PolicyError
    from runguard.ledger.ledger import check_scope

    try:
        check_scope(scope)
    except PolicyError as error:
        raise CommandError(str(error).replace(" cannot be stopped;", " cannot be resumed;")) from None
    view, policy = look_at(store)
    stops = {stop.scope: stop for stop in view.stops()}
    before = stops.pop(scope, None)
    notes = []
    if before is not None:
        guard = desk(policy)
        guard.operator_stops.release(scope)
        notes = tell_alerts(guard)
    if as_json:
        facts = {"ok": before is not None, "scope": scope, "store": view.name}
        print_json({**facts, "stop": before, "stops": list(stops.values()), "notes": notes})
    else:
        before, stops, scope = printable((before, stops, scope))
        if before is None:
            click.echo(f"{scope} is not stopped", err=True)
        else:
            click.echo(f"resumed: {scope}, stopped by {before.actor}{before.because}")
        for stop in stops.values():
            click.echo(f"  still stopped: {stop.scope}, by {stop.actor}{stop.because}")
        print_notes(notes)
    sys.exit(0 if before is not None else 1)


# ---- ``runguard extend``: raise the budget of a scope in its current period


@click.command(
    "extend",
    cls=Command,
    examples="""
    runguard extend user:docs/alice --usd 5
    runguard extend session:docs/alice/s1 --tokens 200000
    runguard extend app:docs --usd 20 --calls 500 --store sqlite:///guard.db
    """,
)
@click.argument("scope")
@click.option("--usd", metavar="DOLLARS", help="Dollars to add.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens to add.")
@click.option("--calls", type=click.IntRange(min=1), help="Model calls to add.")
@store_option
@json_option
def extend_command(
    scope: str, usd: str | None, tokens: int | None, calls: int | None, store: str | None, as_json: bool
) -> None:
    """Raise the budget of a scope.

    SCOPE is a scope as `runguard status` shows it, or a trip's scope_id. The command raises all its budgets in that
    unit, in every current window. Past spending still counts, and the next period begins with the policy's amount
    again. Exit code 0 if a budget was raised, 2 if there is no such budget.
    """
    from runguard.cli.screens import budget_table, desk, known_scopes, look_at, near, tell_alerts
    from runguard.console import console, print_table
    from runguard.core.decision import printable
    from runguard.core.errors import PolicyError

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
    print_notes(notes)


# ---- ``runguard store``: show the id of a store, accept a replaced one, repair it, delete what is old

_TRIES: Final = 5


@click.group(
    "store",
    cls=CommandGroup,
    invoke_without_command=True,
    examples="""
    runguard store
    runguard store adopt 3f2a9c0d5e6b7a81
    runguard store adopt 3f2a9c0d5e6b7a81 --store redis://cache:6379/0
    runguard store repair
    runguard store purge --older-than 7d
    """,
)
@store_option
@json_option
@click.pass_context
def store_command(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """Show the id of a store; accept it as a replacement; repair it; delete what is old.

    A store has a random id in its data. Running workers refuse a store with another id than the one they know. Exit
    code 0, 1 if the control document (stops and breakers) is damaged, 2 if the store cannot be read.
    """
    if ctx.invoked_subcommand is not None:
        return
    from runguard.cli.screens import look_at
    from runguard.core.decision import printable

    view, _ = look_at(store)
    own, *replaced = view.identity()
    damage = view.damage()
    if as_json:
        print_json(
            {"ok": not damage, "store": view.name, "id": own or None, "replaces": replaced, "damage": damage or None}
        )
    else:
        click.echo(printable(view.name))
        click.echo(f"  id: {own or 'none yet; the next worker creates it'}")
        for old in replaced:
            click.echo(f"  replaces: {old}")
        if damage:
            click.echo(printable(f"  {damage}"))
    sys.exit(1 if damage else 0)


@store_command.command(
    "adopt",
    cls=Command,
    examples="""
    runguard store adopt 3f2a9c0d5e6b7a81
    runguard store adopt 3f2a9c0d5e6b7a81 --store redis://cache:6379/0
    """,
)
@click.argument("replaced", metavar="ID")
@store_option
@json_option
def adopt_command(replaced: str, store: str | None, as_json: bool) -> None:
    """Accept this store as the replacement of the one with the given id.

    The alert `store_replaced` and the log of the workers that refuse contain the ID. Running workers accept this store
    within about a second. Budgets continue from the accounts of this store; stops of the old store are not in force.
    Exit code 0 if the store is accepted, 2 if it cannot be reached.
    """
    from runguard.cli.screens import named_store
    from runguard.core.decision import printable
    from runguard.ledger.ledger import adopt, is_id

    if not is_id(replaced):
        raise CommandError(
            f"{replaced}: an id has 16 digits of 0-9 and a-f; find it in the alert or in the log line "
            "runguard.store_replaced"
        )
    with named_store(store) as (name, session):
        own, *others = adopt(session, name, replaced)
        accounts = len(session.read())
    if as_json:
        print_json({"ok": True, "store": name, "id": own, "replaces": others, "accounts": accounts})
        return
    click.echo(printable(f"adopted: {name}, id {own}, replaces {replaced}"))
    known = (
        f"has {accounts} accounts: budgets continue from them" if accounts else "is empty: all budgets start at zero"
    )
    click.echo(f"  it {known}. Stops of the old store are not in force: repeat `runguard stop` for each one you need")


@store_command.command("repair", cls=Command, examples="runguard store repair")
@store_option
@json_option
def repair(store: str | None, as_json: bool) -> None:
    """Remove a damaged control document.

    The document holds the stops of the kill switch and the breakers of tools. While it cannot be read, RunGuard allows
    no call, because the document may hold a stop. Afterwards no stop is in force: repeat `runguard stop` for each one
    you need. Exit code 0 if no damage is left, 2 if the store cannot be reached.
    """
    from runguard.cli.screens import named_store
    from runguard.core.decision import printable
    from runguard.ledger.ledger import repair_control

    with named_store(store) as (name, session):
        found = repair_control(session, name)
    if as_json:
        print_json({"ok": True, "store": name, "repaired": bool(found), "found": found or None})
    elif found:
        click.echo(printable(f"removed: {found}"))
        click.echo("  no stop is in force now: repeat `runguard stop` for each one you need")
    else:
        click.echo("nothing to repair: the control document is readable")


@store_command.command("purge", cls=Command, examples="runguard store purge --older-than 7d")
@click.option(
    "--older-than", "since", type=Since(), required=True, metavar="TIME", help="A span such as 12h or 7d, or a day."
)
@store_option
@json_option
def purge_command(since: float, store: str | None, as_json: bool) -> None:
    """Delete records, ended runs and past periods that are older.

    Workers do the same once an hour with the policy's `retention_days`. What calls cost stays as sums of days, so
    `runguard spend` does not change. The last minute is always kept. Exit code 0 if it is done, 2 if the store cannot
    be reached.
    """
    from runguard.cli.screens import named_store
    from runguard.core.decision import printable
    from runguard.ledger.ledger import purge

    older_than = time.time() - since  # noqa: TID251 - a command uses the system's clock
    if older_than <= 0:
        raise CommandError("--older-than names a time in the future: use a span such as 7d")
    with named_store(store) as (name, session):
        if not any(purge(session, older_than) for _ in range(_TRIES)):
            raise CommandError(f"{name}: a worker is summing up its records at this moment; try again")
    if as_json:
        print_json({"ok": True, "store": name, "older_than_seconds": round(older_than)})
    else:
        click.echo(printable(f"purged: {name}; what calls cost is kept as sums of days"))
