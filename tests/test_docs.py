"""Every Python snippet of the README and the docs runs; every TOML one is a valid policy; every link has a target."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runguard.policy import Policy
from tests.kit.examples import each_row
from tests.kit.snippets import Snippets

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
    *sorted((ROOT / "docs" / "contributing").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
FRAMEWORKS = sorted((ROOT / "docs" / "frameworks").glob("*.md"))  # tests/frameworks runs their snippets


# On an older ADK what a newcomer reads first is enough: the rest is about RunGuard more than about ADK, which other
# tests try there.
FIRST_READ = ("README.md", "quickstart.md", "rules.md", "termination.md")
IS_NEWEST = tuple(map(int, version("google-adk").split(".")[:2])) >= (2, 13)


def snippets(language: str) -> list[Any]:
    found = []
    for page in PAGES if IS_NEWEST else [page for page in PAGES if page.name in FIRST_READ]:
        for number, block in enumerate(
            re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), 1
        ):
            found.append(pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("code", snippets("python"))
def test_snippet_runs(code: str, tmp_path: Path, snippet_server: Snippets) -> None:
    status, out, err = snippet_server.run(code, tmp_path)
    assert status == 0, err
    said = {line.strip() for line in out.splitlines()}
    for promised in re.findall(r"print\(.*\)  # (\w.*)$", code, re.MULTILINE):
        start = promised.split(" ...")[0].split(":")[0]
        if start.isupper() or start[0].isdigit():
            assert any(line.startswith(start.split(",")[0]) for line in said), (
                f"promised {promised!r}, said {sorted(said)}"
            )


def test_snippets_import_the_modules_that_they_name() -> None:
    """``runguard.testing`` without its import works only where something else has imported it, as in the process that
    runs the snippets.
    """
    for snippet in snippets("python"):
        tree = list(ast.walk(ast.parse(str(snippet.values[0]))))
        imported = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
        for node in tree:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "runguard":
                name = f"runguard.{node.attr}"
                is_imported = any(f"{one}.".startswith(f"{name}.") for one in imported)
                assert find_spec(name) is None or is_imported, f"{snippet.id} names {name}"


@pytest.mark.parametrize("text", snippets("toml"))
def test_policy_snippet_is_valid(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r'"env:(\w+)"', text):
        secret = "https://hooks.slack.com/services/T000/B000/xxxx" if name == "SLACK_WEBHOOK" else "0" * 32
        monkeypatch.setenv(name, secret)
    Policy.validated(tomllib.loads(text), "docs")


@each_row("page", [*PAGES, *FRAMEWORKS])
def test_links_have_targets(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        at = page.parent / target if target else page
        assert at.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(at), f"{page.name} links to {target}#{anchor}"


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of a page get, here and on the repository's host."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_shows_the_measured_stop() -> None:
    """The README's numbers are those of its own snippet."""
    code = next(param.values[0] for param in snippets("python") if "parse_document" in str(param.values[0]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", str(code)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "RUNGUARD_STOP"
    assert lines[1] == "stall parse_document 6 6"
    assert lines[2].startswith("stopped by stall of tool 'parse_document': 6 equal failures, limit 6")
    assert lines[-1] == "6 model calls instead of 500"
