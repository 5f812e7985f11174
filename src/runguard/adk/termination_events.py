"""How the reason is read from the event by which a termination condition ends the work."""

from typing import Any, Final

from runguard.core.decision import METADATA_KEY
from runguard.core.exceptions import PolicyError
from runguard.termination.condition import TerminationCondition

KEY: Final = "termination"


def termination_reason(event: Any) -> str | None:
    """Why the work ended, from the event that ended it; None for any other event. Takes an ADK event or its JSON."""
    metadata = (
        event.get("custom_metadata") or event.get("customMetadata")
        if isinstance(event, dict)
        else getattr(event, "custom_metadata", None)
    )
    own = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    ended = own.get(KEY) if isinstance(own, dict) else None
    return str(ended["reason"]) if isinstance(ended, dict) and "reason" in ended else None


def checked(condition: object) -> TerminationCondition:
    if not isinstance(condition, TerminationCondition):
        raise PolicyError(
            f"{condition!r} is not a termination condition; give one such as MaxIterationsTermination(10) | "
            "TimeoutTermination(60)"
        )
    return condition
