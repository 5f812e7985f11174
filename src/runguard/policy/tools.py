"""What is declared about tools, by the policy or beside their code, and so when two calls are the same."""

from typing import Final

from runguard.core.events import Answer, ToolCall
from runguard.core.identity import call_fingerprint
from runguard.policy.once import Fields, once_identity
from runguard.policy.settings import Policy
from runguard.policy.tool_rules import ToolRule

_KEPT: Final = 4_096  # hallucinated names must not fill memory


class Tools:
    """The rules of tools, by name."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._declared: dict[str, ToolRule] = {}
        self.known: dict[str, ToolRule | None] = {}
        self.has_prices = any(rule.price is not None for rule in policy.tools.values())
        self.limited = {name for name, rule in policy.tools.items() if rule.max_calls is not None}

    def declare(self, tool: str, rule: ToolRule) -> None:
        """A rule that was declared beside the tool's code; the policy's own rule for that name wins."""
        if tool not in self._declared and len(self._declared) < _KEPT:
            self._declared[tool] = rule
            self.has_prices = self.has_prices or rule.price is not None
            if rule.max_calls is not None:
                self.limited.add(tool)
            self.known.pop(tool, None)

    def rule(self, tool: str) -> ToolRule | None:
        try:
            return self.known[tool]
        except KeyError:
            rule = self._policy.tool_rule(tool) or self._declared.get(tool)
            if len(self.known) < _KEPT:
                self.known[tool] = rule
            return rule

    def is_polling(self, tool: str) -> bool:
        rule = self.rule(tool)
        return rule is not None and rule.polling

    def max_calls(self, tool: str) -> int | None:
        """Calls of a tool that are allowed in one run."""
        rule = self.known[tool] if tool in self.known else self.rule(tool)
        return rule.max_calls if rule is not None else None

    def fingerprint(self, tool: str, args: object) -> bytes:
        rule = self.known[tool] if tool in self.known else self.rule(tool)
        if rule is None:
            return call_fingerprint(tool, args)
        return call_fingerprint(tool, args, identity=rule.identity, volatile=rule.volatile, exact=rule.once)

    def effect_of(self, call: ToolCall | Answer) -> bytes:
        """The side effect of a call, known by the call's digest where nothing better was compared; empty for a tool
        that is not declared ``once``.
        """
        tool = call.tool
        rule = self.known[tool] if tool in self.known else self.rule(tool)
        return (call.once or call.call) if rule is not None and rule.once else b""

    def once_identity(self, tool: str, args: object, declared: Fields | None = None) -> bytes:
        """The identity of a side effect by its arguments; empty for a tool that is not declared ``once``."""
        rule = self.rule(tool)
        if rule is None or not rule.once:
            return b""
        return once_identity(tool, args, declared, identity=rule.identity, volatile=rule.volatile)
