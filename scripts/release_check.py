"""Check that a release can be made: build, inspect, install into empty environments, run, compare the API.

    make release-check

Builds the wheel and the source distribution twice, compares them and checks what they contain and say. Installs the
wheel on each supported Python into empty environments, with each extra alone and with all together, and runs
``runguard demo`` and ``runguard doctor`` there. Compares the public API with the last tag ``v*``; a break that the
changelog does not announce fails the check. ``PYTHONS="3.13"`` checks fewer.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import api_breaks  # noqa: E402
import sbom  # noqa: E402

PYTHONS = os.environ.get("PYTHONS", "3.11 3.12 3.13 3.14").split()
NEEDED = {"3.11", "3.12", "3.13"}  # the others are checked where they are installed
MODULES = {  # of each extra: what it is for
    "adk": "runguard.adk",
    "prices": "genai_prices",
    "redis": "redis",
    "postgres": "psycopg",
    "otel": "opentelemetry.metrics",
    "metrics": "opentelemetry.exporter.prometheus",
    "langchain": "runguard.langchain",
    "openai-agents": "runguard.openai_agents",
    "pydantic-ai": "runguard.pydantic_ai",
    "strands": "runguard.strands",
    "agent-framework": "runguard.agent_framework",
    "agent-hooks": "runguard.agent_hooks",
    "gateway": "runguard.gateway",
    "dashboard": "uvicorn",
}

_problems: list[str] = []


def check(is_ok: bool, what: str) -> None:
    print(f"{'ok     ' if is_ok else 'PROBLEM'} {what}", flush=True)
    if not is_ok:
        _problems.append(what)


def run(*command: str | Path, where: Path = ROOT, speaks: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command. ``speaks``: print what it said when it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and speaks:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    return done


def check_wheel(wheel: Path) -> None:
    info = f"runguard_agents-{sbom.version()}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
        points = archive.read(f"{info}/entry_points.txt").decode()
        shipped = archive.read(f"{info}/sboms/{sbom.SBOM.name}").decode() if _has(names, info) else ""
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    packaged = {name for name in names if not name.startswith(info)}
    check(packaged == expected, f"the wheel contains src/runguard and nothing else ({len(packaged)} files)")
    if packaged != expected:
        print("  missing:", sorted(expected - packaged)[:10], " extra:", sorted(packaged - expected)[:10])
    check("runguard/py.typed" in names, "types are marked (py.typed)")
    check(f"{info}/licenses/LICENSE" in names, "the licence is in the wheel")
    check(shipped == sbom.text(), "the bill of materials is in the wheel, and current (PEP 770)")
    check("runguard = runguard.cli.main:main" in points and "[pytest11]" in points, "the command and the pytest plugin")
    check(metadata["Version"] == sbom.version(), f"version {metadata['Version']}")
    check(metadata["License-Expression"] == "Apache-2.0", "the licence is named (PEP 639)")
    check(bool(metadata.get_all("Project-URL")), "project URLs")
    texts = metadata.as_string()
    check("file://" not in texts and str(ROOT) not in texts, "the metadata names no local path")


def _has(names: set[str], info: str) -> bool:
    return f"{info}/sboms/{sbom.SBOM.name}" in names


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "src/runguard/__init__.py"}
    check(needed <= names, "the source distribution contains what a build and a reader need")
    unwanted = sorted(name for name in names if name.startswith((".venv", "build/", "dist/")) or "__pycache__" in name)
    check(not unwanted, "the source distribution contains nothing that is not in the repository")


def find_python(version: str, uv: str) -> str | None:
    """Return the path of a Python that is installed: on the PATH, one of uv, or one of pyenv."""
    found = run(uv, "python", "find", "--no-project", "--no-python-downloads", version, speaks=False)
    path = found.stdout.strip()
    if path and run(path, "-c", "", speaks=False).returncode == 0:  # a shim of pyenv may lead nowhere
        return path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return str(max(pyenv.glob(f"{version}.*/bin/python"), default="")) or None


def check_install(package: Path, extras: Sequence[str], python: str, uv: str, *, runs: bool) -> None:
    """Install a package into an empty environment, outside of the repository. ``runs``: try the demo and the doctor."""
    kind = "wheel" if package.suffix == ".whl" else "source distribution"
    what = f"the {kind} with {', '.join(extras) if len(extras) < 3 else 'all extras'}"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        binaries = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        interpreter = binaries / "python"
        run(uv, "venv", "--quiet", "--python", python, folder / "venv")
        compiled = ["--compile-bytecode"] if runs else []
        spec = f"{package}[{','.join(extras)}]"
        installed = run(uv, "pip", "install", "--quiet", *compiled, "--python", interpreter, spec)
        checked = run(uv, "pip", "check", "--python", interpreter)
        imports = "; ".join(f"from {MODULES[extra]} import *" for extra in extras)
        imported = run(interpreter, "-W", "ignore", "-c", imports, where=folder)
        version = run(interpreter, "-c", "import sys; print(sys.version.split()[0])").stdout.strip()
        held = installed.returncode == checked.returncode == imported.returncode == 0
        check(held, f"{what} on Python {version}: installed, `pip check`, imported")
        if not runs:
            return
        for command in ("demo", "doctor"):
            done = run(binaries / "runguard", command, where=folder)
            check(done.returncode == 0, f"  runguard {command}")
        said = run(binaries / "runguard", "--version", where=folder).stdout.split()[-1:]
        check(said == [sbom.version()], f"  runguard --version says {' '.join(said)}")


def check_old_python(uv: str) -> None:
    """Check that pip on a Python that is too old refuses an installation from the clone within a minute."""
    old = find_python("3.10", uv)
    if old is None:
        print("skipped  no Python 3.10 here")
        return
    with tempfile.TemporaryDirectory() as place:
        run(old, "-m", "venv", Path(place) / "venv")
        began = time.monotonic()
        done = run(Path(place) / "venv" / "bin" / "pip", "install", f"{ROOT}[adk]", speaks=False)
        told = "RunGuard needs Python" in done.stdout + done.stderr or "requires a different Python" in done.stderr
        check(bool(done.returncode) and told and time.monotonic() - began < 60, "Python 3.10 is refused at once")


def check_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    named = any(sbom.version() in section or "nreleased" in section for section in sections[:1])
    check(named, f"the changelog begins with version {sbom.version()}: {sections[:1]}")


def check_api() -> None:
    found, named = api_breaks.public_api(ROOT / "src"), _exported()
    check(set(found) >= named, f"the public API: {len(named)} names, {len(named - set(found))} of them lead nowhere")
    tags = run("git", "tag", "--list", "v*", "--sort=-version:refname", "--merged").stdout.split()
    tags = [tag for tag in tags if tag != f"v{sbom.version()}"]
    if not tags:
        check(True, "the public API: no earlier release to compare with")
        return
    with tempfile.TemporaryDirectory() as place:
        archive = Path(place) / "old.tar"
        run("git", "archive", "--output", archive, tags[0], "src")
        with tarfile.open(archive) as tar:
            tar.extractall(place, filter="data")
        section = api_breaks.announced((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
        found = list(api_breaks.breaks(Path(place) / "src", ROOT / "src"))
    silent = [each for each in found if not each.is_announced(section)]
    check(not silent, f"the public API against {tags[0]}: {len(found)} breaks, {len(silent)} not announced")
    for each in silent:
        print(f"  {each}")


def _exported() -> set[str]:
    """Return the exported names as Python sees them."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for each in getattr(importlib.import_module(name), '__all__', ()): print(f'{name}.{each}')"
    )
    return set(run(sys.executable, "-c", script, *api_breaks.PUBLIC).stdout.split())


