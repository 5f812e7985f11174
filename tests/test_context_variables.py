"""Context variables carry state sideways, so there are few of them, and one page lists them."""

import ast
import functools
from collections import Counter
from pathlib import Path

import runguard

SOURCE = Path(runguard.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "contributing" / "architecture.md"


@functools.cache
def variables() -> list[tuple[str, str]]:
    """The files that create a context variable, and the names of the variables."""
    return [
        (str(path.relative_to(SOURCE)), ast.literal_eval(node.args[0]))
        for path in sorted(SOURCE.rglob("*.py"))
        if "ContextVar" in path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "ContextVar"
    ]


def test_there_are_few() -> None:
    """ADK and what all adapters share have four, another adapter at most three: what its framework does not pass on."""
    kept = Counter(file.partition("/")[0] for file, _ in variables())
    shared = {"adk", "calls", "engine"}
    assert sum(kept[package] for package in shared) <= 4, variables()
    assert all(count <= 3 for package, count in kept.items() if package not in shared), variables()


def test_the_architecture_page_lists_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert variables()
    assert [name for _, name in variables() if f"`{name}`" not in page] == []
