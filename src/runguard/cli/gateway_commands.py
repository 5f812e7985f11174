"""Commands that guard programs from outside: run and gateway.

``main`` imports this module for any of them, also for its help: everything heavy is imported inside of the commands.
"""

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from runguard.cli.main import Command, CommandError, Size, check_dollars, json_option, policy_option, print_json

if TYPE_CHECKING:
    import socket
    from ipaddress import IPv4Address, IPv6Address

    from runguard.engine.guard import Guard
    from runguard.policy.settings import Policy

_NEEDED: Final = ("starlette", "uvicorn", "httpx", "h11", "anyio", "httpcore")

upstream_option = click.option(
    "--upstream",
    multiple=True,
    metavar="NAME=URL",
    help="The address of a provider: openai, anthropic or gemini. Repeat it for several.",
)
on_stop_option = click.option(
    "--on-stop",
    type=click.Choice(["answer", "error"]),
    default="answer",
    show_default=True,
    help="A stop is an answer that ends the run, or an error with status 429.",
)


@contextmanager
def installed(extra: str) -> Iterator[None]:
    """Name the extra to install where a package of it is missing."""
    try:
        yield
    except ImportError as error:
        name = (error.name or "").split(".")[0]
        if name not in _NEEDED:
            raise
        raise CommandError(
            f"the {extra} needs {name}, which is not installed: pip install 'runguard-agents[{extra}]'"
        ) from None


def address_of(host: str, wanted: str) -> "IPv4Address | IPv6Address":
    from ipaddress import ip_address

    try:
        return ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise CommandError(f"--host {host}: must be {wanted}") from None


def listening_on(host: str, port: int, do: str) -> "socket.socket":
    """Return a socket that listens; ``do`` says what to do about a port in use."""
    import errno

    from runguard.gateway.serving import listen

    try:
        return listen("127.0.0.1" if host == "localhost" else host.strip("[]"), port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} is in use{do}") from None
        raise CommandError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for one in given:
        name, sign, url = one.partition("=")
        if not sign or not url:
            raise CommandError(
                f"--upstream {one}: give a provider and its address, such as openai=http://localhost:8080/v1"
            )
        found[name] = url
    return found


def _policy(file: Path | None, on_stop: str, **more: Any) -> "Policy":
    """Return the policy of a file, or of the file that applies here.

    ``more`` wins over the file, and the environment over all; budgets are added to those of the file.
    """
    from runguard.policy.settings import Policy, find_policy_file, load_policy_file

    path = file or find_policy_file()
    values = load_policy_file(path) if path is not None else {}
    more["budgets"] = [*values.get("budgets", ()), *more.get("budgets", ())]
    if on_stop == "error":
        more["on_stop"] = "raise"
    for name in ("mode", "store"):
        if value := os.environ.get(f"RUNGUARD_{name.upper()}"):
            more[name] = value
    return Policy.validated({**values, **more}, str(path or "the command line"))


def _guard(policy: "Policy") -> "Guard":
    from runguard.engine.guard import Guard

    guard = Guard(policy, gives_last_answers=True)
    guard.check_store()
    return guard


# ---- ``runguard run``: one program behind a gateway of its own


