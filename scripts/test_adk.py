"""Run the ADK tests on several releases of google-adk, each in an environment of its own.

    make test-adk                          each release of RELEASES
    make test-adk ADK="2.7 newest pre"     these only; "pre" is the newest including pre-releases
    TESTS="tests/adk/test_edges.py" make test-adk ADK=2.7

The environments are `.venv-adk-2.7` and so on. Each is made when it is first needed.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The one list of tested releases: the oldest supported minor release, each since, and the newest. The workflow
# follows it (tests/scripts/test_workflows.py).
RELEASES = ("2.3", "2.4", "2.5", "2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "newest")
TESTS = (
    *("tests/adk", "tests/faults", "tests/replay/test_same_as_live.py", "tests/wire", "tests/cli/demo"),
    *("--ignore", "tests/faults/test_reference_model.py", "--ignore", "tests/faults/test_reference_model.py"),
)


def requirement(asked: str) -> str:
    return "google-adk" if asked in ("newest", "pre") else f"google-adk=={asked}.*"


def install(asked: str) -> Path:
    """Return the Python of an environment with that release, made or brought up to date."""
    folder = ROOT / f".venv-adk-{asked}"
    python = folder / "bin" / "python"
    uv = str(Path(sys.executable).with_name("uv"))
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        override.write(requirement(asked) + "\n")
        override.flush()
        command = [uv, "pip", "install", "--quiet", "--python", str(python), "--editable", str(ROOT), "--upgrade"]
        command.append("--compile-bytecode")  # otherwise every process compiles ADK again
        command += ["--group", f"{ROOT / 'pyproject.toml'}:oldest", "--override", override.name]
        if asked == "pre":
            command += ["--prerelease", "allow"]
        subprocess.run(command, check=True)
    return python


def version_of(python: Path) -> str:
    """Return the release of google-adk that an environment has."""
    command = [str(python), "-c", "import importlib.metadata as m; print(m.version('google-adk'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def untested(newest: str) -> list[str]:
    """Return the minor releases between the last one of RELEASES and this one: they belong into the list."""
    last, now = (tuple(int(part) for part in release.split(".")[:2]) for release in (RELEASES[-2], newest))
    return [f"{last[0]}.{minor}" for minor in range(last[1] + 1, now[1])] if last[0] == now[0] else []


def test(asked: str) -> tuple[str, str, int]:
    """Run the tests on one release; return the version, the last line of pytest and its exit code."""
    python = install(asked)
    version = version_of(python)
    print(f"== google-adk {version}", flush=True)
    workers = os.environ.get("WORKERS", "4")
    selected = os.environ.get("TESTS", "").split() or list(TESTS)
    ran = subprocess.Popen(
        [str(python), "-m", "pytest", "-n", workers, *selected], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    last = ""
    assert ran.stdout is not None
    for line in ran.stdout:
        print(line, end="", flush=True)
        last = line.strip() if re.search(r"\d+ (passed|failed|error)", line) else last
    return version, last, ran.wait()


def main() -> int:
    asked = sys.argv[1:] or list(RELEASES)
    results = {each: test(each) for each in dict.fromkeys(asked)}
    print()
    for version, last, code in results.values():
        print(f"google-adk {version:<8} {'passed' if code == 0 else 'FAILED'}  {last}")
    if "newest" in results and (missing := untested(results["newest"][0])):
        print(f"not tested: {', '.join(missing)}: add them to RELEASES in scripts/test_adk.py")
    return int(any(code for _, _, code in results.values()))


if __name__ == "__main__":
    sys.exit(main())
