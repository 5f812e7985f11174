"""A planted break of the public API is found unless the changelog announces it; an inner change is no break."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripts import script

if find_spec("griffe") is None:
    pytest.skip("griffe is installed in the newest environment alone", allow_module_level=True)
api = script("api_breaks")

# A small package of the same shape: names that packages load lazily, and modules behind them.
EXPORTS = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from runguard.gate.checks import Report, gate
    from runguard.gate.figures import needed
__all__ = ["Report", "gate", "needed"]
"""
CHECKS = """
class Report:
    ok: bool = True
    def write(self, path: str, *, mode: str = "w") -> None: ...
    def _inner(self, path: str) -> None: ...

def gate(source: str, *, strict: bool = False) -> Report: ...

def helper(source: str) -> None: ...
"""
FIGURES = "def needed(share: float) -> int: ...\n"


def package(folder: Path, **changed: str) -> Path:
    files = {"__init__": "", "gate/__init__": EXPORTS, "gate/checks": CHECKS, "gate/figures": FIGURES}
    files |= {name.replace("__in", "/__in").replace("gate_", "gate/"): text for name, text in changed.items()}
    for name, text in files.items():
        path = folder / "runguard" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def found_after(tmp_path: Path, **changed: str) -> list[Any]:
    return list(api.breaks(package(tmp_path / "old"), package(tmp_path / "new", **changed)))


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (", *, strict: bool = False", "", "gate"),
        ("source: str, *", "source: str, more: str, *", "gate"),
        ("def gate(", "def gates(", "gate"),
        ('path: str, *, mode: str = "w"', "path: str", "Report"),
        ("    ok: bool = True\n", "", "Report"),
        ("class Report:", "class Reports:", "Report"),
    ],
)
def test_a_planted_break_is_found(tmp_path: Path, before: str, after: str, name: str) -> None:
    assert before in CHECKS
    found = found_after(tmp_path, gate_checks=CHECKS.replace(before, after))
    assert {each.name for each in found} == {f"runguard.gate.{name}"}


def test_a_name_that_is_no_longer_exported_is_a_break(tmp_path: Path) -> None:
    (found,) = found_after(tmp_path, gate__init__=EXPORTS.replace(', "needed"', ""))
    assert str(found) == "runguard.gate.needed: removed"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def helper(source: str)", "def other()"),  # not exported
        ("def _inner(self, path: str)", "def _inner(self)"),
        ("strict: bool = False", "strict: bool = False, more: int = 0"),  # optional
    ],
)
def test_other_changes_are_no_breaks(tmp_path: Path, before: str, after: str) -> None:
    assert found_after(tmp_path, gate_checks=CHECKS.replace(before, after)) == []


def test_a_module_may_move(tmp_path: Path) -> None:
    moved = EXPORTS.replace("runguard.gate.figures", "runguard.gate.counts")
    assert found_after(tmp_path, gate__init__=moved, gate_counts=FIGURES, gate_figures="") == []


def test_the_changelog_announces_a_break(tmp_path: Path) -> None:
    found = found_after(
        tmp_path,
        gate__init__=EXPORTS.replace(', "needed"', ""),
        gate_checks=CHECKS.replace('path: str, *, mode: str = "w"', "path: str").replace(
            ", *, strict: bool = False", ""
        ),
    )
    section = api.announced(
        "# Changelog\n\n## 0.2.0 (unreleased)\n\n"
        "### Breaking\n- `runguard.gate.gate()` is strict. `Report.write(path)`.\n"
        "\n### Added\n- `needed`\n\n## 0.1.0\n\n### Removed\n- `needed`\n"
    )
    assert {each.name for each in found} == {f"runguard.gate.{name}" for name in ("Report", "gate", "needed")}
    assert {each.name for each in found if not each.is_announced(section)} == {"runguard.gate.needed"}


def test_the_adapters_of_other_frameworks_are_compared_too() -> None:
    found = api.public_api(Path(__file__).parents[2] / "src")
    assert "runguard.langchain.RunGuardMiddleware" in found
    assert {name.rpartition(".")[0] for name in found} == {*api.PUBLIC, *api.ADAPTERS}
