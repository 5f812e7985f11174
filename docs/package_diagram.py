"""Writes what the pages for maintainers say about the code: ``python docs/package_diagram.py``.

It draws the layers of packages in architecture.md from their imports, and lists all files in files.md with the
beginning of their docstrings. ``--check`` writes nothing and fails where a page is out of date.
"""  # noqa: INP001

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "runguard"
ARCHITECTURE = ROOT / "docs" / "contributing" / "architecture.md"
FILES = ROOT / "docs" / "contributing" / "files.md"
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
HEAD = """# Files

Every file of `src/runguard`, from the top of [the layers](architecture.md#layers) to the bottom.
`python docs/package_diagram.py` writes this page from the docstrings.
"""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> set[str]:
    """Return the packages and root modules of this project that a file imports."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in found if name.startswith("runguard.")}


def packages() -> dict[str, set[str]]:
    """Return each package and each public module of the root, with those that it imports."""
    graph: dict[str, set[str]] = {}
    for entry in sorted(SOURCE.iterdir()):
        files = [*entry.rglob("*.py"), *([entry] if entry.suffix == ".py" else [])]
        if files and not entry.name.startswith("_"):
            graph[entry.stem] = set().union(*map(imports_of, files)) - {entry.stem}
    return {name: used & set(graph) for name, used in graph.items()}


def levels() -> list[list[str]]:
    """Return packages by level: one that imports nothing is at the bottom, each other one stands above all that it
    imports.
    """
    graph, level = packages(), dict[str, int]()
    while len(level) < len(graph):
        ready = {name for name, used in graph.items() if name not in level and used <= set(level)}
        if not ready:
            raise SystemExit(f"the packages import each other in a circle: {sorted(set(graph) - set(level))}")
        level.update({name: max((level[one] + 1 for one in graph[name]), default=0) for name in ready})
    return [sorted(name for name in graph if level[name] == number) for number in range(max(level.values()) + 1)]


def architecture() -> str:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    lines = [" · ".join(names) for names in reversed(levels())]
    drawn = "\n".join([BEGIN, "```", *lines, "```", END])
    return text[: text.index(BEGIN)] + drawn + text[text.index(END) + len(END) :]


def summary(path: Path) -> str:
    """Return the first sentence of a file's docstring."""
    paragraph = " ".join((ast.get_docstring(parsed(path)) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph.replace("``", "`"))[0].removesuffix(".")


def files() -> str:
    """Return the page of all files. A package's ``__init__`` stands under its heading."""
    lines = [HEAD]
    order = [name for names in reversed(levels()) for name in names]
    folders = [SOURCE, *(path.parent for name in order for path in sorted((SOURCE / name).rglob("__init__.py")))]
    for folder in folders:
        lines += [f"## {folder.relative_to(SOURCE.parent)}", ""]
        members = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        lines += [f"- `{path.name}`: {summary(path)}" for path in members]
        lines += [""] if members else []
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    pages = {ARCHITECTURE: architecture(), FILES: files()}
    if "--check" not in sys.argv:
        for page, text in pages.items():
            page.write_text(text, encoding="utf-8")
        return
    for page, text in pages.items():
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{page.relative_to(ROOT)} is out of date: run python docs/package_diagram.py")


if __name__ == "__main__":
    main()
