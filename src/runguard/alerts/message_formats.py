"""Format an alert for each receiver: Slack, PagerDuty's Events API v2, and our own signed JSON."""

import hmac
import json
import re
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from runguard.alerts.alert import Alert, Parcel

VERSION: Final = 1
TIMESTAMP_HEADER: Final = "X-RunGuard-Timestamp"
SIGNATURE_HEADER: Final = "X-RunGuard-Signature"
EVENT_HEADER: Final = "Idempotency-Key"
_SCHEME: Final = "v1="
_SLACK_CHARS: Final = 2_900  # a text object takes 3000
_SUMMARY_CHARS: Final = 1_000  # PagerDuty takes 1024
_MENTION: Final = re.compile(r"(?i)@(?=channel|here|everyone|group)")
_HALF_ENTITY: Final = re.compile(r"&\w{0,4}$")


def slack(parcel: Parcel) -> dict[str, Any]:
    alert = parcel.alert
    title = f"RunGuard: {'resolved' if alert.resolved else alert.severity}"
    blocks: list[dict[str, Any]] = [{"type": "section", "text": _slack_text(f"*{title}*\n{_slack_escape(alert.text)}")}]
    if alert.facts:
        facts = "\n".join(
            f"{_slack_escape(name)}: {_slack_escape(_plain(value))}" for name, value in alert.facts.items()
        )
        blocks.append({"type": "context", "elements": [_slack_text(facts)]})
    return {"text": _fit(f"{title}: {_slack_escape(alert.text)}"), "blocks": blocks}


def _slack_text(text: str) -> dict[str, Any]:
    # verbatim: Slack must not turn names into links or mentions
    return {"type": "mrkdwn", "verbatim": True, "text": _fit(text)}


def _slack_escape(text: str) -> str:
    """Escape ``<!channel>`` and the like, and defuse names such as ``@here``."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MENTION.sub("@\u200b", escaped)


def _fit(text: str) -> str:
    return text if len(text) <= _SLACK_CHARS else _HALF_ENTITY.sub("", text[:_SLACK_CHARS]) + "…"


def _plain(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def pagerduty(parcel: Parcel, routing_key: str) -> dict[str, Any]:
    alert = parcel.alert
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "resolve" if alert.resolved else "trigger",
        "dedup_key": f"runguard-{parcel.topic}",
    }
    if alert.resolved:
        return event  # PagerDuty only reads the key
    return event | {
        "client": "RunGuard",
        "payload": {
            "summary": (alert.text or alert.kind)[:_SUMMARY_CHARS],
            "source": _first(alert.facts, "app", "source") or socket.gethostname() or "runguard",
            "severity": alert.severity,
            "timestamp": datetime.fromtimestamp(alert.at, UTC).isoformat(timespec="milliseconds"),
            "component": _first(alert.facts, "tool", "agent", "store") or "runguard",
            "class": alert.kind,
            "custom_details": {"key": alert.key, **alert.facts},
        },
    }


def _first(facts: Mapping[str, Any], *names: str) -> str:
    return next((value for name in names if isinstance(value := facts.get(name), str) and value), "")


def webhook(parcel: Parcel) -> dict[str, Any]:
    return {"v": VERSION, "id": parcel.event_id, **fields(parcel.alert)}


def fields(alert: Alert) -> dict[str, Any]:
    return {
        "kind": alert.kind,
        "key": alert.key,
        "severity": alert.severity,
        "text": alert.text,
        "facts": dict(alert.facts),
        "at": alert.at,
        "resolved": alert.resolved,
    }


def to_bytes(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")


# ---- signatures -----------------------------------------------------------------------------------------------------


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return ``v1=`` and the hex HMAC-SHA256 of timestamp, dot and body."""
    return _SCHEME + hmac.new(secret.encode(), timestamp.encode() + b"." + body, sha256).hexdigest()


def verify_signature(
    secret: str,
    timestamp: str | int,
    body: bytes,
    signature: str,
    tolerance_seconds: float = 300,
    *,
    now: float | None = None,
) -> bool:
    """Return whether the body was signed with ``secret`` within ``tolerance_seconds``; for receivers of webhooks.

    ``timestamp`` and ``signature`` are the headers ``X-RunGuard-Timestamp`` and ``X-RunGuard-Signature``, ``body`` the
    received bytes. Invalid values return False; only an empty secret raises ValueError.
    """
    if not secret:
        raise ValueError("the secret is empty")
    stamp = str(timestamp) if isinstance(timestamp, str | int) else ""
    if (
        not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 15)
        or not isinstance(signature, str)
        or not isinstance(body, bytes)
    ):
        return False
    clock = time.time() if now is None else now  # noqa: TID251 - the receiver's clock by default
    if abs(clock - int(stamp)) > tolerance_seconds:
        return False
    return hmac.compare_digest(_expected(secret, stamp, body), signature.strip().encode("utf-8", "surrogatepass"))


def _expected(secret: str, stamp: str, body: bytes) -> bytes:
    return signature(secret, stamp, body).encode()
