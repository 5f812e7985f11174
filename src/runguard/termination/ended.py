"""How the work ended by a termination condition, and how the reason is read from what a framework has stored."""

from dataclasses import dataclass
from typing import Any, Final

from runguard.core.decision import METADATA_KEY
from runguard.core.errors import PolicyError
from runguard.termination.condition import TerminationCondition

KEY: Final = "termination"
# Where events of ADK, messages of LangChain and responses of Pydantic AI keep metadata; the second one is ADK's JSON.
_FIELDS: Final = ("custom_metadata", "customMetadata", "response_metadata", "metadata")


@dataclass(frozen=True, slots=True)
class Ended:
    """A condition has ended a run. This is not a trip: the run did what it was meant to do."""

    reason: str
    condition: str

    def to_dict(self) -> dict[str, Any]:
        """The metadata of the event or message that ends the run."""
        return {KEY: {"reason": self.reason, "condition": self.condition}}


def termination_reason(event: Any) -> str | None:
    """Why the work ended, from the event that ended it; None for any other event.

    Takes an ADK event, a message of LangChain, a response of Pydantic AI, or the JSON of one of them.
    """
    for name in _FIELDS:
        metadata = event.get(name) if isinstance(event, dict) else getattr(event, name, None)
        own = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
        ended = own.get(KEY) if isinstance(own, dict) else None
        if isinstance(ended, dict) and "reason" in ended:
            return str(ended["reason"])
    return None


def checked(condition: object) -> TerminationCondition:
    if not isinstance(condition, TerminationCondition):
        raise PolicyError(
            f"{condition!r} is not a termination condition; give one such as MaxIterationsTermination(10) | "
            "TimeoutTermination(60)"
        )
    return condition
