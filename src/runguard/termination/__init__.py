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
    from runguard.termination.conditions import (
        AndTerminationCondition,
        ExternalTermination,
        FinalAnswerTermination,
        FunctionalTermination,
        FunctionCallTermination,
        HandoffTermination,
        MaxIterationsTermination,
        MaxMessageTermination,
        OrTerminationCondition,
        StateTermination,
        TerminatedError,
        TerminationCondition,
        TerminationResult,
        TextMentionTermination,
    )
    from runguard.termination.usage import (
        CostTermination,
        NoProgressTermination,
        RuleTermination,
        TimeoutTermination,
        TokenUsageTermination,
    )

_HOMES = {
    "AndTerminationCondition": "runguard.termination.conditions",
    "OrTerminationCondition": "runguard.termination.conditions",
    "TerminatedError": "runguard.termination.conditions",
    "TerminationCondition": "runguard.termination.conditions",
    "TerminationResult": "runguard.termination.conditions",
    "CostTermination": "runguard.termination.usage",
    "TimeoutTermination": "runguard.termination.usage",
    "TokenUsageTermination": "runguard.termination.usage",
    "NoProgressTermination": "runguard.termination.usage",
    "RuleTermination": "runguard.termination.usage",
    "FinalAnswerTermination": "runguard.termination.conditions",
    "FunctionCallTermination": "runguard.termination.conditions",
    "HandoffTermination": "runguard.termination.conditions",
    "MaxIterationsTermination": "runguard.termination.conditions",
    "MaxMessageTermination": "runguard.termination.conditions",
    "StateTermination": "runguard.termination.conditions",
    "TextMentionTermination": "runguard.termination.conditions",
    "ExternalTermination": "runguard.termination.conditions",
    "FunctionalTermination": "runguard.termination.conditions",
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
