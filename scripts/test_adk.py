"""Run the ADK tests on several releases of google-adk, each in an environment of its own.

    make test-adk                          2.3, each minor release since, and the newest
    make test-adk ADK="2.7 newest pre"     these only; "pre" is the newest including pre-releases

The minor releases are those that the package index has.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST = (2, 3)
TESTS = (
    *("tests/adk", "tests/faults", "tests/replay/test_same_as_live.py", "tests/wire", "tests/install", "tests/demo"),
    *("--ignore", "tests/faults/test_reference_model.py", "--ignore", "tests/faults/test_cancellation.py"),
)


def minors() -> list[str]:
    """Return the minor releases of google-adk from the oldest supported one on, oldest first."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "google-adk", "--json"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return supported(json.loads(found)["versions"])


def supported(versions: list[str]) -> list[str]:
    parts = {tuple(int(part) for part in version.split(".")[:2]) for version in versions if _is_final(version)}
    return [".".join(map(str, minor)) for minor in sorted(parts) if minor >= OLDEST]


def _is_final(version: str) -> bool:
    return all(part.isdigit() for part in version.split("."))


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


def test(asked: str) -> tuple[str, str, int]:
    """Run the tests on one release; return the version, the last line of pytest and its exit code."""
    python = install(asked)
    told = [str(python), "-c", "import importlib.metadata as m; print(m.version('google-adk'))"]
    version = subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
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
        last = line.strip() or last
    return version, last, ran.wait()


def main() -> int:
    asked = sys.argv[1:] or [*minors(), "newest"]
    results = [test(each) for each in dict.fromkeys(asked)]
    print()
    for version, last, code in results:
        print(f"google-adk {version:<8} {'passed' if code == 0 else 'FAILED'}  {last}")
    return max(code != 0 for _, _, code in results)


if __name__ == "__main__":
    sys.exit(main())
