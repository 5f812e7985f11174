"""Modules and classes have names of their own: a reader who searches for one finds one definition.

Parallel packages do the same work for different things, and call its parts alike.
"""

import ast
from collections import defaultdict
from pathlib import Path

import runguard

SOURCE = Path(runguard.__file__).parent
PARALLEL = (
    {"ledger/sqlite", "ledger/redis", "ledger/postgres"},
    # each framework has its side of what the conductor does
    {"conductor", "adapters", "adk", "langchain", "openai_agents", "pydantic_ai"},
)
# These are named after what users write: a command, or a rule.
NAMED_BY_USERS = {"cli/commands", "core/detectors"}


def test_no_two_classes_share_a_name() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_two_modules_share_a_name() -> None:
    packages: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.parent.relative_to(SOURCE).as_posix()
        if not path.stem.startswith("__") and package not in NAMED_BY_USERS:
            packages[path.stem].append(package)
    shared = {name: places for name, places in packages.items() if len(places) > 1}
    assert {n: places for n, places in shared.items() if not any(set(places) <= group for group in PARALLEL)} == {}
