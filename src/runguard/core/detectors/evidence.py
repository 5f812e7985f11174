"""What a finding about tool results shows."""

from runguard.core.decision import MAX_EVIDENCE, Action
from runguard.core.events import Answer, Outcome, ToolResults
from runguard.core.fingerprint import answer_text, digest
from runguard.core.masking import mask

Pair = tuple[bytes, int]  # a call and the name of its answer


def evidence_of(event: ToolResults) -> tuple[dict[str, str], ...]:
    """Digests only: arguments and results may hold secrets."""
    return tuple(
        {"event": a.event_id, "tool": a.tool, "call": a.call.hex(), "answer": _digest_of(a)}
        for a in event.answers[:MAX_EVIDENCE]
    )


def _digest_of(answer: Answer) -> str:
    return "" if answer.outcome is Outcome.REFUSED else digest(mask(answer_text(answer.value))).hex()


def swap(reached: tuple[Action, float], observed: float) -> tuple[Action, float, float]:
    """``Rungs.at`` gives (action, limit); a Finding wants (action, observed, limit)."""
    return reached[0], observed, reached[1]
