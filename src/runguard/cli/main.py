"""The ``runguard`` command.

A command's module is loaded when it is called: ``runguard --help`` loads nothing but click.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final

import click

from runguard._version import __version__

COMMANDS: Final[dict[str, dict[str, str]]] = {  # heading -> command -> what it does; each is a module of cli/commands
    "Begin": {
        "demo": "Watch runaway agents being stopped, healthy ones left alone.",
        "init": "Write a commented runguard.toml.",
        "check": "Validate a policy file and show what it changes.",
        "doctor": "Look whether everything is in place, and that a stop stops.",
    },
    "Try a policy": {
        "replay": "Show what a policy would have done to recorded runs.",
        "calibrate": "Propose limits from recorded runs.",
        "prices": "Show what models cost, and where the price is from.",
    },
    "Look": {
        "status": "Show budgets, spend, running runs, stops and breakers.",
        "trips": "List the stops that were decided; show one with its evidence.",
        "dashboard": "Serve a page over a store, on loopback.",
    },
    "Act": {
        "stop": "Stop a run, session, user, app or everything: the kill switch.",
        "resume": "Take a stop back.",
        "extend": "Raise the budget of a scope.",
        "store": "Show which store this is; accept it in place of another one.",
    },
}


_AS_JSON: Final = "runguard.as_json"
_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


@contextmanager
def _told_as_asked(ctx: click.Context) -> Iterator[None]:
    """A command line that cannot be meant, told as JSON to whoever asked for JSON; otherwise click tells it."""
    try:
        yield
    except click.ClickException as error:
        if not ctx.meta.get(_AS_JSON):
            raise
        from runguard.cli.commands.command import print_json

        print_json({"ok": False, "error": error.format_message()})
        ctx.exit(2)


def _open_closed_streams() -> None:
    """Closed by the caller (``>&-``) a stream is None, and the next file that is opened would get its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - until the process ends


class LazyGroup(click.Group):
    """A group whose commands are modules: listed from the table, imported when called."""

    def main(self, *args: Any, **options: Any) -> Any:
        _open_closed_streams()
        try:
            try:
                return super().main(*args, **options)
            finally:
                sys.stdout.flush()  # here rather than at the interpreter's end, which could only complain
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:  # a reader such as head has seen enough
                sys.exit(1)
            click.echo(f"the result cannot be written: {error.strerror}", err=True)
            sys.exit(2)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_AS_JSON] = "--json" in args
        with _told_as_asked(ctx):
            if args[:1] == ["--json"]:
                ctx.fail("--json stands behind a command, such as: runguard status --json")
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _told_as_asked(ctx):
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click looks for near names among commands that are loaded, and here none is."""
        name, known = args[0], self.list_commands(ctx)
        if not (name in known or name.startswith("-") or ctx.resilient_parsing):
            near = " or ".join(repr(command) for command in get_close_matches(name, known))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near}?" if near else ""))
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
