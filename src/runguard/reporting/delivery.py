"""Send alerts: each receiver has a bounded queue and its own thread.

A slow or unavailable receiver delays neither the run, nor a callback, nor another receiver. A thread starts with the
first alert, ends when idle, and is restarted after a fork.
"""

import asyncio
import inspect
import logging
import random
import time
import traceback
from contextlib import suppress
from typing import Any, ClassVar, Final

from runguard import log_lines  # noqa: F401 - its filter keeps every log line on one line
from runguard.alerts import message_formats
from runguard.alerts.alert import Alert, Parcel, parcel_of, topic_of
from runguard.alerts.alert_settings import AlertSettings, Receiver
from runguard.alerts.secret import mask_also
from runguard.alerts.transport import UndeliveredError, post
from runguard.background import GOODBYE_S, BackgroundQueue, finish
from runguard.core.identity import Newest

_log: Final = logging.getLogger("runguard")
_KEYS: Final = 4_096
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 15.0
_LEAST_SECRET: Final = 8  # shorter ones occur in ordinary words
_EXCERPT: Final = 160
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}
_COUNTS: Final = ("sent", "failed", "dropped", "suppressed")


class Alerts:
    """Sends alerts to every receiver of the settings, each key once per process and receiver.

    Workers that share a store agree elsewhere on which of them sends.
    """

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        found = {text for receiver in settings.receivers for text in receiver.secrets() if len(text) >= _LEAST_SECRET}
        self._secrets = tuple(sorted(found, key=len, reverse=True))  # a URL before its path
        self._queues = tuple(_ReceiverQueue(receiver, self._secrets) for receiver in settings.receivers)

    def send(self, alert: Alert) -> None:
        """Queue the alert and return at once; errors are counted and logged, never raised."""
        try:
            topic = topic_of(alert)
            queues = [queue for queue in self._queues if queue.is_news(topic, alert.resolved)]
            if not queues:
                return
            parcel = parcel_of(alert, topic, self._secrets, time.monotonic())
            for queue in queues:
                queue.send(parcel)
        except Exception as error:  # an alert never changes what happens to a run
            _log.error("runguard.alert_failed: the alert could not be prepared: %s", type(error).__name__)

    def flush(self, seconds: float = GOODBYE_S) -> bool:
        """Wait until all alerts so far were delivered or given up; return False if the time ran out."""
        end = time.monotonic() + seconds
        return all(queue.flush(end - time.monotonic()) for queue in self._queues)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Per receiver: sent, failed, dropped (its queue was full), suppressed (already sent)."""
        return {queue.receiver.name: dict(queue.counts) for queue in self._queues}


class _ReceiverQueue(BackgroundQueue[Parcel]):
    """The queue and the thread of one receiver."""

    capacity: ClassVar[int] = 100

    def __init__(self, receiver: Receiver, secrets: tuple[str, ...]) -> None:
        self.receiver = receiver
        self._secrets = secrets
        self._sent_keys = Newest[str, bool](_KEYS)  # topic -> whether the last alert resolved it
        super().__init__(f"runguard-alerts-{receiver.name}")

    def restart(self) -> None:
        super().restart()
        self.counts = dict.fromkeys(_COUNTS, 0)

    def is_news(self, topic: str, resolved: bool) -> bool:
        """Return whether this key is new, and remember it."""
        with self._changed:
            if self._sent_keys.get(topic) is resolved:
                self._sent_keys.move_to_end(topic)
                self.counts["suppressed"] += 1
                return False
            self._sent_keys[topic] = resolved
            self._sent_keys.move_to_end(topic)
            return True

    def send(self, parcel: Parcel) -> None:
        if self.put(parcel):
            return
        dropped = self._count("dropped", parcel)
        if dropped & (dropped - 1) == 0:  # at 1, 2, 4, 8: a flood of alerts must not flood the log
            _log.warning(
                "runguard.alert_dropped: %s has %d alerts waiting; %d dropped so far",
                self._place,
                self.capacity,
                dropped,
            )

    def handle(self, item: Parcel) -> None:
        outcome = "failed"
        try:
            self._deliver(item)
            outcome = "sent"
        except BaseException as error:  # also SystemExit of a receiving function
            with suppress(BaseException):
                self._report(error)
        finally:
            self._count(outcome, item)

    def _count(self, outcome: str, parcel: Parcel) -> int:
        """Count an outcome. A key that was not delivered is forgotten, so that it is sent again."""
        with self._changed:
            self.counts[outcome] += 1
            if outcome != "sent" and self._sent_keys.get(parcel.topic) is parcel.alert.resolved:
                del self._sent_keys[parcel.topic]
            return self.counts[outcome]

    # ---- delivery -----------------------------------------------------------------------------------------------

    def _deliver(self, parcel: Parcel) -> None:
        receiver = self.receiver
        if receiver.kind == "log":
            level = receiver.level if receiver.level is not None else _LEVELS[parcel.alert.severity]
            state = "resolved: " if parcel.alert.resolved else ""
            _log.log(
                level,
                "runguard.alert: %s%s",
                state,
                parcel.alert.text,
                extra={"runguard_alert": message_formats.fields(parcel.alert)},
            )
        elif receiver.call is not None:
            result = receiver.call(parcel.alert)
            if inspect.isawaitable(result):
                asyncio.run(asyncio.wait_for(finish(result), receiver.deadline_s))
        else:
            self._post(parcel)

    def _post(self, parcel: Parcel) -> None:
        """Try until the deadline, counted from when the alert was queued; the first attempt is always made."""
        body = message_formats.to_bytes(self._message(parcel))
        end, attempt = parcel.accepted + self.receiver.deadline_s, 0
        timeout_s, endpoint = self.receiver.timeout_s, self.receiver.endpoint
        assert endpoint is not None
        while True:
            try:
                post(endpoint, self._headers(parcel, body), body, timeout_s)
                return
            except UndeliveredError as error:
                pause = _pause(attempt, error.wait_s)
                if not error.again or time.monotonic() + pause >= end:
                    raise
                _log.debug("runguard.alert_retry: %s: %s; again in %.1f s", self._place, error.reason, pause)
            time.sleep(pause)
            attempt += 1
            timeout_s = min(self.receiver.timeout_s, max(end - time.monotonic(), 0.05))

    def _message(self, parcel: Parcel) -> dict[str, Any]:
        if self.receiver.kind == "slack":
            return message_formats.slack(parcel)
        if self.receiver.kind == "pagerduty":
            key = self.receiver.secret.reveal() if self.receiver.secret else ""
            return message_formats.pagerduty(parcel, key)
        return message_formats.webhook(parcel)

    def _headers(self, parcel: Parcel, body: bytes) -> dict[str, str]:
        """Sign each attempt with a new timestamp; the id stays the same."""
        headers = {"Content-Type": "application/json", "User-Agent": "runguard"}
        if self.receiver.kind == "webhook":
            headers |= {name: value.reveal() for name, value in self.receiver.headers}
            stamp = str(int(time.time()))  # noqa: TID251 - receivers compare it with their own clock
            headers |= {message_formats.EVENT_HEADER: parcel.event_id, message_formats.TIMESTAMP_HEADER: stamp}
            if self.receiver.secret is not None:
                headers[message_formats.SIGNATURE_HEADER] = message_formats.signature(
                    self.receiver.secret.reveal(), stamp, body
                )
        return headers

    @property
    def _place(self) -> str:
        return (
            self.receiver.name
            if self.receiver.endpoint is None
            else f"{self.receiver.name} at {self.receiver.endpoint}"
        )

    def _report(self, error: BaseException) -> None:
        if isinstance(error, UndeliveredError):
            answer = f"; it said: {mask_also(error.excerpt, self._secrets, _EXCERPT)}" if error.excerpt else ""
            _log.error("runguard.alert_failed: %s: %s%s", self._place, error.reason, answer)
            return
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = mask_also(_text_of(error), self._secrets, _EXCERPT)
        _log.error(
            "runguard.alert_failed: %s: %s: %s (%s:%s)",
            self._place,
            type(error).__name__,
            text,
            frame.filename,
            frame.lineno,
        )


def _pause(attempt: int, asked_s: float | None) -> float:
    """Return the pause before the next attempt: doubled each time, with jitter, at least what the server requested."""
    pause: float = min(_FIRST_PAUSE_S * 2 ** min(attempt, 10), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
    return max(pause, asked_s or 0.0)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""
