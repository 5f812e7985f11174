"""The ``runguard`` command: its table of commands, and what every command shares.

A command's module is imported when the command runs: ``runguard --help`` loads only click. ``policy_commands``,
``gateway_commands`` and ``store_commands`` define the commands with the classes and options of this module.
"""

import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, NoReturn

import click

from runguard._version import __version__

# heading -> command -> summary
COMMANDS: Final[dict[str, dict[str, str]]] = {
    "Start": {
        "demo": "Show runaway agents being stopped and healthy ones left alone.",
        "init": "Write a commented runguard.toml.",
        "check": "Validate a policy file and show what it changes.",
        "doctor": "Check the installation and prove that a stop works.",
    },
    "Guard a program": {
        "run": "Guard any program, in any language, without a change of its code.",
        "gateway": "Guard the programs of a team: a gateway to OpenAI, Anthropic and Gemini.",
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
_HOMES: Final = {"Start": "policy_commands", "Guard a program": "gateway_commands", "Try a policy": "policy_commands"}
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
            from runguard.core.errors import did_you_mean

            ctx.fail(f"No such command {name!r}; {did_you_mean(name, known)}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for group in COMMANDS.values() for name in group]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        heading = next((heading for heading, group in COMMANDS.items() if cmd_name in group), None)
        if heading is None:
            return None
        home = _HOMES.get(heading, "store_commands")
        command: click.Command = getattr(import_module(f"runguard.cli.{home}"), f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, group in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl(list(group.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", prog_name="runguard", message="%(prog)s %(version)s")
def main() -> None:
    """The circuit breaker for AI agents: stops a runaway run before its next paid call."""


# ---- the base of every command: examples in its help, and one readable message instead of a traceback


class CommandError(RuntimeError):
    """Invalid input, or something cannot be reached: one message, exit code 2."""


def check_dollars(option: str, usd: str | None) -> None:
    """Check the amount of an option here, because the policy's message would name a setting."""
    from decimal import Decimal, InvalidOperation

    from runguard.core.money import to_nano

    if usd is None:
        return
    try:
        is_more = Decimal(usd).is_finite() and Decimal(usd) > 0
    except InvalidOperation:
        is_more = False
    if not is_more and usd.strip().startswith("-"):
        raise CommandError(f"{option} {usd}: must be greater than 0")
    if not is_more:
        raise CommandError(f"{option} {usd}: must be a number of dollars greater than 0, such as 2.50")
    to_nano(usd, option)


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
        except PermissionError as error:
            if error.filename is None:
                raise
            fail(ctx, f"{error.filename}: {error.strerror}; check the permissions of the file and of its folders")


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
    """Print one JSON document on stdout, dataclasses as objects and money as decimal strings."""
    import json

    from runguard.view.story import plain

    click.echo(json.dumps(plain(data), indent=2, default=str))


def print_notes(notes: list[str]) -> None:
    from runguard.core.decision import printable

    for note in printable(notes):
        click.echo(f"  note: {note}")


# ---- options that several commands share

_SPAN: Final = re.compile(r"(\d{1,6})\s*([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)I?B?", re.IGNORECASE)


class Since(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic only in newer releases of click
    """A time in the past as unix seconds: 90m, 24h, 7d, or a day such as 2026-11-01."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if (found := _SPAN.fullmatch(value.strip().lower())) is not None:
            return time.time() - int(found[1]) * _SECONDS[found[2]]  # noqa: TID251 - a command uses the system's clock
        from datetime import datetime

        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            self.fail(
                f"{value!r} is not a time; use a span such as 90m, 24h or 7d, or a day such as 2026-11-01", param, ctx
            )


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of bytes such as 500MB or 4GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        size = int(float(found[1]) * _UNITS[found[2].upper()]) if found is not None else 0
        if size < 1:
            self.fail(f"{value!r} is not a size such as 500MB or 4GB", param, ctx)
        return size


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
store_option = click.option("--store", metavar="URL", help="The store. Default: the store of the policy in force here.")
policy_option = click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path),
    help="The policy file. Default: the file that a run started here would use.",
)
model_option = click.option(
    "--model", default="", help="The model of recordings that do not name one, for prices and windows."
)
workers_option = click.option(
    "--workers", type=click.IntRange(1, 256), help="Number of processes. Default: one per core."
)
unpacked_option = click.option(
    "--max-unpacked",
    type=Size(),
    default="1GB",
    show_default=True,
    metavar="SIZE",
    help="How much of each compressed file to read: 500MB, 4GB.",
)
