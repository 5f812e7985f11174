"""Alerts to Slack, PagerDuty, a signed webhook, the log or a function, sent from background threads.

No alert contains prompts, answers or secrets. URLs are checked when they are read, and addresses when they are used.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.reporting.alerts import SCHEMA, Alert, AlertKind, AlertSettings, Severity, mask
    from runguard.reporting.delivery import Alerts, verify_signature

_HOMES = {
    "Alert": "runguard.reporting.alerts",
    "AlertKind": "runguard.reporting.alerts",
    "Severity": "runguard.reporting.alerts",
    "mask": "runguard.reporting.alerts",
    "verify_signature": "runguard.reporting.delivery",
    "Alerts": "runguard.reporting.delivery",
    "AlertSettings": "runguard.reporting.alerts",
    "SCHEMA": "runguard.reporting.alerts",
}

__all__ = ["SCHEMA", "Alert", "AlertKind", "AlertSettings", "Alerts", "Severity", "mask", "verify_signature"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
