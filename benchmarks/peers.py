"""RunGuard's ``guard`` beside other libraries that guard spending: does a dollar hold, is the bill true, what does a
call cost?

    python benchmarks/peers.py [--peers DIR] [--only NAME ...] [--quick] [--json]

What is probed is told in ``peer_probes.py``, how each peer is used in ``peer_adapters.py``. The first run installs
every peer, at a fixed version, into an environment of its own under DIR (benchmarks/.peers); one that cannot be
installed is named and left out. Afterwards nothing uses a network. Each case runs in a process of its own and is given
up after --timeout seconds. Overhead is CPU time above the bare function; its ratio to a lock with an add, taken in
turns with it, says more than the microseconds do. Ends with 1 when RunGuard misses a goal for money.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_probes import CALL_USD, CAP_USD, INPUT, OUTPUT, Case, Guarded, Provider, run_case

HERE = Path(__file__).resolve().parent
GOAL_US = 10.0
GROWS = 1.5  # aged / fresh
INSTALL_S = 600.0
PRICED = "probe-1"
# per million: an answer of 5,000 tokens is ten cents, whatever the prompt is taken for
PRICES = {PRICED: {"input": 0, "output": 20}}


@dataclass(frozen=True)
class Peer:
    """One row; ``needs`` are the requirements of its environment."""

    title: str
    case: str
    needs: tuple[str, ...]


PEERS = (
    Peer("breakerbox: Ledger reserve, reconcile", "breakerbox", ("breakerbox==1.0.0",)),
    Peer("agent-budget-guard: reserve, commit", "agent_budget_guard", ("agent-budget-guard==0.2.0",)),
    Peer("agent-sre: check_and_charge", "agent_sre", ("agent-sre==3.7.0",)),
    Peer("guardloop: check, record", "guardloop", ("guardloop==0.4.2",)),
    Peer("budget-guard-agents: check, record", "budget_guard_agents", ("budget-guard-agents==0.2.0",)),
    Peer("agent-budget-guard-py: preflight, record", "agent_budget_guard_py", ("agent-budget-guard-py==0.4.0",)),
    Peer("agentguard47: check, consume", "agentguard47", ("agentguard47==2.0.0",)),
    Peer("tokenfence: guarded client", "tokenfence", ("tokenfence==0.3.2",)),
    Peer("pydantic-ai: UsageLimits, shared usage", "pydantic_ai", ("pydantic-ai-slim==2.66.0",)),
    Peer("shekel: patched client", "shekel", ("shekel==1.2.0", "openai==2.54.0")),
    Peer("agentbudget: would_exceed, wrap", "agentbudget_asked", ("agentbudget==0.4.0",)),
    Peer("agentbudget: wrap", "agentbudget", ("agentbudget==0.4.0",)),
    Peer("agent-watchdog: record_tokens", "agent_watchdog", ("agent-watchdog==0.1.5",)),
    Peer("langchain: ModelCallLimit hooks", "langchain", ("langchain==1.4.7",)),
)


# ---- RunGuard -------------------------------------------------------------------------------------------------------


def _seed_answer(number: int) -> dict[str, Any]:
    return {"usd": CALL_USD, "sig": f"search {number}"}


def _chat_answer() -> Callable[[int], Any]:
    """The client's own class, where it is installed."""
    usage = {"prompt_tokens": INPUT, "completion_tokens": OUTPUT, "total_tokens": INPUT + OUTPUT}
    calls = [{"id": "call-1", "type": "function", "function": {"name": "search", "arguments": '{"query": "invoices"}'}}]
    choices = [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "tool_calls": calls},
        }
    ]
    told = {
        "id": "chat-1",
        "object": "chat.completion",
        "created": 1,
        "model": PRICED,
        "choices": choices,
        "usage": usage,
    }
    try:
        from openai.types.chat import ChatCompletion
    except ImportError:
        return lambda _: told
    answer = ChatCompletion.model_validate(told)
    return lambda _: answer


