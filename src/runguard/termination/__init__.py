"""Conditions that end a run, or a loop in it: they receive events and say whether to end, and why.

```python
condition = TextMentionTermination("APPROVED", sources="critic") | MaxMessageTermination(20) | TimeoutTermination(300)
```

A condition receives only the events since the last call. One instance may serve any number of runs: ``for_run``
creates the copy for one run. Nothing here depends on a framework: an event is any object with the fields
of an ADK event.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.termination.condition import (
        AndTerminationCondition,
        OrTerminationCondition,
        TerminatedError,
        TerminationCondition,
        TerminationResult,
    )
    from runguard.termination.rules import NoProgressTermination, RuleTermination
    from runguard.termination.seen import (
        FinalAnswerTermination,
        FunctionCallTermination,
        HandoffTermination,
        MaxIterationsTermination,
        MaxMessageTermination,
        StateTermination,
        TextMentionTermination,
    )
    from runguard.termination.signals import ExternalTermination, FunctionalTermination
    from runguard.termination.usage_limits import CostTermination, TimeoutTermination, TokenUsageTermination

_HOMES = {
    "AndTerminationCondition": "runguard.termination.condition",
    "OrTerminationCondition": "runguard.termination.condition",
    "TerminatedError": "runguard.termination.condition",
    "TerminationCondition": "runguard.termination.condition",
    "TerminationResult": "runguard.termination.condition",
    "CostTermination": "runguard.termination.usage_limits",
    "TimeoutTermination": "runguard.termination.usage_limits",
    "TokenUsageTermination": "runguard.termination.usage_limits",
    "NoProgressTermination": "runguard.termination.rules",
    "RuleTermination": "runguard.termination.rules",
    "FinalAnswerTermination": "runguard.termination.seen",
    "FunctionCallTermination": "runguard.termination.seen",
    "HandoffTermination": "runguard.termination.seen",
    "MaxIterationsTermination": "runguard.termination.seen",
    "MaxMessageTermination": "runguard.termination.seen",
    "StateTermination": "runguard.termination.seen",
    "TextMentionTermination": "runguard.termination.seen",
    "ExternalTermination": "runguard.termination.signals",
    "FunctionalTermination": "runguard.termination.signals",
}

__all__ = [
    "AndTerminationCondition",
    "CostTermination",
    "ExternalTermination",
    "FinalAnswerTermination",
    "FunctionCallTermination",
    "FunctionalTermination",
    "HandoffTermination",
    "MaxIterationsTermination",
    "MaxMessageTermination",
    "NoProgressTermination",
    "OrTerminationCondition",
    "RuleTermination",
    "StateTermination",
    "TerminatedError",
    "TerminationCondition",
    "TerminationResult",
    "TextMentionTermination",
    "TimeoutTermination",
    "TokenUsageTermination",
]

__getattr__, __dir__ = lazy(__name__, _HOMES)
