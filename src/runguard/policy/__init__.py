"""Settings: keywords or ``runguard.toml`` -> a frozen ``Policy``."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.policy.files import find_policy_file, load_policy_file
    from runguard.policy.policy_file import PolicyFile, policy_schema
    from runguard.policy.rule_defaults import RULES
    from runguard.policy.settings import Policy
    from runguard.policy.tool_rules import ToolRule, declared_rule, tool

_HOMES = {
    "find_policy_file": "runguard.policy.files",
    "load_policy_file": "runguard.policy.files",
    "PolicyFile": "runguard.policy.policy_file",
    "policy_schema": "runguard.policy.policy_file",
    "RULES": "runguard.policy.rule_defaults",
    "Policy": "runguard.policy.settings",
    "ToolRule": "runguard.policy.tool_rules",
    "declared_rule": "runguard.policy.tool_rules",
    "tool": "runguard.policy.tool_rules",
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
