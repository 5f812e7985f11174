"""Phrases that readers had to translate stay out of the source, the documentation and the README.

Each phrase has a plain replacement. CONTRIBUTING.md has the style guide.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[1]
PAGES: Final = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES: Final = sorted((ROOT / "src" / "runguard").rglob("*.py"))

PHRASES: Final = {  # pattern -> what to write instead
    r"whatever cannot be meant": "invalid settings are rejected",
    r"cannot be meant|can be meant": "is not valid, is valid",
    r"if that is meant": "to allow it",
    r"\bis told\b|\bare told\b|\bwas told\b|\bbe told\b|\bbeing told\b": "say who reports, sends or receives what",
    r"\bnot told\b": "not reported",
    r"\btold (again|once|apart|before)\b": "reported again, reported once, counted separately, already reported",
    r"\bwhoever\b": "anyone who, the user who",
    r"\bnobody (knows|asks|has|is|was|can|could|will|would|foresaw|set)\b": "unknown; say who does not do it",
    r"\bstands for it\b": "is used instead",
    r"\bgoes alone\b": "runs exclusively",
    r"\bto be had\b": "available",
    r"\bin earnest\b": "in production",
    r"\bdear(er|est)?\b": "expensive",
    r"\ba word to the model\b": "a notice to the model",
    r"\bin the shadow\b": "in shadow mode",
    r"\bby (itself|themselves) (where|when|whatever)\b": "automatically",
    r"\blooks? whether\b": "check that",
    r"\bleave to (read|write)\b": "permission to read, to write",
    r"\bbegins? anew\b|\bstarts? afresh\b": "starts again, resets",
    r"\bthrown? (the|those|a) (switch|stops?)\b": "repeat `runguard stop`",
    r"\bmend (it|the)\b": "fix",
}


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page, or the strings, docstrings and comments of a module, with their line numbers."""
    if path.suffix == ".md":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from enumerate(node.value.split("\n"), node.lineno)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


@pytest.mark.parametrize("pattern", PHRASES)
def test_plain_english(pattern: str, texts: list[tuple[Path, int, str]]) -> None:
    phrase = re.compile(pattern, re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:100]!r}; better: {PHRASES[pattern]}"
        for path, line, text in texts
        if phrase.search(text)
    ]
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def texts() -> list[tuple[Path, int, str]]:
    return [(path, line, text) for path in (*PAGES, *SOURCES) for line, text in _texts(path)]
