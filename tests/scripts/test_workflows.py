"""The workflows pass a linter, pin what they use, and name the releases that are tested."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from tests.kit.scripts import ROOT, script

WORKFLOWS = [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), ROOT / "examples" / "ci" / "runguard-gate.yml"]
ZIZMOR = Path(sys.executable).with_name("zizmor")


@pytest.mark.skipif(not ZIZMOR.exists(), reason="zizmor is installed in the newest environment alone")
def test_the_linter_finds_nothing() -> None:
    command = [str(ZIZMOR), "--offline", "--quiet", *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_permissions_are_few(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)( # v[\d.]+)?", text)
    assert used
    assert [name for name, comment in used if not re.search(r"@[0-9a-f]{40}$", name) or not comment] == []
    assert yaml.safe_load(text)["permissions"] == {}


def test_only_the_publishing_job_publishes() -> None:
    jobs = yaml.safe_load(WORKFLOWS[0].read_text(encoding="utf-8"))["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in WORKFLOWS[0].read_text(encoding="utf-8")


def test_the_matrix_names_every_python_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {found[1] for line in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", line))}
    matrix = yaml.safe_load(WORKFLOWS[1].read_text(encoding="utf-8"))["jobs"]["matrix"]["strategy"]["matrix"]
    assert set(matrix["python"]) == named


def test_the_matrix_names_every_tested_release_of_adk() -> None:
    adk = script("test_adk")
    matrix = yaml.safe_load(WORKFLOWS[1].read_text(encoding="utf-8"))["jobs"]["matrix"]["strategy"]["matrix"]
    named = {*matrix["adk"], *(job["adk"] for job in matrix["include"])}
    assert named - {"pre"} == set(adk.RELEASES)
    assert [adk.requirement(each) for each in ("2.3", "newest")] == ["google-adk==2.3.*", "google-adk"]


def test_the_other_systems_have_what_their_tests_import() -> None:
    steps = yaml.safe_load(WORKFLOWS[1].read_text(encoding="utf-8"))["jobs"]["systems"]["steps"]
    (ran,) = [step["run"] for step in steps if "-m pytest" in step.get("run", "")]
    tested = [ROOT / name for name in ("tests/conftest.py", *ran.split()[3:])]
    files = [file for each in tested for file in (each.rglob("*.py") if each.is_dir() else [each])]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*pyproject["dependency-groups"]["systems"], *pyproject["project"]["dependencies"]]
    brought = {"google-genai", "opentelemetry-api", "opentelemetry-sdk"}  # by google-adk
    there = {re.split(r"[<>=\[]", line)[0] for line in wanted} | brought
    assert {module: names for module, names in imported_by(files).items() if not names & there} == {}


def imported_by(files: Iterable[Path]) -> dict[str, set[str]]:
    """Return the packages of other projects that are imported when these files are, by module."""
    names: set[str] = set()
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    known = packages_distributions()
    others = names - sys.stdlib_module_names - {"runguard", "tests", "benchmarks"}
    return {name: {found.lower().replace("_", "-") for found in known.get(name, [])} for name in others}


def test_the_kit_runs_on_the_newest_frameworks_on_a_schedule() -> None:
    workflow = yaml.safe_load(WORKFLOWS[1].read_text(encoding="utf-8"))
    job = workflow["jobs"]["newest"]
    assert workflow[True]["schedule"]  # YAML reads "on" as true
    assert job["if"] == "github.event_name == 'schedule'"
    assert job["steps"][-1]["run"] == "make test-newest-frameworks"
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    kit = re.search(r"^KIT := \$\(addprefix (\S+), (.*)\)$", make, re.MULTILINE)
    assert kit is not None
    playing = {
        path.name
        for path in (ROOT / "tests" / "frameworks").glob("test_*.py")
        if "conformance.CASES" in path.read_text()
    }
    assert {f"{kit[1]}{name}" for name in kit[2].split()} == {f"tests/frameworks/{name}" for name in playing}


def test_minor_releases_that_nobody_tests_are_named() -> None:
    untested, last = script("test_adk").untested, script("test_adk").RELEASES[-2]
    minor = int(last.split(".")[1])
    assert untested(f"2.{minor + 1}.0") == []
    assert untested(f"2.{minor + 3}.1") == [f"2.{minor + 1}", f"2.{minor + 2}"]


def test_the_lock_names_no_host() -> None:
    lock = (ROOT / "locks" / "dev.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?://|file:|--index|--find-links", lock)
    pinned = re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==", lock, re.MULTILINE)
    assert {"google-adk", "pydantic", "pytest"} <= set(pinned)
    assert lock.count("--hash=sha256:") >= len(pinned)
