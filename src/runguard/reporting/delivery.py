"""Send alerts: each receiver has a bounded queue and its own thread. ``engine/decide`` sends through ``Alerts``.

A slow or unavailable receiver delays neither the run, nor a callback, nor another receiver. Programs that receive our
webhooks call ``verify_signature``.
"""

import asyncio
import hmac
import http.client
import inspect
import json
import logging
import os
import random
import re
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar, Final

from runguard.background import GOODBYE_S, BackgroundQueue, finish
from runguard.core.identity import LruDict
from runguard.core.outcomes import seconds_to_wait
from runguard.reporting.alerts import (
    Alert,
    AlertSettings,
    Endpoint,
    Parcel,
    Receiver,
    RefusedAddressError,
    mask_also,
    parcel_of,
    resolve,
    topic_of,
)

_log: Final = logging.getLogger("runguard")
_KEYS: Final = 4_096
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 15.0
_LEAST_SECRET: Final = 8  # shorter ones occur in ordinary words
_EXCERPT: Final = 160
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}
_COUNTS: Final = ("sent", "failed", "dropped", "suppressed")
_GATHER_S: Final = 60.0
_GATHER_MOST_S: Final = 3_600.0
_LISTED: Final = 10


class Alerts:
    """Sends alerts to every receiver of the settings, each key once per process and receiver.

    Workers that share a store agree elsewhere on which of them sends.
    """

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        found = {text for receiver in settings.receivers for text in receiver.secrets() if len(text) >= _LEAST_SECRET}
        self._secrets = tuple(sorted(found, key=len, reverse=True))  # a URL before its path
        self._queues = tuple(_ReceiverQueue(receiver, self._secrets) for receiver in settings.receivers)

    def send(self, alert: Alert, *, always: bool = False) -> bool:
        """Queue the alert and return at once: False if every receiver has had one with this key.

        ``always``: send it to them again. Errors are counted and logged, never raised.
        """
        try:
            topic = topic_of(alert)
            queues = [queue for queue in self._queues if always or queue.is_news(topic, alert.resolved)]
            if not queues:
                return False
            parcel = parcel_of(alert, topic, self._secrets, time.monotonic())
            for queue in queues:
                queue.send(parcel)
        except Exception as error:  # an alert never changes what happens to a run
            _log.error("runguard.alert_failed: the alert could not be prepared: %s", type(error).__name__)
        return True

    def flush(self, seconds: float = GOODBYE_S) -> bool:
        """Wait until all alerts so far were delivered or given up; return False if the time ran out."""
        end = time.monotonic() + seconds
        return all(queue.flush(end - time.monotonic()) for queue in self._queues)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Per receiver: sent, failed, dropped (its queue was full), suppressed (already sent)."""
        return {queue.receiver.name: dict(queue.counts) for queue in self._queues}


SHOWN: Final = "runguard trips show "  # what explains a stop, where another process can read it


@dataclass(slots=True)
class _Repeats:
    """Stops after the one that was sent, for the next alert with its key."""

    due: float  # monotonic seconds
    count: int = 0
    listed: list[str] = field(default_factory=list)  # the first ones

    def alert(self, last: Alert) -> Alert:
        facts, more = last.facts, self.count - len(self.listed)
        runs = f"{self.count} more run{'s' if self.count != 1 else ''}"
        verb = "stopped" if facts.get("enforced") else "would have stopped"
        tool = f" of tool {facts['tool']}" if facts.get("tool") else ""
        listed = ", ".join(self.listed) + (f" and {more} more" if more else "")
        text = f"RunGuard {verb} {runs} of {facts.get('agent')}: {facts.get('rule')}{tool}: {listed}"
        if SHOWN in last.text:
            text += f". The last one: {SHOWN}{facts['trip']}"
        shared = {name: facts[name] for name in ("rule", "app", "agent", "tool", "limit", "unit", "enforced")}
        return replace(last, text=text, facts={**shared, "runs": self.count, "last_trip": facts["trip"]})


class RepeatedStops(BackgroundQueue[None]):
    """Counts and lists the stops whose key was sent already, and sends them together.

    The first alert with a key follows after a minute, the next ones after two, four, … up to sixty. ``flush`` sends
    what is waiting at once.
    """

    capacity: ClassVar[int] = 1_000  # keys at a time

    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        super().__init__("runguard-repeated-stops")

    def restart(self) -> None:
        super().restart()
        self._flushing = 0
        self._gathered: dict[str, tuple[_Repeats, Alert]] = {}
        self._pauses = LruDict[str, float](_KEYS)  # key -> seconds that the last ones were gathered

    def add(self, alert: Alert) -> None:
        """Count a stop. ``alert`` would have said it alone."""
        with self._changed:
            found = self._gathered.get(alert.key)
            if found is None:
                pause = self._pauses[alert.key] = min(2 * self._pauses.get(alert.key, _GATHER_S / 2), _GATHER_MOST_S)
                found = _Repeats(time.monotonic() + pause), alert
                if not self.put(None):
                    return
            repeats = found[0]
            repeats.count += 1
            if len(repeats.listed) < _LISTED:
                user, run = alert.facts.get("user"), alert.facts.get("run")
                repeats.listed.append(f"{user} (run {run})" if user else f"run {run}")
            self._gathered[alert.key] = repeats, alert

    def handle(self, item: None) -> None:
        with self._changed:
            while True:
                repeats, last = min(self._gathered.values(), key=lambda one: one[0].due)
                left = repeats.due - time.monotonic()
                if left <= 0 or self._flushing:
                    break
                self._changed.wait(left)
            del self._gathered[last.key]
        self._alerts.send(repeats.alert(last), always=True)

    def flush(self, seconds: float = GOODBYE_S) -> bool:
        """Send what is waiting, and wait until it is delivered or given up."""
        end = time.monotonic() + seconds
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
        try:
            sent = super().flush(seconds)
        finally:
            with self._changed:
                self._flushing -= 1
        return self._alerts.flush(end - time.monotonic()) and sent


class _ReceiverQueue(BackgroundQueue[Parcel]):
    """The queue and the thread of one receiver.

    The thread starts with the first alert, ends when idle, and is restarted after a fork.
    """

    capacity: ClassVar[int] = 100

    def __init__(self, receiver: Receiver, secrets: tuple[str, ...]) -> None:
        self.receiver = receiver
        self._secrets = secrets
        self._sent_keys = LruDict[str, bool](_KEYS)  # topic -> whether the last alert resolved it
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

    # ---- delivery ---------------------------------------------------------------------------------------------------

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
                extra={"runguard_alert": asdict(parcel.alert)},
            )
        elif receiver.call is not None:
            result = receiver.call(parcel.alert)
            if inspect.isawaitable(result):
                asyncio.run(asyncio.wait_for(finish(result), receiver.deadline_s))
        else:
            self._post(parcel)

    def _post(self, parcel: Parcel) -> None:
        """Try until the deadline, counted from when the alert was queued; the first attempt is always made."""
        message = _FORMS[self.receiver.kind](parcel, self.receiver)
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
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

    def _headers(self, parcel: Parcel, body: bytes) -> dict[str, str]:
        """Sign each attempt with a new timestamp; the id stays the same."""
        headers = {"Content-Type": "application/json", "User-Agent": "runguard"}
        if self.receiver.kind == "webhook":
            headers |= {name: value.reveal() for name, value in self.receiver.headers}
            stamp = str(int(time.time()))  # noqa: TID251 - receivers compare it with their own clock
            headers |= {EVENT_HEADER: parcel.event_id, TIMESTAMP_HEADER: stamp}
            if self.receiver.secret is not None:
                headers[SIGNATURE_HEADER] = signature(self.receiver.secret.reveal(), stamp, body)
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


# ---- The form of an alert for each receiver: Slack, PagerDuty's Events API v2, and our own signed JSON.

VERSION: Final = 1
TIMESTAMP_HEADER: Final = "X-RunGuard-Timestamp"
SIGNATURE_HEADER: Final = "X-RunGuard-Signature"
EVENT_HEADER: Final = "Idempotency-Key"
_SCHEME: Final = "v1="
_SLACK_CHARS: Final = 2_900  # a text object takes 3000
_SUMMARY_CHARS: Final = 1_000  # PagerDuty takes 1024
_MENTION: Final = re.compile(r"(?i)@(?=channel|here|everyone|group)")
_HALF_ENTITY: Final = re.compile(r"&\w{0,4}$")


def _slack(parcel: Parcel, receiver: Receiver) -> dict[str, Any]:
    alert = parcel.alert
    title = f"RunGuard: {'resolved' if alert.resolved else alert.severity}"
    blocks: list[dict[str, Any]] = [{"type": "section", "text": _slack_text(f"*{title}*\n{_slack_escape(alert.text)}")}]
    if alert.facts:
        facts = "\n".join(
            f"{_slack_escape(name)}: {_slack_escape(_plain(value))}"
            for name, value in alert.facts.items()
            if value not in (None, "")
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


def _pagerduty(parcel: Parcel, receiver: Receiver) -> dict[str, Any]:
    alert = parcel.alert
    event: dict[str, Any] = {
        "routing_key": receiver.secret.reveal() if receiver.secret is not None else "",
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


def _webhook(parcel: Parcel, receiver: Receiver) -> dict[str, Any]:
    return {"v": VERSION, "id": parcel.event_id, **asdict(parcel.alert)}


_FORMS: Final = {"slack": _slack, "pagerduty": _pagerduty, "webhook": _webhook}


# ---- Signatures of webhooks.


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


# ---- One POST with the standard library: to a checked address, within one time limit, without redirects or proxies.

_ANSWER_EXCERPT: Final = 2_048
_TOO_MANY: Final = 429


class UndeliveredError(Exception):
    """An attempt failed. ``again``: a retry may help. ``wait_s``: the requested pause. ``excerpt``: the answer."""

    def __init__(self, reason: str, *, again: bool, wait_s: float | None = None, excerpt: str = "") -> None:
        super().__init__(reason)
        self.reason, self.again, self.wait_s, self.excerpt = reason, again, wait_s, excerpt


def post(endpoint: Endpoint, headers: Mapping[str, str], body: bytes, timeout_s: float) -> None:
    """Return when the server accepted the message; otherwise raise UndeliveredError without path or headers."""
    connection = _Pinned(endpoint, time.monotonic() + timeout_s)
    limit = threading.Timer(timeout_s, connection.cut)  # for the whole exchange, also if the server sends single bytes
    limit.daemon = True
    limit.start()
    try:
        connection.request(
            "POST", endpoint.path.reveal(), body, {"Host": endpoint.authority, "Connection": "close", **headers}
        )
        _judge(connection.getresponse())
    except RefusedAddressError as error:
        raise UndeliveredError(str(error), again=False) from None
    except ssl.SSLCertVerificationError as error:
        raise UndeliveredError(f"the certificate is not trusted ({error.verify_message})", again=False) from None
    except (OSError, http.client.HTTPException) as error:
        is_late = connection.is_late or isinstance(error, TimeoutError)
        reason = f"no answer within {timeout_s:g} s" if is_late else _reason_of(error)
        raise UndeliveredError(reason, again=True) from None
    finally:
        limit.cancel()
        connection.hang_up()


def _reason_of(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, socket.gaierror):
        return "the name could not be resolved"
    if not isinstance(error, OSError):
        return f"the answer was not HTTP ({type(error).__name__})"
    text = os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else type(error).__name__
    return f"the connection failed ({text})"


def _judge(answer: http.client.HTTPResponse) -> None:
    status = answer.status
    if 200 <= status < 300:
        return  # the body adds nothing; waiting for it could only turn a success into a failure
    reason = f"{status} {http.client.responses.get(status, '')}".rstrip()  # the server's own phrase is not trusted
    if 300 <= status < 400:
        raise UndeliveredError(f"{reason}: a redirect, and redirects are not followed", again=False)
    if status == _TOO_MANY or status >= 500:
        now = time.time()  # noqa: TID251 - a date refers to the wall clock
        wait_s = seconds_to_wait(answer.getheader("Retry-After"), now)
        raise UndeliveredError(
            reason if wait_s is None else f"{reason}, to be tried in {wait_s:g} s", again=True, wait_s=wait_s
        )
    excerpt = b""
    with suppress(OSError, http.client.HTTPException):  # only the status decides
        excerpt = answer.read1(_ANSWER_EXCERPT)
    raise UndeliveredError(reason, again=False, excerpt=excerpt.decode("utf-8", "replace"))


class _Pinned(http.client.HTTPConnection):
    """Connects to a checked address instead of resolving the name again; the name stays in Host and in TLS."""

    def __init__(self, endpoint: Endpoint, end: float) -> None:
        super().__init__(endpoint.host, endpoint.port)
        self._endpoint, self._end = endpoint, end
        self._wire: socket.socket | None = None
        self.is_late = False

    def connect(self) -> None:
        places = resolve(self._endpoint)
        for number, (family, sockaddr) in enumerate(places, 1):
            # an address that never answers leaves time for the next
            share = (self._end - time.monotonic()) / (len(places) - number + 1)
            sock = self._wire = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(share, 0.001))
                sock.connect(sockaddr)
                if self._endpoint.scheme == "https":
                    sock = self._wire = _trust().wrap_socket(sock, server_hostname=self._endpoint.host)
            except OSError as error:
                sock.close()
                if number == len(places) or isinstance(error, ssl.SSLCertVerificationError):
                    raise
            else:
                self.sock = sock
                return

    def cut(self) -> None:
        """End the exchange, from another thread."""
        self.is_late = True
        if self._wire is not None:
            with suppress(OSError):  # it is not connected
                self._wire.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        self.close()
        if self._wire is not None:
            self._wire.close()


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the certificates takes a while
