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

_FILES = dict.fromkeys(("find_policy_file", "load_policy_file"), "runguard.policy.settings")

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "runguard.policy.settings") | _FILES)
