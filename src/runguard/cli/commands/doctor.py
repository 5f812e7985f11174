"""``runguard doctor``: check the installation and prove that a stop works."""

import sys
from typing import TYPE_CHECKING

import click

from runguard.cli.commands.command import Command, print_json
from runguard.cli.commands.options import json_option, store_option

if TYPE_CHECKING:
    from runguard.cli.doctor.environment import CheckResult


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
    help="Your app: an agent folder as for adk web, or module:attribute (App, Runner, or an agent of any framework). "
    "Its code runs.",
)
@click.option("--model", "models", multiple=True, help="A model in use, to look up its price. May be repeated.")
@store_option
@json_option
def command(target: str | None, models: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Check the installation and prove that a stop works.

    Checks Python, google-adk and its features, other frameworks, other packages of the same name, the policy, the order
    of plugins, agents without a guard, the store and the prices of the models in use. A live test then stops agents on
    real ADK with a scripted model, without network. Exit code 0 without a problem (warnings are allowed), 1 with one, 2
    if APP does not exist.
    """
    from runguard.cli.doctor.examine import examine

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


def _print(lines: "list[CheckResult]") -> None:
    from rich.text import Text

    from runguard.console.screen import console
    from runguard.core.decision import printable

    out, colours = console(), {"ok": "green", "warning": "yellow", "problem": "bold red"}
    for line in lines:
        # indent an error of several lines below its heading
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
