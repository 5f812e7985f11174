"""The base of every command: examples in its help, and one readable message instead of a traceback."""

import json
import sys
from textwrap import dedent
from typing import Any, NoReturn

import click


class CommandError(RuntimeError):
    """Invalid input, or something cannot be reached: one message, exit code 2."""


class Command(click.Command):
    """A command whose errors end with a message and exit code 2; with ``--json`` as ``{"ok": false, "error": ...}``."""

    def __init__(self, *args: Any, examples: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = dedent(examples).strip()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self.examples.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RuntimeError as error:  # a RunGuardError, too; imported late to keep --help light
            from runguard.core.errors import RunGuardError

            if not isinstance(error, CommandError | RunGuardError):
                raise
            fail(ctx, str(error))


class CommandGroup(Command, click.Group):
    """A command with subcommands."""


def fail(ctx: click.Context, message: str, **more: Any) -> NoReturn:
    """Exit with code 2 and one message, as text or JSON."""
    if ctx.params.get("as_json"):
        print_json({"ok": False, **more, "error": message})
    else:
        from runguard.core.decision import printable_lines

        click.echo(printable_lines(message), err=True)
    sys.exit(2)


def print_json(data: Any) -> None:
    """Print one JSON document on stdout, with money as decimal strings."""
    click.echo(json.dumps(data, indent=2, default=str))
