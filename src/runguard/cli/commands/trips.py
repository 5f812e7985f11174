"""``runguard trips``: list the trips of a store, or show one with its story."""

from typing import TYPE_CHECKING, Any, Final

import click

from runguard.cli.commands.command import Command, CommandError, CommandGroup, print_json
from runguard.cli.commands.options import Since, json_option, store_option

if TYPE_CHECKING:
    from runguard.view.store_view import StoreView

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
def command(
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
    from runguard.cli.commands.stores import look_at

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
    from runguard.cli.commands.trips_screen import print_trips

    print_trips(view, found, limit, len(trips), rules)


@command.command(
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
    from runguard.cli.commands.stores import look_at
    from runguard.view.rows import plain

    view, _ = look_at(store or (ctx.parent.params.get("store") if ctx.parent is not None else None))
    story = view.story(_id(view, trip))
    assert story is not None
    from runguard.cli.commands.trips_screen import how_to_continue, print_trip

    if as_json or (ctx.parent is not None and ctx.parent.params.get("as_json")):
        data: dict[str, Any] = plain(story)
        print_json({"ok": True, "store": view.name, **data, "do": how_to_continue(story)})
    else:
        print_trip(story)


def _id(view: "StoreView", given: str) -> str:
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
