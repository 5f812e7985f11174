"""The pages about frameworks: every Python block runs, and the table of scenarios is up to date."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL = ROOT / "docs" / "frameworks"
NEWEST_ONLY = ("strands", "agent_framework")  # not among the oldest supported frameworks
MISSING = [name.replace("_", "-") for name in NEWEST_ONLY if find_spec(name) is None]
PAGES = [page for page in sorted(ALL.glob("*.md")) if page.stem not in MISSING]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), 1)
]


@pytest.mark.parametrize("code", BLOCKS)
def test_snippet_runs(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "print(guard.trips)" not in code or "[]" in done.stdout, "the snippet shows that nothing was stopped"
    for shown in re.findall(r"print\(.*\)  # prints (\S.*)", code):
        assert shown in done.stdout.splitlines()


@pytest.mark.parametrize("code", BLOCKS)
def test_a_snippet_needs_only_what_its_install_line_brings(code: str) -> None:
    """The environment of the tests has every framework, and so packages that a user does not have."""
    named = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    brought = {"runguard", "agents", "openai", "langchain", "langchain_core", "langgraph", "pydantic_ai", "strands"}
    assert named <= brought | {"agent_framework"} | sys.stdlib_module_names


@pytest.mark.skipif(bool(MISSING), reason="the oldest supported frameworks do not have all columns")
def test_the_table_is_up_to_date() -> None:
    script = ROOT / "docs" / "write_matrix.py"
    names: dict[str, object] = {"__file__": str(script), "__name__": "write_matrix"}
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), names)
    text, page = names["text"], names["PAGE"]
    assert callable(text)
    assert isinstance(page, Path)
    assert page.read_text(encoding="utf-8") == text(), "run docs/write_matrix.py"
