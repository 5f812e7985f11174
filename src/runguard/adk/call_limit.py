"""The error for ADK's own limit of model calls, under ``on_stop="raise"``."""

from google.adk.agents.invocation_context import LlmCallsLimitExceededError

from runguard.core.decision import Trip
from runguard.core.exceptions import LimitExceededError, RunStoppedError
from runguard.policy.settings import Policy


class AdkCallLimitError(LimitExceededError, LlmCallsLimitExceededError):
    """``RunConfig.max_llm_calls`` is used up. Code that catches ADK's error for it catches this one too."""


def error_of(trip: Trip, policy: Policy) -> RunStoppedError:
    """The error that fits the trip."""
    if trip.rule == "model_calls" and policy.max_model_calls is None:
        return AdkCallLimitError(trip)
    return RunStoppedError.of(trip)
