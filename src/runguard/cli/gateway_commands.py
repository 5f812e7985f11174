"""Commands that guard programs from outside: run and gateway.

``main`` declares them.
"""

import asyncio
import json
import logging
import os
import secrets
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import click

from runguard.cli.dashboard.server import PageProtocol, address_of, has_screen, listening_on, make_app
from runguard.cli.main import CommandError, check_dollars, print_json
from runguard.console import usd
from runguard.core.money import Budget
from runguard.engine.guard import Guard, this_user
from runguard.gateway.access import Access, Upstreams
from runguard.gateway.conversations import Conversations
from runguard.gateway.launch import (
    addresses,
    command_behind,
    environment_behind,
    run_program,
    scripted_provider,
    summary,
    told,
    upstreams_of,
)
from runguard.gateway.proxy import Gateway
from runguard.gateway.serving import listen, serve, served_in_background
from runguard.ledger.memory import in_memory
from runguard.policy.settings import Policy, find_policy_file, load_policy_file
from runguard.view.store import StoreView


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


def _policy(file: Path | None, on_stop: str, **more: Any) -> Policy:
    """Return the policy of a file, or of the file that applies here.

    ``more`` wins over the file, and the environment over all; budgets are added to those of the file.
    """
    path = file or find_policy_file()
    values = load_policy_file(path) if path is not None else {}
    more["budgets"] = [*values.get("budgets", ()), *more.get("budgets", ())]
    if on_stop == "error":
        more["on_stop"] = "raise"
    for name in ("mode", "store"):
        if value := os.environ.get(f"RUNGUARD_{name.upper()}"):
            more[name] = value
    return Policy.validated({**values, **more}, str(path or "the command line"))


def _guard(policy: Policy) -> Guard:
    guard = Guard(policy, gives_last_answers=True)
    guard.check_store()
    return guard


# ---- ``runguard run``: one program behind a gateway of its own


def run(
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
) -> int:
    if not program and not demo:
        raise CommandError("no program given: runguard run -- PROGRAM ARGUMENTS, or runguard run --demo")
    with ExitStack() as open_until_end:
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
    if problem:  # the code that a shell would give
        if as_json:
            print_json({"ok": False, "error": problem})
        else:
            click.echo(problem, err=True)
    elif as_json:
        click.echo(json.dumps({"ok": True, "exit_code": code, **found}, indent=2, default=str), err=True)
    else:
        click.echo(line, err=True)
    return code


@contextmanager
def _scripted() -> Iterator[str]:
    """Serve the model of the demonstration. Yield its address."""
    listening = listen("127.0.0.1", 0)
    with served_in_background(scripted_provider(), listening, _nothing):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


async def _nothing() -> None:
    """There is nothing to close."""


@contextmanager
def _dashboard(policy: Policy) -> Iterator[Policy]:
    """Serve the page of the policy's store; a store in memory becomes a file that ends with the program."""
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

_TOKEN: Final = "RUNGUARD_GATEWAY_TOKEN"
_LEAST_TOKEN: Final = 16


def gateway(
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
    app = Gateway(guard, access=access, upstreams=upstreams, conversations=conversations)
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{shown}:{number}"
    if as_json:
        click.echo(json.dumps({"ok": True, "url": base, "store": guard.store_name}))
    else:
        lines = "\n".join(f"  {name}={url}" for name, url in addresses(base).items() if "API_BASE" not in name)
        needs = f"\nClients send the token as x-runguard-token, or use {base}/token/TOKEN/…" if token else ""
        click.echo(f"RunGuard gateway, store {guard.store_name}\n\n{lines}\n{needs}\nCtrl+C ends it.")
    sys.stdout.flush()
    try:
        asyncio.run(serve(app, listening, app.aclose))
    except KeyboardInterrupt:
        pass
    finally:
        guard.flush(2)