def ours() -> dict[str, Case]:
    import runguard

    # warnings at half and at most of a budget are no part of the probe
    logging.getLogger("runguard").setLevel(logging.CRITICAL)
    messages = [{"role": "user", "content": "Find the invoices of May, and sum them up."}]
    request = {"model": PRICED, "messages": messages, "max_tokens": OUTPUT}

    def case(is_async: bool, answer: Callable[[int], Any], told: dict[str, Any], keywords: dict[str, Any]) -> Case:
        def make(provider: Provider, cap: float) -> Guarded:
            limits = {"budget": {"max_usd": cap}, **keywords}
            if is_async:
                on_loop: Any = runguard.guard_async(provider.acreate, **limits)
                return Guarded(None, lambda: on_loop(**told), lambda: on_loop.spend()["usd"])
            plain: Any = runguard.guard(provider.create, **limits)
            return Guarded(lambda: plain(**told), None, lambda: plain.spend()["usd"])

        return Case(make, answer, is_async)

    chat, found = _chat_answer(), dict[str, Case]()
    for name, is_async in (("guard", False), ("guard_async", True)):
        found[f"{name}: {{'usd': …}} told by the result"] = case(is_async, _seed_answer, {}, {})
        found[f"{name}: the same, and loop="] = case(is_async, _seed_answer, {}, {"loop": {"repeats": 3}})
        found[f"{name}: cost=0.10 known"] = case(is_async, _seed_answer, {}, {"cost": CALL_USD})
        found[f"{name}: chat completion, price, max_tokens"] = case(is_async, chat, request, {"prices": PRICES})
        # the same tool asked for again and again would be a loop: here each call goes by a name of its own
        numbers = iter(range(10**9))
        again = {
            "prices": PRICES,
            "loop": {"repeats": 3},
            "signature": lambda _, numbers=numbers: f"search {next(numbers)}",
        }
        found[f"{name}: the same, and loop=, signature="] = case(is_async, chat, request, again)
    return found


# ---- environments ---------------------------------------------------------------------------------------------------


def environment(peer: Peer, folder: Path) -> Path | str:
    """Its interpreter, installed if need be; or why there is none."""
    home = folder / peer.needs[0].replace("==", "-")
    python, ready = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python"), home / "ready.txt"
    wanted = "\n".join(peer.needs)
    if ready.exists() and ready.read_text() == wanted and python.exists():
        return python
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        return "uv was not found; install it, or point --peers to a folder of an earlier run"
    steps = (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)],
        [uv, "pip", "install", "--quiet", "--python", str(python), *peer.needs],
    )
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            return f"not installed within {INSTALL_S:g} s"
        if done.returncode:
            return " ".join(done.stderr.split())[:300] or f"{step[1]} ended with {done.returncode}"
    ready.write_text(wanted)
    return python


# ---- cases, each in a process of its own
# ------------------------------------------------------------------------------


def measured(command: list[str], timeout: float) -> dict[str, Any] | str:
    """The figures of one case, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="runguard-peers-") as home:
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "SYSTEMROOT", "TMPDIR")}
        surroundings = {**kept, "HOME": home, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, cwd=home, env=surroundings, check=False
            )
        except subprocess.TimeoutExpired:
            return f"gave no answer within {timeout:g} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return said[-1][:200] if said else f"ended with {done.returncode}"
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def everything(options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Figures by title, ours first, and what could not be measured, with the reason."""
    figures: dict[str, dict[str, Any]] = {}
    without: dict[str, str] = {}
    how = [str(5 if options.quick else 21), str(5.0 if options.quick else 60.0)]
    for title, peer in {**dict.fromkeys(ours()), **{peer.title: peer for peer in PEERS}}.items():
        if options.only and not any(name in title for name in options.only):
            continue
        print(f"… {title}", file=sys.stderr, flush=True)
        told: dict[str, Any] | str
        if peer is None:
            told = measured([sys.executable, str(HERE / "peers.py"), "--case", title, *how], options.timeout)
        elif isinstance(python := environment(peer, options.peers), str):
            told = f"not installed: {python}"
        else:
            told = measured([str(python), str(HERE / "peer_adapters.py"), peer.case, *how], options.timeout)
        if isinstance(told, str):
            without[title] = told
        else:
            figures[title] = told
    return figures, without


# ---- tables
# -----------------------------------------------------------------------------------------------------------


