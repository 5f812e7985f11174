"""Runs one program behind a gateway of its own, and the scripted provider of ``runguard run --demo``.

``cli/gateway_commands`` calls it for ``runguard run``.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Any, Final

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from runguard.core.decision import against_limit, printable
from runguard.core.errors import PolicyError
from runguard.gateway.access import PUBLIC, TOKEN_PATH
from runguard.gateway.proxy import Gateway

# Where programs look for the address of a provider, and the path that they expect behind it.
VARIABLES: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "openai": (("OPENAI_BASE_URL", "OPENAI_API_BASE"), "/openai/v1"),  # the latter: LiteLLM, aider
    "anthropic": (("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE"), "/anthropic"),
    "gemini": (("GOOGLE_GEMINI_BASE_URL",), "/gemini"),
}
# Programs that read no such variable, and the arguments that say the same.
_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "codex": ("-c", 'openai_base_url="{OPENAI_BASE_URL}"', "-c", "features.enable_request_compression=false"),
}
_SAYS_ADDRESS: Final = "base_url"  # an argument of such a program that names an address by itself
_NOT_PROXIED: Final = "127.0.0.1,localhost"
_FORWARDED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_Program = subprocess.Popen[bytes]
_NOT_FOUND, _NOT_EXECUTABLE, _BY_SIGNAL = 127, 126, 128


def upstreams_of(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the address of each provider: as given, as the environment says, or the public one."""
    found = {}
    for provider, (names, _) in VARIABLES.items():
        said = next((value for name in names if (value := environment.get(name))), "")
        found[provider] = given.get(provider) or said or PUBLIC[provider]
    if unknown := sorted(set(given) - set(VARIABLES)):
        raise PolicyError(f"--upstream {unknown[0]}: not a provider; use {', '.join(VARIABLES)}")
    return found


def addresses(base: str) -> dict[str, str]:
    """Return the address of each provider behind a gateway, by the variable that programs read."""
    return {name: base + path for names, path in VARIABLES.values() for name in names}


