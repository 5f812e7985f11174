"""What programs and users rely on, as text: names, settings, commands, keys, codes and stored data.

Each function returns the lines of one file in ``tests/golden/files``.
"""

import ast
import importlib
import inspect
import json
import re
import sqlite3
import typing
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

import runguard
from runguard import Budget, Threshold, ToolRule
from runguard.policy import Policy
from runguard.policy.settings import RULES

SOURCE = Path(runguard.__file__).parent
PUBLIC = (
    "runguard",
    "runguard.adk",
    "runguard.testing",
    "runguard.alerts",
    "runguard.replay",
    "runguard.calibrate",
    "runguard.gate",
    "runguard.termination",
    "runguard.errors",
    "runguard.policy",
    "runguard.view",
)
_MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")
_EVENT = re.compile(r"runguard\.[a-z_]+(?=:)")


# ---- names and settings ---------------------------------------------------------------------------------------------


def names() -> Iterator[str]:
    """Every public name with its signature; the modules in which things are defined are left out."""
    for module in PUBLIC:
        loaded = importlib.import_module(module)
        for name in sorted(_exported(loaded)):
            yield f"{module}.{name}{_signature(getattr(loaded, name))}"


def _exported(module: Any) -> Iterable[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def _signature(value: Any) -> str:
    if not callable(value) or isinstance(value, typing.NewType):
        return f": {type(value).__name__}"
    if isinstance(value, type) and issubclass(value, BaseModel):
        return f": {', '.join(value.model_fields)}"
    if isinstance(value, type) and issubclass(value, Enum):
        return f": {', '.join(value.__members__)}"
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return f": {type(value).__name__}"
    return re.sub(r" at 0x[0-9a-f]+", "", _MODULE.sub("", text.replace("'", "")))


def settings() -> Iterator[str]:
    """Every setting with its default."""
    for model in (Policy, ToolRule):
        for name, field in model.model_fields.items():
            yield f"{model.__name__}.{name} = {_default(field.get_default(call_default_factory=True))}"
    for kind in (Budget, Threshold):
        for one in fields(kind):
            required = one.default is MISSING and one.default_factory is MISSING
            yield f"{kind.__name__}.{one.name} = {'(required)' if required else _default(one.default)}"
    for rule, (rungs, allowed) in RULES.items():
        yield f"rules.{rule} = {_default(rungs)}, rungs that can be set: {', '.join(sorted(allowed))}"


def _default(value: Any) -> str:
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json"), sort_keys=True)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# ---- commands -------------------------------------------------------------------------------------------------------


def commands(main: click.Group) -> Iterator[str]:
    """Every command with its arguments and options."""
    for name in main.list_commands(click.Context(main)):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        yield from _command(command, name)


def _command(command: click.Command, name: str) -> Iterator[str]:
    yield name
    for param in command.params:
        default = param.default if isinstance(param.default, str | int | float | bool | type(None)) else "(computed)"
        kind = f"{param.type.name}{list(param.type.choices) if isinstance(param.type, click.Choice) else ''}"
        yield (
            f"  {' '.join([*param.opts, *param.secondary_opts])}: {kind}, default {default}, {param.nargs} "
            f"value(s){', repeatable' if param.multiple else ''}"
        )
    if isinstance(command, click.Group):
        for sub in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), sub)
            assert child is not None
            yield from _command(child, f"{name} {sub}")


def key_paths(value: Any, path: str = "") -> set[str]:
    """Every key of a JSON document. Keys that are data (ids, models, tools, scopes) are written as ``*``."""
    if isinstance(value, dict):
        named = {key if re.fullmatch(r"[a-z_]+", key) else "*": child for key, child in value.items()}
        return {f"{path}.{key}" for key in named} | {
            found for key, child in named.items() for found in key_paths(child, f"{path}.{key}")
        }
    if isinstance(value, list):
        return {found for child in value for found in key_paths(child, f"{path}[]")}
    return set()


# ---- codes and names that programs read -----------------------------------------------------------------------------


def log_events() -> Iterator[str]:
    """The event that each log line begins with."""
    yield from sorted({match for text in _texts() for match in _EVENT.findall(text)})


def _texts() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def telemetry() -> Iterator[str]:
    """Names of metrics, events and attributes."""
    (path,) = SOURCE.rglob("telemetry.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


# ---- stored data ----------------------------------------------------------------------------------------------------


def records(file: Path) -> Iterator[str]:
    """The keys of everything that a filled SQLite store keeps as JSON."""
    found: set[str] = set()
    with closing(sqlite3.connect(file)) as db:
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            for row in db.execute(f"SELECT * FROM {table}").fetchall():
                for column, value in zip(columns, row, strict=True):
                    found |= _keys_of(value, f"{table}.{column}")
    yield from sorted(found)


def _keys_of(value: Any, where: str) -> set[str]:
    if not isinstance(value, str) or value[:1] not in "[{":
        return set()
    try:
        document = json.loads(value)
    except ValueError:
        return set()
    if isinstance(document, list):
        return {
            path
            for one in document
            for path in key_paths(one, f"{where}[{one['k']}]" if isinstance(one, dict) and "k" in one else f"{where}[]")
        }
    return key_paths(document, where)


def sqlite_schema(file: Path) -> Iterator[str]:
    with closing(sqlite3.connect(file)) as db:
        for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall():
            yield re.sub(r"\s+", " ", sql)


def postgres_schema(url: str, schema: str) -> Iterator[str]:
    import psycopg

    with psycopg.connect(url) as db:
        for table, column, kind in db.execute(
            "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = %s "
            "ORDER BY 1, ordinal_position",
            (schema,),
        ):
            yield f"{table}.{column}: {kind}"


def redis_keys(url: str, namespace: str) -> Iterator[str]:
    """The kinds of keys: whatever follows the second part of a key is data."""
    import redis

    found = set()
    with redis.Redis.from_url(url) as server:
        for key in server.scan_iter(match=f"*{namespace}*", count=1_000):
            name = key.decode()
            found.add(f"{':'.join(name.replace(namespace, 'NAMESPACE').split(':')[:3])}… {server.type(key).decode()}")
    yield from sorted({re.sub(r"[0-9a-f]{16,}-\d+|:i:\d+", "ID", one) for one in found})