@click.command(
    "run",
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    examples="""
    runguard run --demo
    runguard run --max-usd 5 -- claude -p "fix the tests"
    runguard run --max-calls 200 --upstream openai=http://localhost:8080/v1 -- node agent.mjs
    runguard run --policy runguard.toml --dashboard -- python bot.py
    """,
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
@click.option("--max-usd", metavar="USD", help="Dollars that the whole program may spend.")
@click.option("--max-tokens", type=click.IntRange(1), help="Tokens of the whole program, input and output.")
@click.option("--max-calls", type=click.IntRange(1), help="Model calls of the whole program.")
@policy_option
@upstream_option
@on_stop_option
@click.option("--dashboard", is_flag=True, help="Show the program on a live page while it runs.")
@click.option("--demo", is_flag=True, help="Run an agent that loops against a scripted model, without a network.")
@json_option
@click.pass_context
def run_command(
    ctx: click.Context,
    program: tuple[str, ...],
    max_usd: str | None,
    max_tokens: int | None,
    max_calls: int | None,
    policy_file: Path | None,
    upstream: tuple[str, ...],
    on_stop: str,
    dashboard: bool,
    demo: bool,
    as_json: bool,
) -> None:
    """Guard any program, in any language, without a change of its code.

    Starts a gateway on a free port of this machine, points the known clients at it (OPENAI_BASE_URL,
    ANTHROPIC_BASE_URL, GOOGLE_GEMINI_BASE_URL), and runs the program. Requests go on to where these variables pointed
    before, or to the provider. Loop rules and budgets hold as everywhere; a stop is an answer in the format of the
    provider, so that the program ends normally. One line on stderr says at the end what happened; with --json it is one
    JSON document on stderr. Exit code: that of the program; 2 if it was not started because the settings are invalid,
    126 or 127 if it cannot be executed.
    """
    if not program and not demo:
        raise CommandError("no program given: runguard run -- PROGRAM ARGUMENTS, or runguard run --demo")
    with installed("gateway"), ExitStack() as open_until_end:
        from runguard.console import usd
        from runguard.core.money import Budget
        from runguard.engine.guard import this_user
        from runguard.gateway.access import Access, Upstreams
        from runguard.gateway.launch import (
            command_behind,
            environment_behind,
            run_program,
            summary,
            told,
            upstreams_of,
        )
        from runguard.gateway.proxy import Gateway
        from runguard.gateway.serving import listen, served_in_background

        given = _pairs(upstream)
        if demo:
            program = (sys.executable, "-m", "runguard.gateway.launch")
            given = {**given, "openai": open_until_end.enter_context(_scripted())}
        check_dollars("--max-usd", max_usd)
        amounts = {"usd": max_usd, "tokens": max_tokens, "calls": max_calls}
        more: dict[str, Any] = {}
        if any(amount is not None for amount in amounts.values()):
            more["budgets"] = [Budget(**amounts, per="session")]  # type: ignore[arg-type]
        policy = _policy(policy_file, on_stop, **more)
        if dashboard:
            policy = open_until_end.enter_context(_dashboard(policy))
        listening = listen("127.0.0.1", 0)
        port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
        access = Access(
            app=Path(program[0]).name if not demo else "demo",
            user=this_user(),
            session=f"run-{secrets.token_hex(6)}",
            token=token,
            hosts=Access.loopback(port),
        )
        upstreams = Upstreams(upstreams_of(os.environ, given))
        # a line in the middle would spoil the screen of the program; the last line says what was stopped
        logging.getLogger("runguard").addHandler(logging.NullHandler())
        gateway = Gateway(_guard(policy), access=access, upstreams=upstreams, tells_reason=True)
        with served_in_background(gateway, listening, gateway.aclose):
            environment = environment_behind(port, token, os.environ)
            code, problem = run_program(command_behind(program, environment), environment)
            gateway.flush()
            found, line = summary(gateway), told(gateway, usd)
        if problem:
            fail_with(ctx, code, problem)
        if as_json:
            import json

            click.echo(json.dumps({"ok": True, "exit_code": code, **found}, indent=2, default=str), err=True)
        else:
            click.echo(line, err=True)
    ctx.exit(code)


def fail_with(ctx: click.Context, code: int, message: str) -> None:
    """Exit with the code that a shell would give."""
    if ctx.params.get("as_json"):
        print_json({"ok": False, "error": message})
    else:
        click.echo(message, err=True)
    ctx.exit(code)


@contextmanager
def _scripted() -> Iterator[str]:
    """Serve the model of the demonstration. Yield its address."""
    from runguard.gateway.launch import scripted_provider
    from runguard.gateway.serving import listen, served_in_background

    listening = listen("127.0.0.1", 0)
    with served_in_background(scripted_provider(), listening, _nothing):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


async def _nothing() -> None:
    """There is nothing to close."""


@contextmanager
def _dashboard(policy: "Policy") -> Iterator["Policy"]:
    """Serve the page of the policy's store; a store in memory becomes a file that ends with the program."""
    import tempfile
    import webbrowser

    from runguard.cli.dashboard.server import PageProtocol, make_app
    from runguard.cli.store_commands import has_screen
    from runguard.gateway.serving import listen, served_in_background
    from runguard.ledger.memory import in_memory
    from runguard.view.store import StoreView

    with ExitStack() as open_until_end:
        if in_memory(policy.store):
            folder = open_until_end.enter_context(tempfile.TemporaryDirectory(prefix="runguard-"))
            policy = policy.model_copy(update={"store": f"sqlite:///{folder}/guard.db"})
            _guard(policy).flush(2)  # the file must be there for the page
        view = StoreView(policy.store)
        open_until_end.callback(view.close)
        listening, token = listen("127.0.0.1", 0), secrets.token_urlsafe(24)
        port = listening.getsockname()[1]
        app = make_app(view, token, port)
        open_until_end.enter_context(served_in_background(app, listening, _nothing, PageProtocol))
        address = f"http://127.0.0.1:{port}/?token={token}"
        click.echo(f"runguard: dashboard at {address}", err=True)
        if has_screen():
            webbrowser.open(address)
        yield policy


# ---- ``runguard gateway``: a gateway for a team

_PORT: Final = 8788
_TOKEN: Final = "RUNGUARD_GATEWAY_TOKEN"
_LEAST_TOKEN: Final = 16


@click.command(
    "gateway",
    cls=Command,
    examples="""
    runguard gateway
    runguard gateway --port 8788 --policy runguard.toml
    runguard gateway --host 0.0.0.0 --user-header x-forwarded-user --upstream openai=http://vllm:8000/v1
    """,
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address; any but loopback needs a token.")
@click.option("--port", default=_PORT, show_default=True, type=click.IntRange(0, 65_535), help="The port; 0: any.")
@click.option("--app", "app_name", default="gateway", show_default=True, help="The app that budgets per app count for.")
@click.option(
    "--user-header",
    default="",
    metavar="NAME",
    help="The header that names the user, where a trusted proxy sets it. Default: by the provider's key.",
)
@click.option("--max-body", type=Size(), default="64MB", show_default=True, help="The largest request to a model.")
@click.option(
    "--idle", type=click.FloatRange(1), default=1_800.0, show_default=True, help="Seconds after which idle runs end."
)
@policy_option
@upstream_option
@on_stop_option
@json_option
def gateway_command(
    host: str,
    port: int,
    app_name: str,
    user_header: str,
    max_body: int,
    idle: float,
    policy_file: Path | None,
    upstream: tuple[str, ...],
    on_stop: str,
    as_json: bool,
) -> None:
    """Guard the programs of a team: a gateway to OpenAI, Anthropic and Gemini.

    Point OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL at it. Keys of providers pass through and are
    never stored; each key is a user of its own, known by a digest. It listens on this machine only. With another --host
    it needs a token of 16 characters or more in RUNGUARD_GATEWAY_TOKEN, which clients send as the header
    x-runguard-token, or in the path: http://HOST:PORT/token/TOKEN/v1. Several gateways may share one store. Exit code 2
    if it cannot start.
    """
    import asyncio

    with installed("gateway"):
        from runguard.gateway.access import Access, Upstreams
        from runguard.gateway.conversations import Conversations
        from runguard.gateway.launch import addresses
        from runguard.gateway.proxy import Gateway
        from runguard.gateway.serving import serve

        token = os.environ.get(_TOKEN, "")
        is_open = not address_of(host, "an address such as 127.0.0.1 or 0.0.0.0").is_loopback
        if is_open and len(token) < _LEAST_TOKEN:
            raise CommandError(
                f"--host {host}: other machines could use this gateway; set {_TOKEN} to a secret of "
                f"{_LEAST_TOKEN} characters or more, or leave out --host"
            )
        guard = _guard(_policy(policy_file, on_stop))
        upstreams = Upstreams(_pairs(upstream))
        listening = listening_on(host, port, "; choose another one with --port, or 0 for any free one")
        number = listening.getsockname()[1]
        access = Access(
            app=app_name,
            user_header=user_header.lower(),
            token=token,
            hosts=frozenset() if is_open else Access.loopback(number, host.strip("[]")),
            max_body=max_body,
        )
        conversations = Conversations(guard, idle_seconds=idle)
        gateway = Gateway(guard, access=access, upstreams=upstreams, conversations=conversations)
        shown = f"[{host}]" if ":" in host else host
        base = f"http://{shown}:{number}"
        if as_json:
            import json

            click.echo(json.dumps({"ok": True, "url": base, "store": guard.store_name}))
        else:
            lines = "\n".join(f"  {name}={url}" for name, url in addresses(base).items() if "API_BASE" not in name)
            needs = f"\nClients send the token as x-runguard-token, or use {base}/token/TOKEN/…" if token else ""
            click.echo(f"RunGuard gateway, store {guard.store_name}\n\n{lines}\n{needs}\nCtrl+C ends it.")
        sys.stdout.flush()
        try:
            asyncio.run(serve(gateway, listening, gateway.aclose))
        except KeyboardInterrupt:
            pass
        finally:
            guard.flush(2)
