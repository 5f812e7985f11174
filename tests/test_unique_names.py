"""A class has a name of its own: a reader who searches for it finds one definition."""

import ast
from collections import defaultdict
from pathlib import Path

import runguard

SOURCE = Path(runguard.__file__).parent


def test_no_two_classes_share_a_name() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
