"""Check that a release can be made: build, inspect, install into empty environments, run, compare the API.

    make release-check

Builds the wheel and the source distribution and checks what they contain and say. Installs each into an environment of
its own and runs ``runguard demo`` and ``runguard doctor`` there. Compares the public API with the last tag ``v*``; a
break that the changelog does not announce fails the check.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import api_breaks  # noqa: E402
import sbom  # noqa: E402

_problems: list[str] = []


def check(is_ok: bool, what: str) -> None:
    print(f"{'ok     ' if is_ok else 'PROBLEM'} {what}", flush=True)
    if not is_ok:
        _problems.append(what)


def run(*command: str | Path, where: Path = ROOT, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in command], cwd=where, capture_output=quiet, text=True, check=False)
    if done.returncode and quiet:
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


def check_install(package: Path, python: str, uv: str) -> None:
    """Install into an empty environment; run the demo and the doctor outside of the repository."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        binaries = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        made = run(uv, "venv", "--quiet", "--python", python, folder / "venv")
        installed = run(
            uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", binaries / "python", f"{package}[adk]"
        )
        kind = "wheel" if package.suffix == ".whl" else "source distribution"
        check(made.returncode == installed.returncode == 0, f"the {kind} can be installed on Python {python}")
        for command in ("demo", "doctor"):
            done = run(binaries / "runguard", command, where=folder)
            check(done.returncode == 0, f"runguard {command} from the {kind}")
        said = run(binaries / "runguard", "--version", where=folder).stdout.split()[-1:]
        check(said == [sbom.version()], f"runguard --version says {' '.join(said)}")


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


def main() -> int:
    uv = str(Path(sys.executable).with_name("uv"))
    pythons = os.environ.get("PYTHONS", f"{sys.version_info.major}.{sys.version_info.minor}").split()
    check(
        run(sys.executable, ROOT / "scripts" / "sbom.py", "--check").returncode == 0, "the bill of materials is current"
    )
    with tempfile.TemporaryDirectory() as place:
        built = run(uv, "build", "--quiet", "--out-dir", place)
        check(built.returncode == 0, "the wheel and the source distribution can be built")
        if built.returncode:
            return 1
        (wheel,), (sdist,) = Path(place).glob("*.whl"), Path(place).glob("*.tar.gz")
        check_wheel(wheel)
        check_sdist(sdist)
        check(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).returncode == 0, "twine check")
        for python in pythons:
            check_install(wheel, python, uv)
        check_install(sdist, pythons[0], uv)
    check_api()
    print(f"{len(_problems)} problems" if _problems else "a release can be made")
    return 1 if _problems else 0


if __name__ == "__main__":
    sys.exit(main())
