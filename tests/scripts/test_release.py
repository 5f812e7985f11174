"""``scripts/release.py`` sets version and changelog, and refuses a version that cannot be right."""

from pathlib import Path

import pytest

from tests.kit.scripts import script

release = script("release")
CHANGELOG = """# Changelog

## 0.2.0 (unreleased)

### Added
- Something.

## 0.1.0 (2026-01-01)

### Added
- Everything.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src" / "runguard").mkdir(parents=True)
    (tmp_path / "src" / "runguard" / "_version.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def version(tree: Path) -> str:
    return (tree / "src" / "runguard" / "_version.py").read_text()


def test_one_command_sets_both(tree: Path) -> None:
    assert release.main(tree, ["0.2.0", "--date", "2026-12-01"]) == 0
    assert version(tree) == '__version__ = "0.2.0"\n'
    assert (tree / "CHANGELOG.md").read_text() == CHANGELOG.replace("0.2.0 (unreleased)", "0.2.0 (2026-12-01)")
    assert release.main(tree, ["--open", "0.3.0"]) == 0
    assert version(tree) == '__version__ = "0.3.0.dev0"\n'
    assert "# Changelog\n\n## 0.3.0 (unreleased)\n\n## 0.2.0 (2026-12-01)\n" in (tree / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0.1.0"], "does not come after"),
        (["0.1.0rc1"], "does not come after"),
        (["next"], "is not a version"),
        (["--open", "0.3.0"], "still open"),
    ],
)
def test_what_is_refused_changes_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert release.main(tree, arguments) == 2
    assert message in capsys.readouterr().err
    assert version(tree) == '__version__ = "0.1.0"\n'
    assert (tree / "CHANGELOG.md").read_text() == CHANGELOG


@pytest.mark.parametrize(
    ("last", "next_version", "is_allowed"),
    [
        ("0.1.0", "0.1.1", False),
        ("0.1.0", "0.2.0", True),
        ("1.1.0", "1.2.0", False),
        ("1.1.0", "2.0.0", True),
    ],
)
def test_a_break_needs_its_version(tree: Path, last: str, next_version: str, is_allowed: bool) -> None:
    text = CHANGELOG.replace("### Added\n- Something.", "### Breaking\n- `gate` is gone.").replace(
        "## 0.1.0", f"## {last}"
    )
    (tree / "CHANGELOG.md").write_text(text)
    assert release.main(tree, [next_version]) == (0 if is_allowed else 2)


def test_an_empty_section_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text(CHANGELOG.replace("- Something.\n", ""))
    assert release.main(tree, ["0.2.0"]) == 2
