"""Keywords or ``runguard.toml`` -> a frozen ``Policy``. Invalid settings are rejected here, never in the middle of a
run.

Precedence: ``RUNGUARD_MODE`` and ``RUNGUARD_STORE`` over keywords over the file named by ``RUNGUARD_POLICY``, or else
the first ``runguard.toml`` (or ``[tool.runguard]`` in a ``pyproject.toml``) found upward from the working directory.
"""

import json
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final, Self, TypeVar

from pydantic import Field, ValidationError

from runguard import log_lines  # noqa: F401 - its filter keeps every log line on one line
from runguard.core.decision import Rungs
from runguard.core.errors import PolicyError
from runguard.policy.files import values_from_file
from runguard.policy.policy_file import PolicyFile
from runguard.policy.remote_agent_rules import RemoteAgent
from runguard.policy.rule_defaults import RULES, merge_rungs
from runguard.policy.tool_rules import ToolRule
from runguard.pricing.book import Price
from runguard.validation import faults_of, summary

_T = TypeVar("_T")


class Policy(PolicyFile):
    """A policy with the parts that only code can give. Frozen; ``Policy.build`` is the way to make one."""

    tool_result_normalizer: dict[str, Callable[[Any], Any]] = Field(
        default={}, description="Per tool: what of an answer counts for its identity."
    )
    on_trip: Callable[..., Any] | None = Field(
        default=None, description="Called with each Trip, off the path of the run."
    )
    on_decision: Callable[..., Any] | None = Field(
        default=None, description="Called with each decision that is not allow, off the path of the run."
    )
    tokens: Callable[..., Any] | None = Field(
        default=None,
        description="Counts the tokens of a request, now or awaited. None: estimated, exact after the first call.",
    )
    clock: Callable[[], float] | None = Field(
        default=None, description="Seconds; for tests and replay. None: the system's clock."
    )

    @classmethod
    def build(cls, **keywords: Any) -> Self:
        """Keywords over the policy file over the defaults, environment over all; raises PolicyError."""
        values, source = values_from_file()
        if keywords:
            values, source = {**values, **keywords}, "keywords" if not values else f"{source} and keywords"
        for name in ("mode", "store"):
            variable = f"RUNGUARD_{name.upper()}"
            if os.environ.get(variable):
                values[name] = os.environ[variable]
                source = variable if not source else f"{source} and {variable}"
        return cls.validated(values, source)

    @classmethod
    def validated(cls, values: Mapping[str, Any], source: str) -> Self:
        values = {
            key: value for key, value in values.items() if value is not None or key in _NONE_MEANS_OFF or key == "mode"
        }
        if isinstance(values.get("rules"), Mapping):
            values["rules"] = {rule: (dict(r) if isinstance(r, Mapping) else r) for rule, r in values["rules"].items()}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise PolicyError(summary(faults_of(error, cls), source)) from None

    @cached_property
    def digest(self) -> str:
        """Names this policy in trips: equal policies give equal digests, functions aside."""
        data = json.dumps(
            self.model_dump(mode="json", exclude=_CODE_ONLY | {"tools": {"__all__": {"failed"}}}), sort_keys=True
        )
        return blake2b(data.encode(), digest_size=6).hexdigest()

    def tool_rule(self, tool: str) -> ToolRule | None:
        """The rule for a tool: its exact name, or else the first glob that fits."""
        return _by_name(self.tools, tool)

    def remote_agent(self, name: str) -> RemoteAgent:
        """What is known of a remote agent: by its exact name, or else by the first glob that fits."""
        return _by_name(self.remote_agents, name) or RemoteAgent()

    def rungs(self, rule: str) -> Rungs | None:
        """The rungs in force: explicit ones as they are,
        defaults where they still can fire; None when the rule is off.
        """
        given = self.rules.get(rule)
        if given is False:
            return None
        explicit = dict(given) if isinstance(given, Mapping) else self._from_keyword(rule)
        return merge_rungs(RULES[rule][0], explicit) if explicit else RULES[rule][0]

    def _from_keyword(self, rule: str) -> dict[str, float]:
        if rule in ("stall", "repetition") and self.max_identical_tool_results is not None:
            return {"stop": self.max_identical_tool_results}
        if rule == "tool_failures" and self.max_tool_failures is not None:
            return {"block": self.max_tool_failures + 1}
        if rule == "handoff" and self.max_handoff_repeats is not None:
            return {"stop": self.max_handoff_repeats}
        if rule == "cycle" and self.cycle_repeats is not None:
            return {"stop": self.cycle_repeats}
        if rule == "growth" and self.max_event_cost_ratio is not None:
            return {"stop": self.max_event_cost_ratio}
        return {}

    def is_explicit(self, rule: str) -> bool:
        """Whether a refusal or a stop was asked for as early as by default: it is obeyed exactly, without the
        allowances that the defaults make.
        """
        given = self.rules.get(rule)
        explicit, default = dict(given) if isinstance(given, Mapping) else self._from_keyword(rule), RULES[rule][0]
        return bool(explicit) and any(
            explicit[name] <= (getattr(default, name) or explicit[name])
            for name in ("block", "stop")
            if name in explicit
        )

    @property
    def fan_out(self) -> int | None:
        """Branches of one node; who sets the number in flight has decided about fan-out and is not second-guessed."""
        if self.max_fan_out is not None:
            return self.max_fan_out
        return 100 if self.max_concurrent_agents is None else None

    @property
    def unknown_price(self) -> Price | None:
        """The price for models without a known price, if the policy sets one."""
        return None if isinstance(self.on_unpriced, str) else self.on_unpriced

    @property
    def in_flight(self) -> int:
        return self.max_concurrent_agents or 20

    @property
    def waits_for_provider(self) -> bool:
        if self.on_rate_limit is None:
            return any(budget.on_exhausted == "wait" for budget in self.budgets)
        return self.on_rate_limit == "wait"

    @property
    def queues(self) -> bool:
        return self.on_surplus == "queue" or (self.on_surplus is None and self.max_concurrent_agents is None)


def _by_name(rules: Mapping[str, _T], name: str) -> _T | None:
    if name in rules:
        return rules[name]
    return next((rule for glob, rule in rules.items() if fnmatchcase(name, glob)), None)


_CODE_ONLY: Final = {
    "tool_result_normalizer": True,
    "on_trip": True,
    "on_decision": True,
    "tokens": True,
    "clock": True,
}
_NONE_MEANS_OFF: Final = frozenset({"max_tool_calls", "max_delegation_depth"})
