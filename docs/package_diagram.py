"""Draws the packages from their imports, from the top to the bottom:
``python docs/package_diagram.py`` writes them into architecture.md.
"""  # noqa: INP001

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "runguard"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"


def imports_of(path: Path) -> set[str]:
    """The packages of this project that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        found.update(name.split(".")[1] for name in names if name.startswith("runguard."))
    return found


def packages() -> dict[str, set[str]]:
    """Each package with the packages that it imports."""
    graph: dict[str, set[str]] = {}
    for folder in sorted(path.parent for path in SOURCE.glob("*/__init__.py")):
        used = set().union(*(imports_of(path) for path in folder.rglob("*.py")))
        graph[folder.name] = used - {folder.name}
    return {name: used & set(graph) for name, used in graph.items()}


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Packages by level: one that imports nothing is at the bottom, each other one stands above all that it imports."""
    level: dict[str, int] = {}
    while len(level) < len(graph):
        ready = {name for name, used in graph.items() if name not in level and used <= set(level)}
        if not ready:
            raise SystemExit(f"the packages import each other in a circle: {sorted(set(graph) - set(level))}")
        level.update({name: max((level[one] + 1 for one in graph[name]), default=0) for name in ready})
    return [sorted(name for name in graph if level[name] == number) for number in range(max(level.values()) + 1)]


def diagram() -> str:
    graph = packages()
    lines = [f"{BEGIN}", "```"]
    for names in reversed(levels(graph)):
        lines += [f"{name:<12} imports {', '.join(sorted(graph[name])) or 'nothing'}" for name in names]
        lines.append("   ▼")
    return "\n".join([*lines[:-1], "```", END])


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    new = before + diagram() + after
    if "--check" in sys.argv:
        raise SystemExit(
            0 if new == text else "docs/architecture.md is out of date: run python docs/package_diagram.py"
        )
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
