"""Editors and type checkers know the settings: snippets that mypy and pyright accept, and lines that both reject."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(find_spec("mypy") is None, reason="the type checkers are installed with the newest google-adk")]


def mypy(file: Path, cache: Path) -> set[int]:
    """The lines that mypy reports."""
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", f"--cache-dir={cache}", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode < 2, ran.stdout + ran.stderr
    return {int(line) for line in re.findall(rf"{re.escape(file.name)}:(\d+): error", ran.stdout)}


def pyright(file: Path, cache: Path) -> set[int]:
    """The lines that pyright reports."""
    settings = cache / "pyrightconfig.json"
    settings.write_text(json.dumps({"typeCheckingMode": "standard", "include": [str(file)], "pythonVersion": "3.11"}), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(settings)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode < 2, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    return {one["range"]["start"]["line"] + 1 for one in found["generalDiagnostics"] if one["severity"] == "error"}


@pytest.mark.parametrize("checker", [mypy, pyright])
@pytest.mark.parametrize("file", sorted(HERE.glob("*/*.py")), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_checker_reports_the_wrong_lines_and_no_others(checker, file: Path, tmp_path: Path) -> None:
    wrong = {number for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if line.endswith("# wrong")}
    assert bool(wrong) is (file.parent.name == "rejected")
    assert checker(file, tmp_path) == wrong
