"""The policy that a command works with."""

import os
from pathlib import Path

from runguard.policy.settings import Policy, find_policy_file, load_policy_file


def load_policy(path: Path | None) -> Policy:
    """The policy of a file as it is written, without the environment; the defaults without one."""
    if path is None:
        return Policy.validated({}, "")
    return Policy.validated(load_policy_file(path), str(path))


def policy_here(store: str | None = None) -> Policy:
    """The policy that a run started here would have; with ``store``,
    of that store whatever file and environment say.
    """
    if store is None:
        return Policy.build()
    path = find_policy_file()
    values = load_policy_file(path) if path is not None else {}
    if mode := os.environ.get("RUNGUARD_MODE"):
        values = {**values, "mode": mode}
    sources = [str(path)] * (path is not None) + ["RUNGUARD_MODE"] * bool(mode) + ["--store"]
    return Policy.validated({**values, "store": store}, " and ".join(sources))


def check_environment() -> None:
    """The environment wins over every file: what it says must be valid, too."""
    for name in ("mode", "store"):
        if value := os.environ.get(f"RUNGUARD_{name.upper()}"):
            Policy.validated({name: value}, f"RUNGUARD_{name.upper()}")
