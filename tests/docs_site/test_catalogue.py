"""The page for ADK's catalogue: its front matter is complete, its icon is there, and what it shows runs."""

import re
from pathlib import Path

import pytest
import yaml

from tests.kit.snippets import Snippets

FOLDER = Path(__file__).parents[2] / "docs" / "contributing" / "adk-docs-catalogue"
PAGE = (FOLDER / "runguard.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_front_matter_is_what_the_catalogue_reads() -> None:
    _, front, body = PAGE.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert set(matter) == {"catalog_title", "catalog_description", "catalog_icon", "catalog_tags"}
    assert matter["catalog_tags"] == ["resilience"]
    assert (FOLDER / Path(matter["catalog_icon"]).name).read_bytes().startswith(b"\x89PNG")
    # the catalogue's own rules: a short description that begins with a verb, one form of title, no em dash
    assert 45 <= len(matter["catalog_description"]) <= 75
    assert matter["catalog_description"].split()[0] in ("Stop", "Guard", "Limit")
    assert re.findall(r"^# (.*)$", body, re.MULTILINE)[:1] == [f"{matter['catalog_title']} plugin for ADK"]
    assert "—" not in PAGE
    headings = re.findall(r"^## (.*)$", body, re.MULTILINE)
    assert headings[:4] == ["Use cases", "Prerequisites", "Installation", "Use with agent"]


@pytest.mark.parametrize("code", SNIPPETS, ids=range(1, len(SNIPPETS) + 1))
def test_snippet_runs(code: str, tmp_path: Path, snippet_server: Snippets) -> None:
    status, out, err = snippet_server.run(code, tmp_path)
    assert status == 0, err
    if "RUNGUARD_STOP" in code:
        assert "RUNGUARD_STOP" in out