def environment_behind(port: int, token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program behind the gateway on a port."""
    base = f"http://127.0.0.1:{port}{TOKEN_PATH}{token}"
    changed = {**environment, **addresses(base)}
    for name in ("NO_PROXY", "no_proxy"):
        before = environment.get(name)
        changed[name] = f"{before},{_NOT_PROXIED}" if before else _NOT_PROXIED
    return changed


def command_behind(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command of a program behind the gateway: with its address, where the program reads no variable."""
    program, *arguments = command
    added = _ARGUMENTS.get(Path(program).stem, ()) if not any(_SAYS_ADDRESS in one for one in arguments) else ()
    return [program, *(one.format_map(environment) for one in added), *arguments]


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a program to its end. Returns its exit code, and why it could not be started.

    It has the terminal, and gets the signals that this process gets. A program that a signal ended has the code that a
    shell would give: 128 and the number.
    """
    found = shutil.which(command[0], path=environment.get("PATH")) or command[0]
    try:
        with _forwarding() as begin:
            code = begin(subprocess.Popen([found, *command[1:]], env=dict(environment))).wait()
    except FileNotFoundError:
        return _NOT_FOUND, f"{printable(command[0])}: no such program"
    except OSError as error:
        return _NOT_EXECUTABLE, f"{printable(command[0])}: cannot be started: {error.strerror}"
    return (code if code >= 0 else _BY_SIGNAL - code), ""


@contextmanager
def _forwarding() -> "Iterator[Callable[[_Program], _Program]]":
    """Pass signals on to the program that is given to the function. Ctrl+C reaches it from the terminal by itself."""
    program: list[_Program] = []
    early: list[int] = []  # what came while the program was being started

    def forward(number: int, _: FrameType | None) -> None:
        if not program:
            early.append(number)
        elif not (number == signal.SIGINT and _is_in_foreground()):
            program[0].send_signal(number)

    def begin(started: _Program) -> _Program:
        program.append(started)
        for number in early:
            started.send_signal(number)
        return started

    before: dict[signal.Signals, Any] = {}
    for name in _FORWARDED:
        if (number := getattr(signal, name, None)) is not None:
            before[number] = signal.signal(number, forward)
    try:
        yield begin
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether the terminal sends its signals to the whole group of this process."""
    try:
        return os.getpgrp() == os.tcgetpgrp(sys.stdin.fileno())
    except (OSError, AttributeError, ValueError):
        return False


# ---- What is said at the end.


def summary(gateway: Gateway) -> dict[str, Any]:
    """Return what a program did, as plain data."""
    spent, tally = gateway.spend(), gateway.tally
    saved = gateway.saved_usd()
    return {
        "requests": tally.requests,
        "model_calls": tally.calls,
        "refused_calls": tally.refused,
        "unguarded_requests": tally.unguarded,
        "unpriced_calls": spent["unpriced_calls"],
        "tokens": spent["tokens"],
        "usd": _plain(spent["usd"]),
        "saved_usd": _plain(saved),
        "stops": [trip.to_dict() for trip in gateway.trips],
    }


def _plain(usd: Any) -> str | None:
    return None if usd is None else f"{Decimal(usd):f}"


def told(gateway: Gateway, usd: Any) -> str:
    """Return the same as one line for people. ``usd`` formats dollars."""
    found = summary(gateway)
    if not found["requests"]:
        names = ", ".join(names[0] for names, _ in VARIABLES.values())
        return (
            f"runguard: no request seen, so nothing was guarded. The program does not read {names}; point it at one of "
            "them in its own settings, or see `runguard run --help`"
        )
    calls = found["model_calls"]
    unpriced = f" and {found['unpriced_calls']} without a price" if found["unpriced_calls"] else ""
    parts = [f"{calls} model call{'' if calls == 1 else 's'}, {usd(found['usd'])}{unpriced}"]
    if not calls and not found["refused_calls"]:
        parts = [f"{found['requests']} requests, none of them to a model"]
    for trip in gateway.trips[-3:]:
        verb = "stopped" if trip.enforced else "would have stopped"
        about = f" of tool '{trip.tool}'" if trip.tool else ""
        why = against_limit(trip.observed, trip.unit, trip.limit)
        if trip.rule == "unpriced":
            name = trip.model
            why = f"'{name}' has no price: limit tokens or calls, or add [prices.\"{name}\"] to runguard.toml"
        parts.append(f"{verb} by {trip.rule}{about} ({why})")
    if found["refused_calls"]:
        saved = f", about {usd(found['saved_usd'])} saved" if found["saved_usd"] is not None else ""
        refused = found["refused_calls"]
        parts.append(f"{refused} call{'' if refused == 1 else 's'} refused{saved}")
    if found["unguarded_requests"]:
        parts.append(f"{found['unguarded_requests']} paid requests of other kinds passed unguarded")
    return printable(f"runguard: {'; '.join(parts)}")


# ---- A scripted provider and an agent that loops, for ``runguard run --demo``: no key and no network is needed.
#
# The agent is an ordinary program of its own: it knows nothing of RunGuard and reads ``OPENAI_BASE_URL``.

MODEL: Final = "gpt-4o-mini"
_TURNS: Final = 40
_TOOL: Final = "parse_document"


def scripted_provider() -> Starlette:
    """Return a model that tries the same tool again and again, each time with other arguments."""

    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        turn = sum(message["role"] == "assistant" for message in body["messages"]) + 1
        arguments = json.dumps({"page": turn, "hint": f"attempt {turn}"})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 1_000 + 150 * turn, "completion_tokens": 60, "total_tokens": 1_060 + 150 * turn}
        answer = {"id": f"c{turn}", "object": "chat.completion", "created": 0, "model": body["model"]}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})

    return Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])


def agent() -> int:
    """Work until the model calls no tool, at most 40 turns."""
    address = os.environ["OPENAI_BASE_URL"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Extract the invoice."}]
    tools = [{"type": "function", "function": {"name": _TOOL, "parameters": {"type": "object", "properties": {}}}}]
    with httpx.Client(headers={"authorization": "Bearer demo", "user-agent": "demo-agent/1"}, timeout=30) as client:
        for turn in range(1, _TURNS + 1):
            asked = {"model": MODEL, "max_tokens": 300, "messages": messages, "tools": tools}
            message = client.post(f"{address}/chat/completions", json=asked).json()["choices"][0]["message"]
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                print(f"agent: turn {turn}: {message['content']}", flush=True)  # noqa: T201 - a program of its own
                return 0
            print(f"agent: turn {turn}: {_TOOL}({calls[0]['function']['arguments']}) failed", flush=True)  # noqa: T201
            failed = json.dumps({"status": "partial_parse_error", "data": None})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": failed} for call in calls]
    print(f"agent: gave up after {_TURNS} turns", flush=True)  # noqa: T201
    return 1


if __name__ == "__main__":
    raise SystemExit(agent())
