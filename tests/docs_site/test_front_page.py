"""The first table of the front page: the extras of its install lines exist, and its code is what the pages show."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = {
    page: re.findall(
        r"^\| \[[^|]+\]\(([^)]+)\) \| `(pip install [^`]+)` \| `([^`]+)`", page.read_text("utf-8"), re.MULTILINE
    )
    for page in (ROOT / "docs" / "index.md", ROOT / "README.md")
}


@pytest.mark.parametrize("page", ROWS, ids=lambda page: page.name)
def test_every_install_line_names_an_extra_that_exists(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = [found[1] for _, line, _ in ROWS[page] if (found := re.fullmatch(r"pip install '\.\[([\w-]+)\]'", line))]
    assert len(ROWS[page]) >= 5
    assert set(named) <= set(extras)
    assert {"adk", "langchain", "openai-agents", "pydantic-ai"} <= set(named)


@pytest.mark.parametrize("page", ROWS, ids=lambda page: page.name)
def test_every_line_of_code_uses_what_its_page_shows(page: Path) -> None:
    for target, _, code in ROWS[page]:
        shown = (page.parent / target).read_text("utf-8")
        if code.startswith("runguard "):
            assert code in shown, target
            continue
        called = [ast.unparse(node.func) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        assert [name for name in called if f"{name}(" not in shown] == [], target
