"""The ``runguard`` command.

A command's module is imported when the command runs: ``runguard --help`` loads only click.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import click

from runguard._version import __version__

COMMANDS: Final[
    dict[str, dict[str, str]]
] = {  # heading -> command -> summary; each command is a module of cli/commands
    "Start": {
        "demo": "Show runaway agents being stopped and healthy ones left alone.",
        "init": "Write a commented runguard.toml.",
        "check": "Validate a policy file and show what it changes.",
        "doctor": "Check the installation and prove that a stop works.",
    },
    "Try a policy": {
        "replay": "Show what a policy would have done to recorded runs.",
        "calibrate": "Propose limits from recorded runs.",
        "gate": "Fail a build that stops good runs, costs more or misses a loop.",
        "prices": "Show what models cost and where the price comes from.",
    },
    "Inspect": {
        "status": "Show budgets, spend, running runs, stops and breakers.",
        "spend": "Show what calls cost by app, user, model or label, for a bill.",
        "trips": "List the trips in a store, or show one with its evidence.",
        "dashboard": "Serve a web page for a store, on loopback.",
    },
    "Act": {
        "stop": "Stop a run, session, user, app or everything (the kill switch).",
        "resume": "Lift a stop.",
        "extend": "Raise the budget of a scope.",
        "store": "Show the id of a store; accept it as a replacement; repair it; delete what is old.",
    },
}


_AS_JSON: Final = "runguard.as_json"
_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


@contextmanager
def _errors_as_json(ctx: click.Context) -> Iterator[None]:
    """Print a usage error as JSON if ``--json`` was given; otherwise click prints it."""
    try:
        yield
    except click.ClickException as error:
        if not ctx.meta.get(_AS_JSON):
            raise
        from runguard.cli.commands.command import print_json

        print_json({"ok": False, "error": error.format_message()})
        ctx.exit(2)


def _open_closed_streams() -> None:
    """Replace streams that the caller closed (``>&-``); otherwise the next opened file would take their descriptor."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - until the process ends


class LazyGroup(click.Group):
    """A group that lists its commands from the table and imports a command's module when it runs."""

    def main(self, *args: Any, **options: Any) -> Any:
        _open_closed_streams()
        try:
            try:
                return super().main(*args, **options)
            finally:
                sys.stdout.flush()  # an error here has an exit code; at interpreter exit it would only be printed
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:  # a reader such as head has closed the pipe
                sys.exit(1)
            click.echo(f"cannot write the result: {error.strerror}", err=True)
            sys.exit(2)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_AS_JSON] = "--json" in args
        with _errors_as_json(ctx):
            if args[:1] == ["--json"]:
                ctx.fail("put --json after a command: runguard status --json")
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_as_json(ctx):
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command; click could only search loaded commands, and none is loaded yet."""
        name, known = args[0], self.list_commands(ctx)
        if not (name in known or name.startswith("-") or ctx.resilient_parsing):
            from runguard.core.errors import nearest

            ctx.fail(f"No such command {name!r}; {nearest(name, known)}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for group in COMMANDS.values() for name in group]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"runguard.cli.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, group in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl(list(group.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", prog_name="runguard", message="%(prog)s %(version)s")
def main() -> None:
    """The circuit breaker for AI agents: stops a runaway run before its next paid call."""
