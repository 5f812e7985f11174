"""When a run, or a loop in it, is to end: conditions that are told of events and say whether it is time, and why.

```python
condition = TextMentionTermination("APPROVED", sources="critic") | MaxMessageTermination(20) | TimeoutTermination(300)
```

A condition is given only what is new since it was last asked. One instance may serve any number of runs: ``for_run`` makes the copy
that one run uses. Nothing here knows a framework: events are whatever has the fields of an ADK event.
"""

from runguard.termination.condition import (
    AndTerminationCondition,
    OrTerminationCondition,
    TerminatedError,
    TerminationCondition,
    TerminationResult,
)
from runguard.termination.limits import CostTermination, TimeoutTermination, TokenUsageTermination
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
