"""What is installed: Python, google-adk, and whether the name ``runguard`` means this package."""

import contextlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from runguard import _version
from runguard.cli.doctor.line import Line

_OURS: Final = "runguard-agents"
_OLDEST_ADK: Final = (2, 3)
_SINCE: Final = {  # release of google-adk: what it lets the guard see, in the words of somebody who uses it
    (2, 5): "plugins are told of runs that fail",
    (2, 8): "exceptions leave the synchronous Runner.run",
    (2, 11): "tool nodes of a Workflow are judged",
}


def python_line() -> Line:
    return Line("python", "ok", f"{platform.python_version()} at {sys.executable}")


def adk_line() -> Line:
    try:
        version = metadata.version("google-adk")
    except metadata.PackageNotFoundError:
        found = "google-adk is not installed: guarded functions work, the plugin and install() do not"
        return Line("google-adk", "warning", found, "pip install 'runguard-agents[adk]'")
    number = _number(version)
    if number < _OLDEST_ADK:
        return Line(
            "google-adk",
            "problem",
            f"{version} is too old: 2.3 or newer is needed",
            "pip install -U 'runguard-agents[adk]'",
        )
    there = [words for since, words in _SINCE.items() if number >= since]
    missing = [f"{words} (from {'.'.join(map(str, since))} on)" for since, words in _SINCE.items() if number < since]
    found = "; ".join([f"{version}: plugins, workflows, compaction", *there])
    return Line("google-adk", "ok", found + (f". Not in this release: {'; '.join(missing)}" if missing else ""))


def _number(version: str) -> tuple[int, int]:
    parts = [int("".join(sign for sign in part if sign.isdigit()) or 0) for part in version.split(".")[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0


def name_line() -> Line:
    """Other packages are named runguard, too; whoever comes first on the path is imported."""
    origin = Path(_version.__file__).resolve().with_name("__init__.py")
    others = _other_distributions()
    if others:
        found = (
            f"another distribution is installed under the name runguard: {', '.join(others)}; imports may mix the two"
        )
        return Line(
            "runguard",
            "problem",
            found,
            f"pip uninstall {others[0].split()[0]}, then pip install --force-reinstall {_OURS}",
        )
    if shadows := _shadows(origin):
        found = (
            f"{shadows[0]} is named runguard as well: programs started here may import it instead of {origin.parent}"
        )
        return Line("runguard", "problem", found, "rename or remove it, or start programs from another folder")
    try:
        installed = metadata.version(_OURS)
    except metadata.PackageNotFoundError:
        return Line(
            "runguard",
            "warning",
            f"{_version.__version__} at {origin.parent}, imported without being installed",
            f"pip install {_OURS}",
        )
    if installed != _version.__version__:
        found = f"{_version.__version__} at {origin.parent} is imported, but {_OURS} {installed} is installed"
        return Line("runguard", "warning", found, f"pip install --force-reinstall {_OURS}, or mend the path")
    return Line("runguard", "ok", f"{_version.__version__} at {origin.parent}")


def _other_distributions() -> list[str]:
    names = {name for name in metadata.packages_distributions().get("runguard", ()) if name != _OURS}
    with contextlib.suppress(metadata.PackageNotFoundError):
        names.add(metadata.distribution("runguard").metadata["Name"])
    return sorted(f"{name} {metadata.version(name)}" for name in names)


def _shadows(origin: Path) -> list[Path]:
    """Modules of this name elsewhere on the path, or in the working directory, which comes first for many programs."""
    places = dict.fromkeys(Path(entry or ".").resolve() for entry in (".", *sys.path))
    candidates = [place / name for place in places for name in ("runguard/__init__.py", "runguard.py")]
    return [path for path in candidates if os.path.isfile(path) and path.resolve() != origin]  # noqa: PTH113 - what may not be looked at is not there for this program
