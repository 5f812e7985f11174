"""Settings: keywords or ``runguard.toml`` -> a frozen ``Policy``."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.policy.settings import (
        RULES,
        Policy,
        PolicyFile,
        ToolRule,
        declared_rule,
        find_policy_file,
        load_policy_file,
        policy_schema,
        tool,
    )

_HOMES = {
    "find_policy_file": "runguard.policy.settings",
    "load_policy_file": "runguard.policy.settings",
    "PolicyFile": "runguard.policy.settings",
    "policy_schema": "runguard.policy.settings",
    "RULES": "runguard.policy.settings",
    "Policy": "runguard.policy.settings",
    "ToolRule": "runguard.policy.settings",
    "declared_rule": "runguard.policy.settings",
    "tool": "runguard.policy.settings",
}

__all__ = [
    "RULES",
    "Policy",
    "PolicyFile",
    "ToolRule",
    "declared_rule",
    "find_policy_file",
    "load_policy_file",
    "policy_schema",
    "tool",
]

__getattr__, __dir__ = lazy(__name__, _HOMES)
