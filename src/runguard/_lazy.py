"""Package names that load their module on first use, so that importing a package imports nothing else."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    ``homes`` maps each public name to the module that defines it.
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            if name in import_module("runguard").__all__:  # an AttributeError would not tell the place
                raise ImportError(f"{package} has no {name}; write: from runguard import {name}")
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(home), name)

    def names() -> list[str]:
        return sorted(homes)

    return load, names
