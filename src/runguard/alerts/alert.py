"""``Alert``, and the masked form in which it is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import sha256
from math import isfinite
from typing import Any, Final, Literal, get_args

from runguard.alerts.secret import HIDDEN, mask_also, names_a_secret

AlertKind = Literal[
    "trip", "threshold", "outage", "store_replaced", "breaker", "kill_switch", "growth", "compaction", "burn_rate"
]
Severity = Literal["info", "warning", "critical"]
Fact = str | int | float | bool | None
_MAX_FACTS: Final = 32
_MAX_NAME: Final = 64
_MAX_VALUE: Final = 200
_MAX_KEY: Final = 200
_MOST: Final = 1 << 63
_LAST: Final = 10**11  # seconds; later dates cannot be formatted


@dataclass(frozen=True, slots=True)
class Alert:
    """A message for people.

    ``key`` names its subject (rule, scope, period): the same key is sent once until an alert with ``resolved=True``.
    ``text`` is one line for people; ``facts`` are digests, numbers and names, never content. ``at`` is in epoch
    seconds.
    """

    kind: AlertKind
    key: str
    severity: Severity
    text: str
    facts: Mapping[str, Fact] = field(default_factory=dict, hash=False)
    at: float = 0.0
    resolved: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(AlertKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(AlertKind))}, not {self.kind!r}")
        if self.severity not in get_args(Severity):
            raise ValueError(f"severity must be one of {', '.join(get_args(Severity))}, not {self.severity!r}")
        if not isinstance(self.key, str) or not self.key or not isinstance(self.text, str):
            raise ValueError("key and text must be strings, and key must not be empty")
        object.__setattr__(self, "facts", dict(self.facts))  # a copy, because the sender may change its own


@dataclass(frozen=True, slots=True)
class Parcel:
    """An alert ready to send: masked, bounded, and with an id by which a receiver recognizes a retry."""

    alert: Alert
    topic: str  # a digest of the key, the same for every alert with this key
    event_id: str  # the same for all retries of one alert
    accepted: float  # monotonic seconds


def topic_of(alert: Alert) -> str:
    return sha256(alert.key.encode(errors="surrogatepass")).hexdigest()


def parcel_of(alert: Alert, topic: str, secrets: tuple[str, ...], now: float) -> Parcel:
    """Prepare an alert; ``secrets`` of the receivers never appear in a message."""
    event = sha256(f"{alert.kind} {topic} {alert.resolved} {alert.at!r}".encode()).hexdigest()[:32]
    clean = Alert(
        kind=alert.kind,
        key=mask_also(alert.key, secrets, _MAX_KEY),
        severity=alert.severity,
        text=mask_also(alert.text, secrets),
        facts=_clean_facts(alert.facts, secrets),
        at=float(alert.at) if 0 <= alert.at < _LAST else 0.0,
        resolved=alert.resolved is True,
    )
    return Parcel(clean, topic, event, now)


def _clean_facts(facts: Mapping[str, Fact], secrets: tuple[str, ...]) -> dict[str, Fact]:
    clean: dict[str, Fact] = {}
    for name, value in facts.items():
        if len(clean) == _MAX_FACTS:
            clean["facts_left_out"] = len(facts) - _MAX_FACTS
            break
        label = mask_also(name, secrets, _MAX_NAME) if isinstance(name, str) else type(name).__name__
        clean[label] = HIDDEN if isinstance(value, str) and names_a_secret(label) else _clean_value(value, secrets)
    return clean


def _clean_value(value: Any, secrets: tuple[str, ...]) -> Fact:
    """Return a value that every JSON reader accepts; for a foreign object only the name of its type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return mask_also(value, secrets, _MAX_VALUE)
    if isinstance(value, int):
        return int(value) if abs(value) < _MOST else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return float(value) if isfinite(value) else str(float(value))
    # longer numbers are too slow to format
    if type(value) is Decimal and value.is_finite() and abs(value.adjusted()) < _MAX_NAME:
        return format(value, "f")[:_MAX_VALUE]
    return type(value).__name__
