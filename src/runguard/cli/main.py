"""The ``runguard`` command: every command with its options and its help, and what all commands share.

A command names the function that does its work. The module of that function is imported when the command runs, so that
help loads only click. ``policy_commands``, ``store_commands``, ``gateway_commands``, ``recordings``, ``demo``,
``doctor`` and ``dashboard/server`` hold these functions. A function returns the exit code, or None for 0.
"""

import errno
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from runguard._version import __version__

# ---- the base of every command: examples in its help, and one readable message instead of a traceback

_NEEDED: Final = ("starlette", "uvicorn", "httpx", "h11", "anyio", "httpcore")  # by the gateway and the dashboard


class CommandError(RuntimeError):
    """Invalid input, or something cannot be reached: one message, exit code 2. ``facts`` go into the JSON."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts


class Command(click.Command):
    """A command whose errors end with a message and exit code 2; with ``--json`` as ``{"ok": false, "error": ...}``."""

    def __init__(
        self, name: str, work: str, about: str, params: Sequence[click.Parameter], examples: str, **more: Any
    ) -> None:
        """``work``: module and function below ``runguard.cli``. ``extra``: what its module needs to be installed."""
        self._work, self._extra, self.examples = work, more.pop("extra", ""), cleandoc(examples)
        super().__init__(name=name, help=cleandoc(about), params=[*params, JSON], callback=self._do, **more)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self.examples.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        for name in ctx.params.keys() & {"store", "as_json"}:  # a subcommand takes those of its command
            if ctx.parent is not None:
                ctx.params[name] = ctx.params[name] or ctx.parent.params.get(name, ctx.params[name])
        try:
            return super().invoke(ctx)
        except RuntimeError as error:  # a RunGuardError, too; imported late to keep --help light
            from runguard.core.errors import RunGuardError

            if not isinstance(error, CommandError | RunGuardError):
                raise
            fail(ctx, str(error), **getattr(error, "facts", {}))
        except PermissionError as error:
            if error.filename is None:
                raise
            fail(ctx, f"{error.filename}: {error.strerror}; check the permissions of the file and of its folders")

    def _do(self, **given: Any) -> None:
        if click.get_current_context().invoked_subcommand is not None:
            return
        module, _, name = self._work.partition(":")
        try:
            work = getattr(import_module(f"runguard.cli.{module}"), name)
        except ImportError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in _NEEDED:
                raise
            do = f"pip install 'runguard-agents[{self._extra}]'"
            raise CommandError(f"the {self._extra} needs {missing}, which is not installed: {do}") from None
        if code := work(**given):
            sys.exit(code)


class CommandGroup(Command, click.Group):
    """A command with subcommands."""


def fail(ctx: click.Context, message: str, **facts: Any) -> NoReturn:
    """Exit with code 2 and one message, as text or JSON."""
    if ctx.params.get("as_json"):
        print_json({"ok": False, **facts, "error": message})
    else:
        from runguard.core.decision import printable_lines

        click.echo(printable_lines(message), err=True)
    sys.exit(2)


def print_json(data: Any) -> None:
    """Print one JSON document on stdout, dataclasses as objects and money as decimal strings."""
    import json

    from runguard.view.story import plain

    click.echo(json.dumps(plain(data), indent=2, default=str))


def answer(as_json: bool, facts: dict[str, Any], lines: Sequence[str]) -> None:
    """Print the facts as JSON, or the lines for people."""
    from runguard.core.decision import printable

    if as_json:
        print_json(facts)
        return
    for line in lines:
        click.echo(printable(line))


def noted(notes: Sequence[str]) -> list[str]:
    return [f"  note: {note}" for note in notes]


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
    if not is_more:
        is_number = usd.strip().startswith("-")
        wanted = "greater than 0" if is_number else "a number of dollars greater than 0, such as 2.50"
        raise CommandError(f"{option} {usd}: must be {wanted}")
    to_nano(usd, option)


# ---- values of options

_SPAN: Final = re.compile(r"(\d{1,6})\s*([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DAYS: Final = re.compile(r"([1-9]\d{0,3})([dw])")
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
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            self.fail(
                f"{value!r} is not a time; use a span such as 90m, 24h or 7d, or a day such as 2026-11-01", param, ctx
            )


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


# ---- arguments and options that several commands share

_PATH: Final = click.Path(path_type=Path)
_FILE: Final = click.Path(path_type=Path, dir_okay=False)
JSON: Final = click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON.")
_STORE: Final = click.Option(
    ["--store"], metavar="URL", help="The store. Default: the store of the policy in force here."
)
_POLICY: Final = click.Option(
    ["--policy", "policy_file"],
    type=_PATH,
    help="The policy file. Default: the file that a run started here would use.",
)
_SCOPE: Final = click.Argument(["scope"])
# of the commands that read recordings
_SOURCE: Final = click.Argument(["source"])
_READING: Final = (
    click.Option(["--model"], default="", help="The model of recordings that do not name one, for prices and windows."),
    click.Option(["--workers"], type=click.IntRange(1, 256), help="Number of processes. Default: one per core."),
    click.Option(
        ["--max-unpacked"],
        type=Size(),
        default="1GB",
        show_default=True,
        metavar="SIZE",
        help="How much of each compressed file to read: 500MB, 4GB.",
    ),
)
# of the commands that guard programs from outside
_GUARDING: Final = (
    _POLICY,
    click.Option(
        ["--upstream"],
        multiple=True,
        metavar="NAME=URL",
        help="The address of a provider: openai, anthropic or gemini. Repeat it for several.",
    ),
    click.Option(
        ["--on-stop"],
        type=click.Choice(["answer", "error"]),
        default="answer",
        show_default=True,
        help="A stop is an answer that ends the run, or an error with status 429.",
    ),
)
DASHBOARD_PORT: Final = 8420
GATEWAY_PORT: Final = 8788

# ---- every command, under its heading

COMMANDS: Final[dict[str, list[Command]]] = {
    "Start": [
        Command(
            "demo",
            "demo:run",
            """
            Show runaway agents being stopped and healthy ones left alone.

            Runs four runaways and six healthy look-alikes, each without and with the guard on its defaults, on real
            Google ADK with scripted models: no network, no key. Exit code 0 if every runaway was stopped and no healthy
            run was touched, 1 otherwise, 2 without google-adk.
            """,
            [],
            "runguard demo\nrunguard demo --json",
        ),
        Command(
            "init",
            "policy_commands:init",
            """
            Write a commented runguard.toml.

            FILE defaults to ./runguard.toml. The development preset caps a run at $0.50 and keeps everything in memory;
            the production preset caps it at $5, keeps accounts in a file and logs alerts. Exit code 0 if the file was
            written, 2 if not. Only --force replaces an existing file.
            """,
            [
                click.Argument(["file"], default="runguard.toml", type=_FILE),
                click.Option(
                    ["--preset"],
                    type=click.Choice(["development", "production"]),
                    default="development",
                    show_default=True,
                    help="The purpose of the file.",
                ),
                click.Option(["--force"], is_flag=True, help="Replace an existing file."),
            ],
            """
            runguard init
            runguard init --preset production
            runguard init --preset production deploy/runguard.toml --force
            """,
        ),
        Command(
            "check",
            "policy_commands:check",
            """
            Validate a policy file and show what it changes.

            FILE is a runguard.toml, or a pyproject.toml with [tool.runguard]. Default: the file that a run started here
            would use. Exit code 0 if the policy is valid, 1 if FILE is a pyproject.toml without a [tool.runguard]
            table, 2 if the policy, RUNGUARD_MODE or RUNGUARD_STORE is not valid.
            """,
            [
                click.Argument(["file"], required=False, type=_PATH),
                click.Option(
                    ["--schema"], is_flag=True, help="Print the JSON Schema of runguard.toml and do nothing else."
                ),
            ],
            """
            runguard check
            runguard check deploy/runguard.toml
            runguard check --schema > runguard.schema.json
            """,
        ),
        Command(
            "doctor",
            "doctor:run",
            """
            Check the installation and prove that a stop works.

            Checks Python, google-adk and its features, other frameworks, other packages of the same name, the policy,
            the order of plugins, agents without a guard, the store and the prices of the models in use. A live test
            then stops agents on real ADK with a scripted model, without network. Exit code 0 without a problem
            (warnings are allowed), 1 with one, 2 if APP does not exist.
            """,
            [
                click.Option(
                    ["--app", "target"],
                    metavar="APP",
                    help="Your app: an agent folder as for adk web, or module:attribute (App, Runner, or an agent of "
                    "any framework). Its code runs.",
                ),
                click.Option(
                    ["--model", "models"],
                    multiple=True,
                    help="A model in use, to look up its price. May be repeated.",
                ),
                _STORE,
            ],
            """
            runguard doctor
            runguard doctor --app agents/docs
            runguard doctor --app my_service.main:app --model gemini-2.5-flash
            """,
        ),
    ],
    "Guard a program": [
        Command(
            "run",
            "gateway_commands:run",
            """
            Guard any program, in any language, without a change of its code.

            Starts a gateway on a free port of this machine, points the known clients at it (OPENAI_BASE_URL,
            ANTHROPIC_BASE_URL, GOOGLE_GEMINI_BASE_URL), and runs the program. Requests go on to where these variables
            pointed before, or to the provider. Loop rules and budgets hold as everywhere; a stop is an answer in the
            format of the provider, so that the program ends normally. One line on stderr says at the end what happened;
            with --json it is one JSON document on stderr. Exit code: that of the program; 2 if it was not started
            because the settings are invalid, 126 or 127 if it cannot be executed.
            """,
            [
                click.Argument(["program"], nargs=-1, type=click.UNPROCESSED),
                click.Option(["--max-usd"], metavar="USD", help="Dollars that the whole program may spend."),
                click.Option(
                    ["--max-tokens"], type=click.IntRange(1), help="Tokens of the whole program, input and output."
                ),
                click.Option(["--max-calls"], type=click.IntRange(1), help="Model calls of the whole program."),
                *_GUARDING,
                click.Option(["--dashboard"], is_flag=True, help="Show the program on a live page while it runs."),
                click.Option(
                    ["--demo"],
                    is_flag=True,
                    help="Run an agent that loops against a scripted model, without a network.",
                ),
            ],
            """
            runguard run --demo
            runguard run --max-usd 5 -- claude -p "fix the tests"
            runguard run --max-calls 200 --upstream openai=http://localhost:8080/v1 -- node agent.mjs
            runguard run --policy runguard.toml --dashboard -- python bot.py
            """,
            extra="gateway",
            context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        ),
        Command(
            "gateway",
            "gateway_commands:gateway",
            """
            Guard the programs of a team: a gateway to OpenAI, Anthropic and Gemini.

            Point OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL at it. Keys of providers pass through
            and are never stored; each key is a user of its own, known by a digest. It listens on this machine only.
            With another --host it needs a token of 16 characters or more in RUNGUARD_GATEWAY_TOKEN, which clients send
            as the header x-runguard-token, or in the path: http://HOST:PORT/token/TOKEN/v1. Several gateways may share
            one store. Exit code 2 if it cannot start.
            """,
            [
                click.Option(
                    ["--host"],
                    default="127.0.0.1",
                    show_default=True,
                    help="The address; any but loopback needs a token.",
                ),
                click.Option(
                    ["--port"],
                    default=GATEWAY_PORT,
                    show_default=True,
                    type=click.IntRange(0, 65_535),
                    help="The port; 0: any.",
                ),
                click.Option(
                    ["--app", "app_name"],
                    default="gateway",
                    show_default=True,
                    help="The app that budgets per app count for.",
                ),
                click.Option(
                    ["--user-header"],
                    default="",
                    metavar="NAME",
                    help="The header that names the user, where a trusted proxy sets it. Default: by the provider's "
                    "key.",
                ),
                click.Option(
                    ["--max-body"],
                    type=Size(),
                    default="64MB",
                    show_default=True,
                    help="The largest request to a model.",
                ),
                click.Option(
                    ["--idle"],
                    type=click.FloatRange(1),
                    default=1_800.0,
                    show_default=True,
                    help="Seconds after which idle runs end.",
                ),
                *_GUARDING,
            ],
            """
            runguard gateway
            runguard gateway --port 8788 --policy runguard.toml
            runguard gateway --host 0.0.0.0 --user-header x-forwarded-user --upstream openai=http://vllm:8000/v1
            """,
            extra="gateway",
        ),
    ],
    "Try a policy": [
        Command(
            "replay",
            "recordings:replay",
            """
            Show what a policy would have done to recorded runs.

            SOURCE is an ADK session database (a SQLite file, or postgresql://...), ADK's JSON (a session export, an
            eval set), a RunGuard store (SQLite, postgresql://... or redis://...), JSONL of runs (plain or .gz), or a
            folder of those. Replay writes nothing to it, enforces nothing and sends no alert. It skips and counts
            records that cannot be read. Exit code 2 if the source or a policy cannot be used, no run can be read, or
            the run to explain does not exist.
            """,
            [
                _SOURCE,
                _POLICY,
                click.Option(["--against"], type=_PATH, help="A second policy, shown side by side."),
                click.Option(
                    ["--html", "page"],
                    type=_FILE,
                    help="Write one self-contained page with plots to this file.",
                ),
                click.Option(
                    ["--explain"],
                    metavar="RUN",
                    help="Show why this run stopped or not, and the highest count of each rule. A unique prefix of an "
                    "id is enough.",
                ),
                click.Option(
                    ["--all", "every"],
                    is_flag=True,
                    help="Also show runs that the policy would not have touched.",
                ),
                *_READING,
            ],
            """
            runguard replay sessions.db
            runguard replay sessions.db --policy strict.toml --against runguard.toml
            runguard replay runs.jsonl.gz --html report.html
            runguard replay sessions.db --explain e-1b7f
            """,
        ),
        Command(
            "calibrate",
            "recordings:calibrate",
            """
            Propose limits from recorded runs.

            SOURCE is any source of 'runguard replay', or a log with one JSON object per run: usd, tokens or calls, and
            optionally id and ok. Limits are 2.5 times the 95th percentile of the successful runs, with its confidence
            interval. Exit code 0 with a proposal, 1 if there is nothing to propose, 2 if the source or a file cannot be
            used.
            """,
            [
                _SOURCE,
                _POLICY,
                click.Option(
                    ["--write", "target"],
                    metavar="FILE",
                    type=_FILE,
                    help="Write the proposal as a commented runguard.toml.",
                ),
                click.Option(["--force"], is_flag=True, help="Let --write replace a file."),
                *_READING,
            ],
            """
            runguard calibrate sessions.db
            runguard calibrate runs.jsonl.gz --write runguard.toml
            runguard calibrate costs.jsonl
            runguard calibrate runs/ --policy now.toml
            """,
        ),
        Command(
            "gate",
            "recordings:gate",
            """
            Fail a build that stops good runs, costs more or misses a loop.

            SOURCE is any source of 'runguard replay': recorded runs that must keep working. The gate fails if the
            policy would stop a successful run or refuse one of its calls, if the cost per success rises beyond its
            interval, if a run of --loops is not stopped, or if a record cannot be read. It runs no agent and changes no
            source. Exit code 0 if every check passes, 1 if one fails, 2 if a source, policy or file cannot be used.
            """,
            [
                _SOURCE,
                _POLICY,
                click.Option(
                    ["--loops"],
                    multiple=True,
                    metavar="SOURCE",
                    help="Recorded loops, each of which must be stopped. Repeatable.",
                ),
                click.Option(["--baseline"], type=_FILE, help="The figures to compare the cost per success with."),
                click.Option(
                    ["--update-baseline"],
                    is_flag=True,
                    help="Write the file of --baseline instead of comparing with it.",
                ),
                click.Option(
                    ["--max-rise"],
                    type=click.FloatRange(0, 1000),
                    default=0.0,
                    metavar="PERCENT",
                    help="By how much the cost per success may rise. Default: by what chance explains.",
                ),
                click.Option(
                    ["--assume-success"],
                    is_flag=True,
                    help="Treat unlabelled recordings as successful, unless RunGuard stopped them.",
                ),
                click.Option(["--junit"], type=_FILE, help="Write the result as JUnit XML to this file."),
                click.Option(
                    ["--markdown"],
                    type=_FILE,
                    help="Write the result as Markdown to this file, for a pull request.",
                ),
                *_READING,
            ],
            """
            runguard gate recorded/ --assume-success
            runguard gate recorded/ --loops loops.jsonl --baseline gate.json
            runguard gate recorded/ --baseline gate.json --update-baseline
            runguard gate recorded/ --loops loops.jsonl --junit gate.xml --markdown gate.md
            """,
        ),
        Command(
            "prices",
            "policy_commands:prices",
            """
            Show what models cost and where the price comes from.

            Prices are in dollars per million tokens, under the policy in force here. MODEL is an id as your agents use
            it, or a glob over the known models. Default: the models that the policy names, and those seen in its store.
            Exit code 0 if every model has a price, 1 if one has none, 2 if the policy or the store cannot be used.

            Runs use the newest of the built-in table, the installed genai-prices and the table that --update wrote.
            --update writes a table from the installed genai-prices or from FILE, if that is newer than the table there
            is. It does not use the network. Exit code 2 if genai-prices is not installed, FILE is not a price table or
            the table cannot be written.
            """,
            [
                click.Argument(["models"], nargs=-1, metavar="[MODEL]..."),
                click.Option(
                    ["--update"],
                    is_flag=True,
                    help="First write the prices of the installed genai-prices, for all later runs.",
                ),
                click.Option(
                    ["--from", "table"],
                    type=click.Path(exists=True, dir_okay=False, path_type=Path),
                    metavar="FILE",
                    help="With --update: take the price table FILE, which `runguard prices --update` wrote elsewhere.",
                ),
                _STORE,
            ],
            """
            runguard prices gemini-2.5-flash
            runguard prices 'claude-sonnet-*' openai/gpt-5-mini
            runguard prices
            runguard prices --update
            runguard prices --update --from prices.jsonl
            """,
        ),
    ],
    "Inspect": [
        Command(
            "status",
            "store_commands:status",
            """
            Show budgets, spend, running runs, stops and breakers.

            Covers all workers that share the store. Budgets show what is spent and what calls in flight have reserved.
            Exit code 0 if nothing needs attention, 1 if a stop is in force, a breaker is open or a budget is used up, 2
            if the store cannot be read.
            """,
            [
                click.Option(
                    ["--scope"],
                    metavar="PREFIX",
                    default="",
                    help="Only budgets, runs and spending whose scope starts with this: user:, user:docs/alice.",
                ),
                click.Option(
                    ["--by"],
                    type=click.Choice(["app", "agent", "model", "user", "tool"]),
                    default="app",
                    show_default=True,
                    help="Group spending by this.",
                ),
                click.Option(
                    ["--since"],
                    type=Since(),
                    default="24h",
                    show_default=True,
                    help="Spending since this time: 90m, 24h, 7d, 2026-11-01.",
                ),
                click.Option(["--all", "every"], is_flag=True, help="Every budget, not only the fullest."),
                _STORE,
            ],
            """
            runguard status
            runguard status --by user --since 7d
            runguard status --scope user:docs/ --all
            runguard status --store redis://cache:6379/0 --json
            """,
        ),
        Command(
            "spend",
            "store_commands:spend",
            """
            Show what calls cost by app, user, model or label, for a bill.

            Days are in UTC. Sums are exact and equal the budgets' accounts; they are kept when old records are purged.
            Exit code 0, also if nothing was spent, or 2 if the store cannot be read.
            """,
            [
                click.Option(
                    ["--by"],
                    default="app",
                    show_default=True,
                    metavar="GROUPS",
                    help="What to group by, with commas: day, app, user, agent, model, tool, label:NAME.",
                ),
                click.Option(
                    ["--since"],
                    type=Day(),
                    default="30d",
                    show_default=True,
                    help="The first day: 30d, 4w, 2026-11-01.",
                ),
                click.Option(["--until"], type=Day(), default="1d", help="The last day. Default: today."),
                click.Option(["--csv", "as_csv"], is_flag=True, help="Print the rows as CSV."),
                _STORE,
            ],
            """
            runguard spend --by app,user --since 30d
            runguard spend --by day,model --since 2026-11-01 --until 2026-11-30
            runguard spend --by label:team --csv > november.csv
            """,
        ),
        CommandGroup(
            "trips",
            "store_commands:trips",
            """
            List the trips in a store, or show one with its evidence.

            Newest first. Trips of shadow mode, which were not enforced, are marked. Exit code 0, also if there is none,
            or 2 if the store cannot be read.
            """,
            [
                click.Option(["--rule"], help="Only stops by this rule."),
                click.Option(["--user"], help="Only stops of this user."),
                click.Option(["--since"], type=Since(), help="Only since this time: 90m, 24h, 7d, 2026-11-01."),
                click.Option(
                    ["--limit"],
                    type=click.IntRange(1, 10_000),
                    default=50,
                    show_default=True,
                    help="The highest number of trips, newest first.",
                ),
                _STORE,
            ],
            """
            runguard trips
            runguard trips --rule budget --user alice --since 7d
            runguard trips show 3f2a9c
            runguard trips show last --json
            """,
            invoke_without_command=True,
            commands=[
                Command(
                    "show",
                    "store_commands:show_trip",
                    """
                    Show one trip: its reason, its evidence, the story of the run, how to continue.

                    TRIP is an id from the list, a unique prefix of one, or `last`. Exit code 0, or 2 if there is no
                    such trip or the store cannot be read.
                    """,
                    [click.Argument(["trip"]), _STORE],
                    """
                    runguard trips show 3f2a9c
                    runguard trips show last
                    """,
                )
            ],
        ),
        Command(
            "dashboard",
            "dashboard.server:run",
            """
            Serve a web page for a store, on loopback.

            Shows spending over time, budgets, running runs, breakers, and trips with their stories; live and read-only.
            The address contains a token that works once. Needs a durable store: SQLite, Redis or Valkey, PostgreSQL.
            Exit code 2 if it cannot start.
            """,
            [
                _STORE,
                click.Option(
                    ["--port"],
                    default=str(DASHBOARD_PORT),
                    show_default=True,
                    help="The port; auto takes any free one.",
                ),
                click.Option(["--host"], default="127.0.0.1", show_default=True, help="A loopback address."),
                click.Option(["--no-open"], is_flag=True, help="Print the address without opening a browser."),
            ],
            "runguard dashboard\nrunguard dashboard --store sqlite:///guard.db --port auto --no-open",
            extra="dashboard",
        ),
    ],
    "Act": [
        Command(
            "stop",
            "store_commands:stop",
            """
            Stop a run, session, user, app or everything (the kill switch).

            SCOPE is run:ID, session:APP/USER/ID, user:APP/USER, app:APP or all. Every worker that shares the store ends
            model calls in flight within about a second and refuses later calls and new runs, until `runguard resume
            SCOPE`. Exit code 0 if the stop is in force, 2 if not.
            """,
            [
                _SCOPE,
                click.Option(["--reason"], default="", help="The reason; every following trip contains it."),
                click.Option(["--actor"], show_default="the user of this system", help="Who stops the scope."),
                _STORE,
            ],
            """
            runguard stop user:docs/alice --reason "looking into her bill"
            runguard stop app:docs --reason "bad release" --actor oncall
            runguard stop all --reason "provider incident" --store redis://cache:6379/0
            """,
        ),
        Command(
            "resume",
            "store_commands:resume",
            """
            Lift a stop.

            SCOPE is the scope given to `runguard stop`. The next turn continues where the last one ended. A spent
            budget is not a stop: see `runguard extend`. Exit code 0 if the stop was lifted, 1 if there was none, 2 if
            the store cannot be used.
            """,
            [_SCOPE, _STORE],
            """
            runguard resume user:docs/alice
            runguard resume all
            """,
        ),
        Command(
            "extend",
            "store_commands:extend",
            """
            Raise the budget of a scope.

            SCOPE is a scope as `runguard status` shows it, or a trip's scope_id. The command raises all its budgets in
            that unit, in every current window. Past spending still counts, and the next period begins with the policy's
            amount again. Exit code 0 if a budget was raised, 2 if there is no such budget.
            """,
            [
                _SCOPE,
                click.Option(["--usd"], metavar="DOLLARS", help="Dollars to add."),
                click.Option(["--tokens"], type=click.IntRange(min=1), help="Tokens to add."),
                click.Option(["--calls"], type=click.IntRange(min=1), help="Model calls to add."),
                _STORE,
            ],
            """
            runguard extend user:docs/alice --usd 5
            runguard extend session:docs/alice/s1 --tokens 200000
            runguard extend app:docs --usd 20 --calls 500 --store sqlite:///guard.db
            """,
        ),
        CommandGroup(
            "store",
            "store_commands:identify",
            """
            Show the id of a store; accept it as a replacement; repair it; delete what is old.

            A store has a random id in its data. Running workers refuse a store with another id than the one they know.
            Exit code 0, 1 if the control document (stops and breakers) is damaged, 2 if the store cannot be read.
            """,
            [_STORE],
            """
            runguard store
            runguard store adopt 3f2a9c0d5e6b7a81
            runguard store adopt 3f2a9c0d5e6b7a81 --store redis://cache:6379/0
            runguard store repair
            runguard store purge --older-than 7d
            """,
            invoke_without_command=True,
            commands=[
                Command(
                    "adopt",
                    "store_commands:adopt",
                    """
                    Accept this store as the replacement of the one with the given id.

                    The alert `store_replaced` and the log of the workers that refuse contain the ID. Running workers
                    accept this store within about a second. Budgets continue from the accounts of this store; stops of
                    the old store are not in force. Exit code 0 if the store is accepted, 2 if it cannot be reached.
                    """,
                    [click.Argument(["replaced"], metavar="ID"), _STORE],
                    """
                    runguard store adopt 3f2a9c0d5e6b7a81
                    runguard store adopt 3f2a9c0d5e6b7a81 --store redis://cache:6379/0
                    """,
                ),
                Command(
                    "repair",
                    "store_commands:repair",
                    """
                    Remove a damaged control document.

                    The document holds the stops of the kill switch and the breakers of tools. While it cannot be read,
                    RunGuard allows no call, because the document may hold a stop. Afterwards no stop is in force:
                    repeat `runguard stop` for each one you need. Exit code 0 if no damage is left, 2 if the store
                    cannot be reached.
                    """,
                    [_STORE],
                    "runguard store repair",
                ),
                Command(
                    "purge",
                    "store_commands:purge",
                    """
                    Delete records, ended runs and past periods that are older.

                    Workers do the same once an hour with the policy's `retention_days`. What calls cost stays as sums
                    of days, so `runguard spend` does not change. The last minute is always kept. Exit code 0 if it is
                    done, 2 if the store cannot be reached.
                    """,
                    [
                        click.Option(
                            ["--older-than", "since"],
                            type=Since(),
                            required=True,
                            metavar="TIME",
                            help="A span such as 12h or 7d, or a day.",
                        ),
                        _STORE,
                    ],
                    "runguard store purge --older-than 7d",
                ),
            ],
        ),
    ],
}


# ---- the command itself

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


class Program(click.Group):
    """All commands, listed under their headings."""

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
        """Suggest the nearest command, in the words of every other hint."""
        if not (args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing):
            from runguard.core.errors import did_you_mean

            ctx.fail(f"No such command {args[0]!r}; {did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(each.name or "", (each.help or "").partition("\n")[0]) for each in commands])


@click.group(
    cls=Program,
    commands=[command for group in COMMANDS.values() for command in group],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", prog_name="runguard", message="%(prog)s %(version)s")
def main() -> None:
    """The circuit breaker for AI agents: stops a runaway run before its next paid call."""
