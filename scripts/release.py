"""Set the version everywhere: the package, the changelog and the bill of materials.

    python scripts/release.py 0.2.0                     close the changelog's open section as 0.2.0, with today's date
    python scripts/release.py 0.2.0 --date 2026-12-01   with another date
    python scripts/release.py --open 0.3.0              begin the next section; the version becomes 0.3.0.dev0

It changes files only. Commit them, run ``make release-check``, and push a tag ``v0.2.0``: the workflow publishes it.
"""

import argparse
import re
import sys
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?")
_HEADING = re.compile(r"^## (\S+)(?: \((.+)\))?$", re.MULTILINE)


class ReleaseError(Exception):
    """The release cannot be made; the message says why."""


def order(version: str) -> tuple[int, int, int, float]:
    """Return a key that sorts versions; a release candidate comes before its release."""
    found = VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"{version!r} is not a version: use 1.2.3 or 1.2.3rc1")
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch), float(candidate) if candidate else float("inf")


def close(changelog: str, version: str, day: str) -> str:
    """Return the changelog with its open section closed as this version."""
    headings = list(_HEADING.finditer(changelog))
    if not headings or headings[0][2] != "unreleased":
        raise ReleaseError("the changelog has no section marked (unreleased); begin one with --open VERSION")
    body = changelog[headings[0].end() : headings[1].start() if len(headings) > 1 else None]
    if not re.search(r"^- ", body, re.MULTILINE):
        raise ReleaseError("the changelog's open section has no entry")
    if len(headings) > 1:
        last = headings[1][1]
        if order(version) <= order(last):
            raise ReleaseError(f"{version} does not come after {last}")
        if re.search(r"^### (Breaking|Removed)", body, re.MULTILINE) and not _allows_breaks(last, version):
            raise ReleaseError(f"the changelog announces breaks: {version} after {last} must raise {_raised(last)}")
    start, end = headings[0].span()
    return f"{changelog[:start]}## {version} ({day}){changelog[end:]}"


def _allows_breaks(last: str, version: str) -> bool:
    """Return whether a version may break: in 0.x a new minor version, from 1.0 on only a new major one."""
    before, after = order(last), order(version)
    return after[0] > before[0] or (after[0] == 0 and after[1] > before[1])


def _raised(last: str) -> str:
    return "the minor or major version" if order(last)[0] == 0 else "the major version"


def begin(changelog: str, version: str) -> str:
    """Return the changelog with a new open section."""
    newest = _HEADING.search(changelog)
    if newest is None:
        raise ReleaseError("the changelog has no section")
    if newest[2] == "unreleased":
        raise ReleaseError(f"the section {newest[1]} is still open")
    if order(version) <= order(newest[1]):
        raise ReleaseError(f"{version} does not come after {newest[1]}")
    return f"{changelog[: newest.start()]}## {version} (unreleased)\n\n{changelog[newest.start() :]}"


def main(root: Path = ROOT, arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--open", action="store_true", help="begin the section of the next version")
    parser.add_argument("--date", type=date.fromisoformat, help="the date of the release; default: today, in UTC")
    given = parser.parse_args(arguments)
    changelog, package = root / "CHANGELOG.md", root / "src" / "runguard" / "_version.py"
    try:
        order(given.version)
        text = changelog.read_text(encoding="utf-8")
        if given.open:
            text, version = begin(text, given.version), f"{given.version}.dev0"
        else:
            day = given.date or datetime.now(UTC).date()  # noqa: TID251 - a script uses the system's clock
            text, version = close(text, given.version, day.isoformat()), given.version
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 2
    source = package.read_text(encoding="utf-8")
    changelog.write_text(text, encoding="utf-8")
    package.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', source), encoding="utf-8")
    if root == ROOT:
        sys.path.insert(0, str(Path(__file__).parent))
        import sbom

        sbom.SBOM.write_text(sbom.text(), encoding="utf-8")
    print(f"version {version}; next: commit, make release-check, then tag v{given.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