def usd(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def one_table(figures: dict[str, dict[str, Any]], without: dict[str, str]) -> Iterator[str]:
    """Every case in one row: whether the cap holds, whether the bill is true, what a call costs."""
    yield (
        f"| | cap of ${CAP_USD:.2f} held, 50 calls at once | bill true | refused calls that reached the provider | "
        "CPU µs of a guarded call | after 5,000 calls |\n|---|---|---|---:|---:|---:|"
    )
    for title, told in figures.items():
        a, b, o = told.get("A"), told.get("B"), told["overhead"]
        cost = f"{o['above']:.1f} | {o['aged']:.1f}"
        if a is None or b is None:
            yield f"| {title} | counts calls, not dollars | – | – | {cost} |"
            continue
        held = "yes" if a["real"] <= CAP_USD + 1e-9 else f"NO: ${a['real']:.2f}"
        is_true = all(told[probe]["reported"] in (None, told[probe]["real"]) for probe in "ABC")
        past = b["calls"] - b["tripped"] if b["tripped"] is not None else b["calls"]
        yield f"| {title} | {held} | {'yes' if is_true else 'NO'} | {past} | {cost} |"
    for title, reason in without.items():
        yield f"| {title} | not measured: {reason[:80]} | | | | |"


def tables(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    in_dollars = {title: told for title, told in figures.items() if "A" in told}
    yield f"A. 50 calls of ${CALL_USD:.2f} at once on a cap of ${CAP_USD:.2f} (asyncio; *: threads)"
    yield "| | really spent, $ | reported, $ |\n|---|---:|---:|"
    for title, told in in_dollars.items():
        a = told["A"]
        yield f"| {title}{'*' if a['threads'] else ''} | {usd(a['real'])} | {usd(a['reported'])} |"
    yield "\nB. 30 calls one after the other, the caller swallows what is raised"
    yield (
        "| | calls that reached the provider | of them until it first raised | really spent, $ | reported, $ "
        "|\n|---|---:|---:|---:|---:|"
    )
    for title, told in in_dollars.items():
        b = told["B"]
        yield (
            f"| {title} | {b['calls']} | {'never' if b['tripped'] is None else b['tripped']} | {usd(b['real'])} | "
            f"{usd(b['reported'])} |"
        )
    yield "\nC. The same, the caller stops at the first exception"
    yield "| | really spent, $ | reported, $ | raised |\n|---|---:|---:|---|"
    for title, told in in_dollars.items():
        c = told["C"]
        yield f"| {title} | {usd(c['real'])} | {usd(c['reported'])} | {c['error'] or 'nothing'} |"
    yield (
        "\nOverhead of one guarded call above the bare function, CPU µs: medians, of fresh guards (1,000 calls "
        "each) and of one after 5,000"
    )
    yield (
        "| | µs | fastest | p90 | after 5,000 | x lock and add | after 5,000 | a lock and add, µs | the bare "
        "function, µs | repeats |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for title, told in figures.items():
        o = told["overhead"]
        micros = " | ".join(f"{o[key]:.2f}" for key in ("above", "fastest", "p90", "aged"))
        yield (
            f"| {title} | {micros} | {o['x_lock']:.1f} | {o['aged_x_lock']:.1f} | {o['lock']:.2f} | "
            f"{o['bare']:.2f} | {o['repeats']} |"
        )


def verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """What one case of RunGuard should do, and whether it does."""
    a, b, c, o = told["A"], told["B"], told["C"], told["overhead"]
    return {
        "A": a["real"] == a["reported"] == CAP_USD,
        "B": b["calls"] == b["tripped"] == round(CAP_USD / CALL_USD) and b["real"] == b["reported"],
        "C": c["real"] == c["reported"] == CAP_USD,
        "overhead": o["above"] <= GOAL_US,
        "age": o["aged_x_lock"] <= GROWS * o["x_lock"],
    }


def goals(own: dict[str, dict[str, bool]]) -> Iterator[str]:
    yield (
        f"\nGoals of RunGuard: the whole dollar is spent and reported, ten calls are made, at most {GOAL_US:g} µs "
        "a call, no growth"
    )
    for title, reached in own.items():
        missed = [goal for goal, good in reached.items() if not good]
        yield f"- {title}: {'NOT reached: ' + ', '.join(missed) if missed else 'reached'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=Path, default=HERE / ".peers", help="where the peers' environments are or will be"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose title has one of these in it")
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 21")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one case")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)  # one of ours, in this process
    options = parser.parse_args()
    if options.case:
        run_case(ours()[options.case[0]], int(options.case[1]), float(options.case[2]))
        return 0
    options.peers = options.peers.resolve()
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the run, Python {sys.version.split()[0]}"
    figures, without = everything(options)
    own = {title: verdicts(figures[title]) for title in ours() if title in figures}
    if options.json:
        print(json.dumps({"figures": figures, "without": without, "goals": own}, indent=1, ensure_ascii=False))
    else:
        print(load)
        print("\n".join(one_table(figures, without)), end="\n\n")
        print("\n".join(tables(figures)))
        print("\nNot measured:" if without else "\nEverything was measured.")
        for title, reason in without.items():
            print(f"- {title}: {reason}")
        print("\n".join(goals(own)))
    return int(
        any(not reached[probe] for reached in own.values() for probe in "ABC")
        or any(title in without for title in ours())
    )


if __name__ == "__main__":
    sys.exit(main())
