"""A policy with some settings changed. What was given in code, functions and all, stays as it is."""

from collections.abc import Mapping
from typing import Any

from runguard.core.exceptions import PolicyError
from runguard.policy.settings import Policy


def changed(policy: Policy, settings: Mapping[str, Any]) -> Policy:
    """``settings``: as a policy file says them; rules that it does not name keep their rungs."""
    read = Policy.validated(settings, "")
    values = {name: getattr(read, name) for name in settings}
    if "rules" in values:
        values["rules"] = {**policy.rules, **read.rules}
    return policy.model_copy(update=values)


def is_allowed(settings: Mapping[str, Any]) -> bool:
    """Whether a policy takes them: its numbers have bounds."""
    try:
        Policy.validated(settings, "")
    except PolicyError:
        return False
    return True
