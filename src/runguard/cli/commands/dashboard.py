"""``runguard dashboard``: serve a web page for a store, on loopback."""

import errno
import ipaddress
import json
import os
import secrets
import socket
import sys
import webbrowser

import click

from runguard.cli.commands.command import Command, fail
from runguard.cli.commands.options import json_option, store_option

_PORT = 8420


@click.command(
    "dashboard",
    cls=Command,
    examples="runguard dashboard\nrunguard dashboard --store sqlite:///guard.db --port auto --no-open",
)
@store_option
@click.option("--port", default=str(_PORT), show_default=True, help="The port; auto takes any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="A loopback address.")
@click.option("--no-open", is_flag=True, help="Print the address without opening a browser.")
@json_option
@click.pass_context
def command(ctx: click.Context, store: str | None, port: str, host: str, no_open: bool, as_json: bool) -> None:
    """Serve a web page for a store, on loopback.

    Shows spending over time, budgets, running runs, breakers, and trips with their stories; live and read-only. The
    address contains a token that works once. Needs a durable store: SQLite, Redis or Valkey, PostgreSQL. Exit code 2 if
    it cannot start.
    """
    from runguard.cli.commands.stores import look_at

    try:
        from runguard.dashboard.server import serve
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        fail(
            ctx,
            f"the dashboard needs {(error.name or '').split('.')[0]}, which is not installed: pip install "
            "'runguard-agents[dashboard]'",
        )
    view, _ = look_at(store)
    with _listening(ctx, host, port) as listening:
        token = secrets.token_urlsafe(24)
        name, number = listening.getsockname()[:2]
        address = f"http://{f'[{name}]' if ':' in name else name}:{number}/?token={token}"
        try:
            if as_json:
                # one line, because a caller reads it while this process runs
                click.echo(json.dumps({"ok": True, "url": address, "store": view.name}))
            else:
                click.echo(
                    f"RunGuard dashboard for {view.name}\n\n  {address}\n\nThe link works once, in one "
                    "browser. Ctrl+C ends it."
                )
            sys.stdout.flush()
            if not no_open and _has_screen():
                webbrowser.open(address)
            serve(view, token, listening)
        except KeyboardInterrupt:
            pass
        finally:
            view.close()


def _has_screen() -> bool:
    """Return whether there is a screen; without one, a text browser would take over the terminal."""
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _listening(ctx: click.Context, host: str, port: str) -> socket.socket:
    """Return a socket that listens on loopback only."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        fail(ctx, f"--host {host}: must be a loopback address, 127.0.0.1 or ::1")
    if not address.is_loopback:
        fail(
            ctx,
            f"--host {host}: the page has no users or passwords, so it listens on loopback only (127.0.0.1 or ::1). "
            f"From another machine, forward the port: ssh -L {_PORT}:127.0.0.1:{_PORT} this-machine",
        )
    if port != "auto" and not (port.isdecimal() and int(port) <= 65_535):
        fail(ctx, f"--port {port}: must be a number up to 65535, or auto")
    made = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # allows a port that was just closed; a port in use is still refused
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((str(address), 0 if port == "auto" else int(port)))
        made.listen(64)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            fail(
                ctx,
                f"port {port} is in use, perhaps by another dashboard; choose another one with --port, or "
                "pass --port auto for any free one",
            )
        fail(ctx, f"cannot listen on {host} port {port}: {error.strerror}")
    return made
