"""The policy that a command uses."""

import os
from pathlib import Path

from runguard.policy.settings import Policy, find_policy_file, load_policy_file


def load_policy(path: Path | None) -> Policy:
    """Return the policy of a file without the environment, or the defaults if there is no file."""
    if path is None:
        return Policy.validated({}, "")
    return Policy.validated(load_policy_file(path), str(path))


def policy_here(store: str | None = None) -> Policy:
    """Return the policy that a run started here would use; ``store`` overrides the file and the environment."""
    if store is None:
        return Policy.build()
    path = find_policy_file()
    values = load_policy_file(path) if path is not None else {}
    if mode := os.environ.get("RUNGUARD_MODE"):
        values = {**values, "mode": mode}
    sources = [str(path)] * (path is not None) + ["RUNGUARD_MODE"] * bool(mode) + ["--store"]
    return Policy.validated({**values, "store": store}, " and ".join(sources))


def check_environment() -> None:
    """Validate the environment variables, which override every file."""
    for name in ("mode", "store"):
        if value := os.environ.get(f"RUNGUARD_{name.upper()}"):
            Policy.validated({name: value}, f"RUNGUARD_{name.upper()}")
