"""What a release promises about its own installation; ``make release-check`` tries it out."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def test_the_exporter_of_the_extra_metrics_fits_the_opentelemetry_that_adk_allows() -> None:
    """A release 0.N of the exporter needs exactly OpenTelemetry 1.(N - 21)."""
    (pin,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["metrics"])
    newest = max(Version(each.version) for each in pin.specifier if each.operator == "<=")
    needed = f"1.{newest.minor - 21}.0"
    allowed = [
        requirement.specifier
        for requirement in map(Requirement, distribution("google-adk").requires or ())
        if requirement.name == "opentelemetry-sdk" and requirement.marker is None
    ]
    assert allowed
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus.version").__version__
    sdk = [
        Requirement(each).specifier
        for each in distribution("opentelemetry-exporter-prometheus").requires or ()
        if each.startswith("opentelemetry-sdk")
    ]
    of_installed = f"1.{Version(exporter).minor - 21}.0"
    assert all(each.contains(of_installed) for each in sdk), "the rule above no longer holds"
    if distribution("google-adk").version.startswith("2.13"):
        assert all(each.contains(needed) for each in allowed)


def test_a_build_on_a_python_that_is_too_old_ends_at_once() -> None:
    script = (
        "import sys, types\n"
        "names = 'hatchling hatchling.metadata hatchling.metadata.plugin hatchling.metadata.plugin.interface'\n"
        "for name in names.split(): sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules[name].MetadataHookInterface = object\n"
        "import hatch_build\n"
        "hatch_build.NewEnoughPython().update({})\n"
        "print('this one is new enough')\n"
        "sys.version_info = (3, 10, 13)\n"
        "hatch_build.NewEnoughPython().update({})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "this one is new enough\n")
    assert done.stderr.startswith("RunGuard needs Python 3.11 or newer, and this is Python 3.10: ")
    assert "custom" in PROJECT["tool"]["hatch"]["metadata"]["hooks"]
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_every_place_names_the_same_pythons() -> None:
    classifiers = [
        each.rpartition(" :: ")[2] for each in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", each)
    ]
    assert tuple(classifiers) == PYTHONS
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]} · " in readme
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r'^ +python: \[("3\.11".*)\]$', workflow, re.MULTILINE)
    assert tuple(matrix.replace('"', "").split(", ")) == PYTHONS
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"PYTHONS ?= {' '.join(PYTHONS)}\n" in makefile


def test_the_readme_names_the_newest_adk_that_the_tests_run_on() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"google-adk 2\.3 to (2\.\d+)", readme)
    assert found is not None
    floors = [Requirement(each) for each in PROJECT["dependency-groups"]["dev"] if each.startswith("google-adk")]
    assert [str(each.specifier) for each in floors] == [f">={found[1]}"]
