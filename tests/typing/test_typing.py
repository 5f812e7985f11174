"""Editors and type checkers know the settings: snippets that they accept, and lines that they reject.

mypy reads the snippets with everything else, and would report a line that it is told to ignore and accepts.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SNIPPETS = sorted(HERE.glob("*ed_*.py"))
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("mypy") is None, reason="the type checkers are installed with the newest google-adk"),
]


def wrong_lines() -> dict[str, set[int]]:
    """The lines that a checker must report, by file."""
    found = {
        file.name: {
            number for number, line in enumerate(file.read_text("utf-8").splitlines(), 1) if line.endswith("# wrong")
        }
        for file in SNIPPETS
    }
    assert not found["accepted_settings.py"]
    assert len(found["rejected_settings.py"]) > 10
    return found


def test_pyright_reports_the_wrong_lines_and_no_others(tmp_path: Path) -> None:
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "typeCheckingMode": "standard",
                "include": [str(file) for file in SNIPPETS],
                "pythonVersion": "3.11",
                "enableTypeIgnoreComments": False,
            }
        ),
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "--project",
        str(settings),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode < 2, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["summary"]["filesAnalyzed"] == len(SNIPPETS)
    reported = [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in found["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert {file.name: {line for name, line in reported if name == file.name} for file in SNIPPETS} == wrong_lines()
