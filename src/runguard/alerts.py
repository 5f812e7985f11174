"""Alerts to Slack, PagerDuty, a signed webhook, the log or a function, sent from background threads.

No alert contains prompts, answers or secrets. URLs are checked when they are read, and addresses when they are used.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.alerts.alert import Alert, AlertKind, Severity
    from runguard.alerts.alert_settings import SCHEMA, AlertSettings
    from runguard.alerts.message_formats import verify_signature
    from runguard.alerts.secret import mask
    from runguard.alerts.sending import Alerts

_HOMES = {
    "Alert": "runguard.alerts.alert",
    "AlertKind": "runguard.alerts.alert",
    "Severity": "runguard.alerts.alert",
    "mask": "runguard.alerts.secret",
    "verify_signature": "runguard.alerts.message_formats",
    "Alerts": "runguard.alerts.sending",
    "AlertSettings": "runguard.alerts.alert_settings",
    "SCHEMA": "runguard.alerts.alert_settings",
}

__all__ = ["SCHEMA", "Alert", "AlertKind", "AlertSettings", "Alerts", "Severity", "mask", "verify_signature"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
