"""``runguard doctor``: is everything in place, and does a stop stop?"""

import sys
from typing import TYPE_CHECKING

import click

from runguard.cli.commands.command import Command, json_option, print_json, store_option

if TYPE_CHECKING:
    from runguard.cli.doctor.line import Line


@click.command(
    "doctor",
    cls=Command,
    examples="""
    runguard doctor
    runguard doctor --app agents/docs
    runguard doctor --app my_service.main:app --model gemini-2.5-flash
    """,
)
@click.option(
    "--app",
    "target",
    metavar="APP",
    help="Your app: an agent folder as adk web takes it, or module:attribute (an App, a Runner or an agent). Loaded.",
)
@click.option(
    "--model", "models", multiple=True, help="A model in use, to look up its price; several times for several."
)
@store_option
@json_option
def command(target: str | None, models: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Look whether everything is in place, and that a stop stops.

    Python, google-adk and what it can do, another package of the same name, the policy, the order of plugins, the
    store, prices of the models in use, and a live test: agents on real ADK with a scripted model, no network, must be
    stopped. Exit code 0 without a problem (warnings may stand), 1 with one, 2 when APP does not exist.
    """
    from runguard.cli.doctor.examination import examine

    lines = examine(target, models, store)
    ok = all(line.state != "problem" for line in lines)
    if as_json:
        print_json(
            {
                "ok": ok,
                "checks": [
                    {"check": line.check, "state": line.state, "found": line.found, "do": line.do} for line in lines
                ],
            }
        )
    else:
        _print(lines)
    sys.exit(0 if ok else 1)


def _print(lines: "list[Line]") -> None:
    from rich.text import Text

    from runguard.console.screen import console
    from runguard.core.printable import printable

    out, colours = console(), {"ok": "green", "warning": "yellow", "problem": "bold red"}
    for line in lines:
        # an error of several lines stays below its heading
        found = f"\n{'':20}".join(printable(line.found.split("\n")))
        out.print(
            Text.assemble((f"{line.state:<8}", colours[line.state]), (f"{line.check:<12}", "bold"), found),
            soft_wrap=True,
        )
        if line.do:
            out.print(f"{'':20}→ {printable(line.do)}", soft_wrap=True)
    problems, warnings = (sum(line.state == state for line in lines) for state in ("problem", "warning"))
    out.print(
        f"{problems or 'no'} problem{'' if problems == 1 else 's'}, {warnings or 'no'} "
        f"warning{'' if warnings == 1 else 's'}",
        style="dim",
    )
