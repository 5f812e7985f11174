"""``runguard check``: validate a policy and show what it changes."""

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runguard.cli.commands.command import Command, fail
from runguard.cli.commands.options import json_option

if TYPE_CHECKING:
    from runguard.policy.settings import Policy


@click.command(
    "check",
    cls=Command,
    examples="""
    runguard check
    runguard check deploy/runguard.toml
    runguard check --schema > runguard.schema.json
    """,
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
@click.option("--schema", is_flag=True, help="Print the JSON Schema of runguard.toml and do nothing else.")
@click.pass_context
def command(ctx: click.Context, file: Path | None, as_json: bool, schema: bool) -> None:
    """Validate a policy file and show what it changes.

    FILE is a runguard.toml, or a pyproject.toml with [tool.runguard]. Default: the file that a run started here would
    use. Exit code 0 if the policy is valid, 1 if FILE is a pyproject.toml without a [tool.runguard] table, 2 if the
    policy, RUNGUARD_MODE or RUNGUARD_STORE is not valid.
    """
    from runguard.cli.commands.policies import check_environment, load_policy
    from runguard.core.errors import PolicyError
    from runguard.policy.settings import find_policy_file, policy_schema

    if schema:
        click.echo(json.dumps(policy_schema(), indent=2))
        return
    path = file
    try:
        path = path or find_policy_file()
        policy = load_policy(path)
        check_environment()
    except PolicyError as error:
        fail(ctx, str(error), file=str(path) if path else None)
    changed, notes = _changed(policy), _notes()
    sets_nothing = path is not None and not _has_table(path)
    if as_json:
        settings = {name: {"value": value, "default": default} for name, (value, default) in changed.items()}
        result = {
            "ok": not sets_nothing,
            "file": str(path) if path else None,
            "settings": settings,
            "policy": policy.digest,
            "notes": notes,
        }
        click.echo(json.dumps(result, indent=2))
    else:
        _print(path, sets_nothing, changed, notes)
    sys.exit(1 if sets_nothing else 0)


def _print(path: Path | None, sets_nothing: bool, changed: dict[str, tuple[Any, Any]], notes: list[str]) -> None:
    if sets_nothing:
        click.echo(f"{path}: no [tool.runguard] table, so this file sets nothing")
    else:
        click.echo(f"ok: {path}" if path else "ok: no policy file in this folder or its parents")
    width = max((len(name) for name in changed), default=0)
    for name, (value, default) in changed.items():
        click.echo(
            f"  {name:<{width}}  {_shown(value)}"
            + ("" if name.startswith("tools.") else f"  (default {_shown(default)})")
        )
    if not changed:
        click.echo("  every setting at its default")
    for note in notes:
        click.echo(f"  note: {note}")


def _has_table(path: Path) -> bool:
    """Return whether the file can set anything: a pyproject.toml needs a [tool.runguard] table."""
    if path.name != "pyproject.toml":
        return True
    tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    return isinstance(tool, dict) and "runguard" in tool


def _notes() -> list[str]:
    """Return the environment variables that override the file."""
    notes = []
    if mode := os.environ.get("RUNGUARD_MODE"):
        notes.append(f"RUNGUARD_MODE={mode} overrides the mode of every run started here")
    if os.environ.get("RUNGUARD_STORE"):
        notes.append("RUNGUARD_STORE overrides the store of every run started here")
    return notes


def _changed(policy: "Policy") -> dict[str, tuple[Any, Any]]:
    """Return settings that differ from the defaults: name -> (value, default). Rules appear as their final rungs."""
    from runguard.ledger.memory import store_name
    from runguard.policy.settings import RULES, Policy, PolicyFile

    changed: dict[str, tuple[Any, Any]] = {}
    current, defaults = (_plain(each) for each in (policy, Policy.validated({}, "")))
    for name in PolicyFile.model_fields:
        if name not in ("rules", "tools") and current.get(name) != defaults.get(name):
            changed[name] = (current.get(name), defaults.get(name))
    if "store" in changed:
        changed["store"] = (store_name(policy.store), "memory")  # a URL may hold a password
    if "alerts" in changed:
        changed["alerts"] = ([receiver.name for receiver in policy.alerts.receivers], [])
    for rule, (default, _) in RULES.items():
        rungs = policy.rungs(rule)
        if rungs != default:
            changed[f"rules.{rule}"] = (_rungs(rungs) if rungs is not None else False, _rungs(default))
    for pattern, tool in policy.tools.items():
        changed[f"tools.{pattern}"] = (tool.model_dump(mode="json", exclude_defaults=True), {})
    return changed


def _plain(policy: "Policy") -> dict[str, Any]:
    """Return the settings of a policy as plain data."""
    from runguard.policy.settings import PolicyFile

    return policy.model_dump(
        mode="json", include=set(PolicyFile.model_fields), exclude_none=True, exclude={"tools", "rules"}
    )


def _rungs(rungs: Any) -> dict[str, float]:
    numbers = {name: getattr(rungs, name) for name in ("warn", "nudge", "block", "stop")}
    return {
        name: int(number) if number == int(number) else number for name, number in numbers.items() if number is not None
    }


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if value is False:
        return "off"
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(entry)}" for name, entry in value.items()) or "nothing"
    return _word(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
