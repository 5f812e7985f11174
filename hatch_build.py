"""Refuse to build on a Python that is too old.

pip looks at ``requires-python`` of a clone or a Git URL only after all dependencies, and gives up on them first.
"""

import sys

from hatchling.metadata.plugin.interface import MetadataHookInterface

NEEDED = (3, 11)


class NewEnoughPython(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        if sys.version_info[:2] < NEEDED:
            have, need = (".".join(map(str, version)) for version in (sys.version_info[:2], NEEDED))
            raise SystemExit(f"RunGuard needs Python {need} or newer, and this is Python {have}: {sys.executable}")
