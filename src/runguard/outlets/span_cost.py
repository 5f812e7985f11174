"""What a model call cost, as attributes of its span.

The attributes are a proposal for OpenTelemetry's conventions, so they need its opt-in:
``OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental``. Without it nothing is loaded and nothing is reported.
"""

import os
from typing import Any, Final

from runguard.core.money import to_usd

AMOUNT: Final = "gen_ai.usage.cost.amount"
CURRENCY: Final = "gen_ai.usage.cost.currency"
SOURCE: Final = "gen_ai.usage.cost.source"
ESTIMATED: Final = "runguard.cost.estimated"
_VARIABLE: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
_LATEST: Final = "gen_ai_latest_experimental"
_OPERATION: Final = "gen_ai.operation.name"
_INFERENCE: Final = frozenset({"chat", "generate_content", "text_completion"})


class SpanCosts:
    """Puts settled costs on the current span, if that is the span of a model call."""

    def __init__(self) -> None:
        from opentelemetry import trace

        self._span = trace.get_current_span

    @classmethod
    def opted_in(cls) -> "SpanCosts | None":
        """None without the opt-in, or without the OpenTelemetry API."""
        if _LATEST not in {word.strip() for word in os.environ.get(_VARIABLE, "").split(",")}:
            return None
        try:
            return cls()
        except ImportError:
            return None

    def settled(self, nano: int, *, is_stated: bool, is_estimated: bool) -> None:
        """Report a cost. ``is_stated``: the provider stated it; otherwise it comes from tokens and a price list."""
        span = self._span()
        if not span.is_recording() or not _is_inference(span):
            return
        facts: dict[str, Any] = {
            AMOUNT: float(to_usd(nano)),
            CURRENCY: "USD",
            SOURCE: "provider" if is_stated else "local",
        }
        if is_estimated or ESTIMATED in _attributes(span):  # a later figure replaces an estimate
            facts[ESTIMATED] = is_estimated
        span.set_attributes(facts)


def _is_inference(span: Any) -> bool:
    """Whether a span is of one model call. The sum of an agent's calls must not look like the cost of one."""
    return _attributes(span).get(_OPERATION) in _INFERENCE


def _attributes(span: Any) -> Any:
    """Return what a span has so far. The API does not promise that it can be read: empty then."""
    return getattr(span, "attributes", None) or {}
