"""Benchmarks in their shortest form: those that need no minutes and no other program."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def started(script: str, *arguments: str, path: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=50, check=False)


def test_the_count_of_instructions_names_the_program_it_needs(tmp_path: Path) -> None:
    done = started("instructions.py", path=str(tmp_path))
    assert done.returncode == 2
    assert "install" in done.stderr
    assert "valgrind" in done.stderr


def test_a_folder_of_recordings_is_replayed(tmp_path: Path) -> None:
    steps = [{"kind": "message", "agent": "user", "text": "go"}, {"kind": "model", "agent": "a", "text": "done"}]
    run = json.dumps({"id": "r", "model": "gpt-4o", "steps": steps}) + "\n"
    (tmp_path / "one.jsonl").write_text(run)
    with gzip.open(tmp_path / "two.jsonl.gz", "wt") as file:
        file.write(run)
    done = started("replay.py", str(tmp_path), path="")
    assert "2 runs" in done.stdout, done.stderr
    assert "(4 steps)" in done.stdout.splitlines()[1]
