"""Compare the public API of two source trees, and report breaks that the changelog does not announce.

    python scripts/api_breaks.py OLD NEW [--changelog CHANGELOG.md]

OLD and NEW are folders that contain the package ``runguard``. A break is announced if the section of the version to
release names it in backticks under "### Breaking" or "### Removed": `runguard.gate.gate`, `gate` or `Baseline.write`.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import griffe

# The public packages, and modules whose names are documented.
PUBLIC = (
    "runguard",
    "runguard.adk",
    "runguard.alerts",
    "runguard.calibrate",
    "runguard.errors",
    "runguard.gate",
    "runguard.policy",
    "runguard.replay",
    "runguard.termination",
    "runguard.testing",
    "runguard.view",
)
ADAPTERS = tuple(  # of other frameworks, which are not installed where a release is checked
    f"runguard.{name}"
    for name in ("agent_framework", "agent_hooks", "langchain", "litellm", "openai_agents", "pydantic_ai", "strands")
)


class Break(NamedTuple):
    """One incompatible change: the public name, the member that changed, and what happened to it."""

    name: str
    member: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"

    def is_announced(self, section: str) -> bool:
        last = self.name.rpartition(".")[2]
        known = {self.name, last, self.member, f"{last}.{self.member.rpartition('.')[2]}"}
        return bool(known & set(re.findall(r"`([\w.]+)(?:\([^`]*\))?`", section)))


def public_api(folder: Path) -> dict[str, Any]:
    """Return every exported name with the object that defines it, without importing the package."""
    loader = griffe.GriffeLoader(search_paths=[folder], allow_inspection=False)
    loader.load("runguard")
    loader.resolve_aliases(implicit=True, external=False)
    found: dict[str, Any] = {}
    for module in (*PUBLIC, *ADAPTERS):
        try:
            package = loader.modules_collection[module]
        except KeyError:
            continue  # this tree does not have it
        exported = package.exports if package.exports is not None else package.members
        for name in (str(getattr(each, "name", each)) for each in exported):
            if name.startswith("_"):
                continue
            try:
                member = package[name]
                target = member.final_target if member.is_alias else member
                if not target.is_module:
                    found[f"{module}.{name}"] = target
            except (KeyError, griffe.AliasResolutionError):
                continue  # the name leads nowhere: it is missing
    return found


def breaks(old: Path, new: Path) -> Iterator[Break]:
    before, after = public_api(old), public_api(new)
    for name, defined in before.items():
        if name not in after:
            yield Break(name, name, "removed")
            continue
        sides = (griffe.Module("api"), griffe.Module("api"))
        for side, thing in zip(sides, (defined, after[name]), strict=True):
            side.members[name.rpartition(".")[2]] = thing
        for found in griffe.find_breaking_changes(*sides):
            explained = re.sub(r"\x1b\[\d+m", "", found.explain(griffe.ExplanationStyle.ONE_LINE))
            yield Break(name, found.obj.path, explained.partition(": ")[2] or explained)


def announced(changelog: str) -> str:
    """Return what the newest section of the changelog says under "### Breaking" and "### Removed"."""
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:2]
    parts = re.split(r"^### ", newest[0] if newest else "", flags=re.MULTILINE)[1:]
    return "\n".join(part for part in parts if part.startswith(("Breaking", "Removed")))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--changelog", type=Path, default=Path("CHANGELOG.md"))
    given = parser.parse_args()
    section = announced(given.changelog.read_text(encoding="utf-8"))
    code = 0
    for found in breaks(given.old, given.new):
        is_known = found.is_announced(section)
        print(f"{'announced' if is_known else 'NOT ANNOUNCED'}: {found}")
        code = code if is_known else 1
    if code:
        print('Announce each break in the changelog under "### Breaking" or "### Removed", or take it back.')
    return code


if __name__ == "__main__":
    sys.exit(main())
