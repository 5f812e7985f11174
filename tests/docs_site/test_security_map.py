"""The map to OWASP names tests that exist, and leaves no entry out."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "reference" / "owasp.md").read_text(encoding="utf-8")


def test_every_entry_is_answered() -> None:
    assert re.findall(r"^\| \*\*(9\.1\.\d|ASI\d\d)\*\*", MAP, re.MULTILINE) == [
        *(f"9.1.{n}" for n in range(1, 6)),
        *(f"ASI{n:02}" for n in range(1, 11)),
    ]


def test_the_tests_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", MAP))
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert named <= set(re.findall(r"def (test_\w+)\(", text))
