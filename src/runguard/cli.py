"""The ``runguard`` command. Each command loads what it needs when it is called: ``runguard --help`` loads nothing but click."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runguard import __version__

if TYPE_CHECKING:
    from runguard.policy import Policy


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", prog_name="runguard", message="%(prog)s %(version)s")
def main() -> None:
    """The circuit breaker for AI agents: stops a runaway run before its next paid call."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
def demo(as_json: bool) -> None:
    """Watch runaway agents being stopped, healthy ones left alone.

    Four runaways and six healthy look-alikes, each run without and with the guard on its defaults, on real Google ADK with
    scripted models: no network, no key. Exit code 0 when every runaway was stopped and no healthy run was touched, 1 otherwise,
    2 without google-adk.
    """
    from runguard.demo import AdkMissingError, run

    try:
        code = run(as_json=as_json)
    except AdkMissingError as error:
        click.echo(str(error), err=True)
        code = 2
    sys.exit(code)


@main.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of runguard.toml and do nothing else.")
def check(file: Path | None, as_json: bool, schema: bool) -> None:
    """Validate a policy file and show what it changes.

    FILE is a runguard.toml, or a pyproject.toml with [tool.runguard]. Without it, the file that a run started here would use. Exit
    code 0 when it is valid, 2 when it is not.
    """
    from runguard.errors import PolicyError
    from runguard.policy import find_policy_file, policy_schema

    if schema:
        click.echo(json.dumps(policy_schema(), indent=2))
        return
    path = file or find_policy_file()
    try:
        policy = _load(path, given=file is not None)
    except PolicyError as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "file": str(path), "error": str(error)}, indent=2))
        else:
            click.echo(str(error), err=True)
        sys.exit(2)
    changed = _changed(policy)
    if as_json:
        settings = {name: {"value": value, "default": default} for name, (value, default) in changed.items()}
        click.echo(json.dumps({"ok": True, "file": str(path) if path else None, "settings": settings, "policy": policy.digest}, indent=2))
        return
    click.echo(f"ok: {path}" if path else "ok: no policy file from here upward")
    width = max((len(name) for name in changed), default=0)
    for name, (value, default) in changed.items():
        click.echo(f"  {name:<{width}}  {_words(value)}" + ("" if name.startswith("tools.") else f"  (default {_words(default)})"))
    if not changed:
        click.echo("  every setting at its default")
    if mode := os.environ.get("RUNGUARD_MODE"):
        click.echo(f"  note: RUNGUARD_MODE={mode} overrides the mode of every run started here")


@main.command()
@click.argument("source")
@click.option("--policy", "policy_file", type=click.Path(path_type=Path), help="A runguard.toml. Without it, the file that a run started here would use.")
@click.option("--against", type=click.Path(path_type=Path), help="A second policy, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: every run, then the totals.")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained page with plots to this file.")
@click.option("--explain", metavar="RUN", help="Why did this run not stop (or why did it)? How near each rule came.")
@click.option("--all", "every", is_flag=True, help="Show runs in the table that nothing would have touched, too.")
@click.option("--model", default="", help="The model of recordings that do not name theirs, for prices and windows.")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes; one per core without it.")
def replay(
    source: str,
    policy_file: Path | None,
    against: Path | None,
    as_json: bool,
    page: Path | None,
    explain: str | None,
    every: bool,
    model: str,
    workers: int | None,
) -> None:
    """Show what a policy would have done to recorded runs.

    SOURCE is a session database of ADK's (a SQLite file, or postgresql://...), ADK's JSON (a session export, an eval set), a store of
    RunGuard's, JSONL of runs (plain or .gz), or a folder of those. Nothing is written to it, and nothing is enforced or told to
    anybody. Records that cannot be read are skipped and counted. Exit code 2 when the source or a policy cannot be used, or the run to
    explain is not there.
    """
    from runguard.errors import PolicyError
    from runguard.policy import find_policy_file
    from runguard.replay import program
    from runguard.replay.sources import open_sources
    from runguard.replay.steps import UnreadableError

    try:
        path = policy_file or find_policy_file()
        policies = [(str(path.name) if path else "the defaults", _load(path, given=policy_file is not None))]
        if against is not None:
            policies.append((against.name if against.name != policies[0][0] else str(against), _load(against, given=True)))
        sources = open_sources(source)
        if explain is None:
            program.run(sources, policies, as_json=as_json, page=page, every=every, workers=workers, model=model)
        elif not program.run_explanation(sources, explain, policies[0][1], as_json=as_json, model=model):
            raise UnreadableError(f"{source}: no run of that id")
    except (PolicyError, UnreadableError) as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def _load(path: Path | None, *, given: bool) -> "Policy":
    from runguard.errors import PolicyError
    from runguard.policy import Policy, load_policy_file

    if path is None:
        return Policy.validated({}, "")
    if given and not path.exists():
        raise PolicyError(f"{path}: no such file")
    return Policy.validated(load_policy_file(path), str(path))


def _changed(policy: "Policy") -> dict[str, tuple[Any, Any]]:
    """Settings in force that differ from the defaults: name -> (value, default). Rules as the rungs that result."""
    from runguard.ledger.urls import store_name
    from runguard.policy import RULES, PolicyFile

    changed: dict[str, tuple[Any, Any]] = {}
    told = policy.model_dump(mode="json", include=set(PolicyFile.model_fields), exclude_none=True, exclude={"tools", "rules"})
    for name, field in PolicyFile.model_fields.items():
        if name not in ("rules", "tools") and getattr(policy, name) != field.default:
            changed[name] = (told.get(name), field.default)
    if "store" in changed:
        changed["store"] = (store_name(policy.store), "memory")  # a URL may hold a password
    for rule, (default, _) in RULES.items():
        rungs = policy.rungs(rule)
        if rungs != default:
            changed[f"rules.{rule}"] = (_rungs(rungs) if rungs is not None else False, _rungs(default))
    for pattern, tool in policy.tools.items():
        changed[f"tools.{pattern}"] = (tool.model_dump(mode="json", exclude_defaults=True), {})
    return changed


def _rungs(rungs: Any) -> dict[str, float]:
    numbers = {name: getattr(rungs, name) for name in ("warn", "nudge", "block", "stop")}
    return {name: int(number) if number == int(number) else number for name, number in numbers.items() if number is not None}


def _words(value: Any) -> str:
    if value is None:
        return "none"
    if value is False:
        return "off"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(entry)}" for name, entry in value.items()) or "nothing"
    return _word(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