def build(uv: str, place: Path) -> dict[str, Path]:
    """Build twice and compare. Return the built files by the last part of their name."""
    built: list[dict[str, bytes]] = []
    for folder in (place / "one", place / "two"):
        done = run(uv, "build", "--quiet", "--out-dir", folder)
        if done.returncode:
            check(False, "the wheel and the source distribution can be built")
            return {}
        built.append({path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".whl", ".gz")})
    check(built[0] == built[1], f"two builds are equal, byte for byte: {', '.join(sorted(built[0]))}")
    return {path.suffix: path for path in (place / "one").iterdir()}


def main() -> int:
    uv = str(Path(sys.executable).with_name("uv"))
    extras = list(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    check(sorted(extras) == sorted(MODULES), "each extra has a module to import in scripts/release_check.py")
    check(run("git", "status", "--porcelain").stdout == "", "the clone is clean")
    check_changelog()
    made = run(sys.executable, ROOT / "scripts" / "sbom.py", "--check")
    check(made.returncode == 0, "the bill of materials is current")
    links = run(sys.executable, "-m", "pytest", "-q", "tests/test_docs.py", "-k", "links")
    check(links.returncode == 0, "every link of the documentation has a target")
    with tempfile.TemporaryDirectory() as place:
        built = build(uv, Path(place))
        if not built:
            return 1
        wheel, sdist = built[".whl"], built[".gz"]
        check_wheel(wheel)
        check_sdist(sdist)
        check(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).returncode == 0, "twine check")
        for version in PYTHONS:
            python = find_python(version, uv)
            if python is None:
                if version in NEEDED:
                    check(False, f"Python {version} is installed")
                else:
                    print(f"skipped  no Python {version} here")
                continue
            for extra in extras:
                check_install(wheel, [extra], python, uv, runs=extra == "adk")
            check_install(wheel, extras, python, uv, runs=True)
        check_install(sdist, ["adk"], sys.executable, uv, runs=True)
    check_old_python(uv)
    check_api()
    print(f"{len(_problems)} problems" if _problems else "a release can be made")
    return 1 if _problems else 0


if __name__ == "__main__":
    sys.exit(main())
