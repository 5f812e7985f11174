"""Which guard a stop event comes from, and the error that ``on_stop="raise"`` raises in its place."""

import weakref
from typing import Final

from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.events import Event

from runguard.adk.invocations import Invocations
from runguard.core.decision import METADATA_KEY, STOP_CODE, Trip
from runguard.core.errors import LimitExceededError, RunStoppedError
from runguard.core.identity import Newest
from runguard.policy.settings import Policy

_KEPT: Final = 10_000
_owners: Final = Newest[str, weakref.ref[Invocations]](_KEPT)  # by the id of the trip

Stop = tuple[str, Invocations]  # the id of a trip, and the registry of its guard


class AdkCallLimitError(LimitExceededError, LlmCallsLimitExceededError):
    """``RunConfig.max_llm_calls`` is used up. Code that catches ADK's error for it catches this one too."""


def announce(trip: Trip, invocations: Invocations) -> None:
    """A stop event with this trip is about to appear in a stream. Remember the guard that decides what follows."""
    _owners[trip.id] = weakref.ref(invocations)


def stop_in(event: Event) -> Stop | None:
    """The announced stop that an event carries."""
    metadata = event.custom_metadata
    if not metadata or METADATA_KEY not in metadata or not isinstance(metadata[METADATA_KEY], dict):
        return None
    trip_id = metadata[METADATA_KEY].get("id")
    if not isinstance(trip_id, str):
        return None
    found = _owners.get(trip_id)
    owner = found() if found is not None else None
    return (trip_id, owner) if owner is not None else None


def is_raised(event: Event) -> bool:
    """Whether an error will be raised in place of this stop event. Code that returns at the final event must not take
    it for an answer.
    """
    found = stop_in(event) if event.error_code == STOP_CODE else None
    return found is not None and found[1].guard.policy.on_stop == "raise"


def error_of(stop: Stop) -> RunStoppedError | None:
    """What ``on_stop="raise"`` raises after the clean stop."""
    trip_id, guard = stop[0], stop[1].guard
    if guard.policy.on_stop != "raise":
        return None
    trip = next((t for t in reversed(guard.trips) if t.id == trip_id), None)
    return _error_for(trip, guard.policy) if trip is not None and trip.enforced else None


def _error_for(trip: Trip, policy: Policy) -> RunStoppedError:
    if trip.rule == "model_calls" and policy.max_model_calls is None:
        return AdkCallLimitError(trip)
    return RunStoppedError.of(trip)
