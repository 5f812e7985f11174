"""Take each optional feature out of a copy of the source, and see whether the rest works.

    .venv/bin/python scripts/without_features.py                  every feature
    .venv/bin/python scripts/without_features.py LastAnswers      one, by its name in the list

A feature is a class in ``FEATURES`` of ``engine/guard.py``, in a file of its own. Without that file, its import and its
line in the list, every module must still import, ruff must find no name that is missing or not used, and the scenarios
of the conformance kit must pass on ADK, but for those that show the feature itself.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
GUARD: Final = Path("runguard/engine/guard.py")
# Scenarios that show a feature: they must fail without it.
SHOW: Final = {"LastAnswers": {"last_answer"}, "Resubmissions": {"submitted_again"}}
IMPORT_ALL: Final = """
import importlib, pkgutil, runguard
for module in pkgutil.walk_packages(runguard.__path__, "runguard."):
    if module.name != "runguard.__main__":
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] == "runguard":
                raise
"""
PLAY: Final = """
import asyncio, sys
from runguard.testing import conformance
from tests.frameworks.adk_harness import AdkHarness
failed = []
for name in conformance.SCENARIOS:
    try:
        asyncio.run(conformance.check(AdkHarness(), name, conformance.ONLY.get(name, ("async",))[0]))
    except Exception as error:
        failed.append(name)
print(*failed)
"""


def features_of(guard: str) -> dict[str, str]:
    """Return the module of each feature in the list, by the name of its class."""
    tree = ast.parse(guard)
    modules = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FEATURES" and node.value is not None:
            return {name: modules[name] for name in map(ast.unparse, ast.walk(node.value)) if name in modules}
    raise LookupError(f"{GUARD} has no FEATURES")


def take_out(source: Path, feature: str, module: str) -> None:
    """Delete the file of a feature, its import and its line in the list."""
    (source / module.replace(".", "/")).with_suffix(".py").unlink()
    guard = source / GUARD
    gone = {f"from {module} import {feature}", f"{feature},"}
    lines = guard.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.strip() not in gone]
    if len(lines) != len(kept) + 2:
        raise LookupError(f"{GUARD}: {feature} is not one line of imports and one of the list")
    guard.write_text("".join(kept), encoding="utf-8")


def faults_without(feature: str, module: str) -> list[str]:
    """Return what does not work without a feature."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        take_out(source, feature, module)
        found = []
        imported = _run([sys.executable, "-c", IMPORT_ALL], source)
        if imported.returncode:
            found.append(f"import: {imported.stderr.strip().splitlines()[-1]}")
        ruff = [sys.executable, "-m", "ruff", "check", "-q", "--config", str(ROOT / "pyproject.toml"), str(source)]
        linted = _run([*ruff, "--output-format", "concise"], source)
        found += [f"lint: {line}" for line in linted.stdout.splitlines()]
        played = _run([sys.executable, "-c", PLAY], source)
        if played.returncode:
            found.append(f"kit: {played.stderr.strip().splitlines()[-1]}")
        else:
            failed, shown = set(played.stdout.split()), SHOW.get(feature, set())
            found += [f"kit: {name} fails" for name in sorted(failed - shown)]
            found += [f"kit: {name} passes without the feature that it shows" for name in sorted(shown - failed)]
        return found


def _run(command: list[str], source: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("features", nargs="*", help="names in the list; none: all of them")
    wanted = parser.parse_args().features
    known = features_of((ROOT / "src" / GUARD).read_text(encoding="utf-8"))
    if unknown := set(wanted) - set(known):
        parser.error(f"not in the list: {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    faults = 0
    for feature in wanted or known:
        found = faults_without(feature, known[feature])
        print(f"{feature:16} {known[feature]:36} {'goes' if not found else 'does not go'}", flush=True)
        for line in found:
            print(f"    {line}", flush=True)
        faults += bool(found)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
