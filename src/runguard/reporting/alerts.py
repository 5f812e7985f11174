"""``alerts=...`` or ``[alerts]`` -> frozen ``AlertSettings``.

Invalid settings are rejected here, and no message shows a secret.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final, Literal, Self

from runguard.alerts.addresses import Endpoint
from runguard.alerts.secret import Secret, mask
from runguard.core.errors import PolicyError, nearest

PAGERDUTY_URL: Final = "https://events.pagerduty.com/v2/enqueue"
TIMEOUT_S: Final = 2.0
DEADLINE_S: Final = 60.0
_MOST_TIMEOUT_S: Final = 60.0
_MOST_DEADLINE_S: Final = 3_600.0
_LEAST_SECRET: Final = 16
_RECEIVERS: Final = ("slack_webhook", "pagerduty_key", "webhook", "log", "call")
_OPTIONS: Final = ("allow_private", "timeout_seconds", "deadline_seconds", "pagerduty_url")
_WEBHOOK: Final = ("url", "secret", "headers")
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_HEADER_VALUE: Final = re.compile(r"[!-~](?:[ -~]{0,2046}[!-~])?")
_TOKEN: Final = re.compile(r"[!-~]{1,128}")
_OUR_HEADERS: Final = frozenset(
    {
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "idempotency-key",
        "transfer-encoding",
        "user-agent",
    }
)
_SHAPE: Final = "must be a table such as {'slack_webhook': 'env:SLACK_WEBHOOK'}, a function, or a list of these"

_SECRET_SCHEMA: Final = {
    "type": "string",
    "minLength": 1,
    "description": "The value, or 'env:NAME' to read it from the environment.",
}
_TABLE_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "slack_webhook": _SECRET_SCHEMA,
        "pagerduty_key": _SECRET_SCHEMA,
        "webhook": {
            "anyOf": [
                _SECRET_SCHEMA,
                {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["url"],
                    "properties": {
                        "url": _SECRET_SCHEMA,
                        "secret": _SECRET_SCHEMA,
                        "headers": {"type": "object", "additionalProperties": _SECRET_SCHEMA},
                    },
                },
            ]
        },
        "log": {"anyOf": [{"type": "boolean"}, {"enum": list(_LEVELS)}]},
        "allow_private": {"type": "boolean", "default": False},
        "timeout_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": _MOST_TIMEOUT_S, "default": TIMEOUT_S},
        "deadline_seconds": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": _MOST_DEADLINE_S,
            "default": DEADLINE_S,
        },
        "pagerduty_url": {"type": "string", "default": PAGERDUTY_URL},
    },
}
SCHEMA: Final[dict[str, Any]] = {"anyOf": [_TABLE_SCHEMA, {"type": "array", "items": _TABLE_SCHEMA}]}


@dataclass(frozen=True, slots=True)
class Receiver:
    """One receiver of alerts, with its own limits. Counts and logs use its ``name``."""

    kind: Literal["slack", "pagerduty", "webhook", "log", "call"]
    name: str
    endpoint: Endpoint | None = None
    secret: Secret | None = None  # PagerDuty's routing key, or what a webhook is signed with
    headers: tuple[tuple[str, Secret], ...] = ()
    level: int | None = None  # of a log; None: by severity
    call: Callable[..., Any] | None = None
    timeout_s: float = TIMEOUT_S
    deadline_s: float = DEADLINE_S

    def secrets(self) -> Iterable[str]:
        """Every text of this receiver that no message or log may contain."""
        if self.endpoint is not None:
            yield self.endpoint.url.reveal()
            yield self.endpoint.path.reveal()
        for secret in (self.secret, *(value for _, value in self.headers)):
            if secret is not None:
                yield secret.reveal()

    def to_dict(self) -> dict[str, Any]:
        """Plain data without secrets."""
        data: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "timeout_seconds": self.timeout_s,
            "deadline_seconds": self.deadline_s,
        }
        if self.endpoint is not None:
            data |= {
                "url": str(self.endpoint),
                "allow_private": self.endpoint.allow_private,
                "headers": [name for name, _ in self.headers],
            }
        if self.kind == "webhook":
            data["signed"] = self.secret is not None
        if self.level is not None:
            data["level"] = logging.getLevelName(self.level).lower()
        return data


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """The receivers of alerts. Create it with ``AlertSettings.parse``; without receivers nothing is sent."""

    receivers: tuple[Receiver, ...] = ()

    @classmethod
    def parse(cls, value: object, where: str = "alerts") -> Self:
        """Parse a table, a function, a list of these or settings; PolicyError names the path and what is expected."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if isinstance(value, list | tuple):
            found = [receiver for number, entry in enumerate(value) for receiver in _entry(entry, f"{where}[{number}]")]
        else:
            found = list(_entry(value, where))
        return cls(_with_names(found))

    def to_dict(self) -> dict[str, Any]:
        """Plain data without secrets, for digests and reports."""
        return {"receivers": [receiver.to_dict() for receiver in self.receivers]}

    def __bool__(self) -> bool:
        return bool(self.receivers)


def _with_names(receivers: Iterable[Receiver]) -> tuple[Receiver, ...]:
    """Return a unique name: the second webhook is ``webhook-2``."""
    named: list[Receiver] = []
    for receiver in receivers:
        number = 1 + sum(other.kind == receiver.kind for other in named)
        named.append(replace(receiver, name=receiver.kind if number == 1 else f"{receiver.kind}-{number}"))
    return tuple(named)


def _entry(value: object, where: str) -> Iterable[Receiver]:
    if isinstance(value, Mapping):
        return _table(value, where)
    if callable(value):
        return [Receiver("call", "", call=value)]
    raise PolicyError(f"{where}: {_SHAPE}, not a {type(value).__name__}")


def _table(table: Mapping[Any, Any], where: str) -> Iterable[Receiver]:
    _known(table, (*_RECEIVERS, *_OPTIONS), where)
    given = {key: value for key, value in table.items() if value is not None}
    timeout_s, deadline_s = _limits(given, where)
    private = _flag(given.get("allow_private", False), f"{where}.allow_private")
    if "pagerduty_url" in given and "pagerduty_key" not in given:
        raise PolicyError(f"{where}.pagerduty_url: has no effect without pagerduty_key")
    if given and not any(key in given for key in _RECEIVERS):
        raise PolicyError(f"{where}: has no receiver; add one of {', '.join(_RECEIVERS)}")
    found = []
    if "slack_webhook" in given:
        found.append(Receiver("slack", "", _endpoint(given["slack_webhook"], f"{where}.slack_webhook", private)))
    if "pagerduty_key" in given:
        found.append(_pagerduty(given, where, private))
    if "webhook" in given:
        found.append(_webhook(given["webhook"], f"{where}.webhook", private))
    if given.get("log", False) is not False:
        found.append(Receiver("log", "", level=_level(given["log"], f"{where}.log")))
    if "call" in given:
        found.append(Receiver("call", "", call=_callable(given["call"], f"{where}.call")))
    return [replace(receiver, timeout_s=timeout_s, deadline_s=deadline_s) for receiver in found]


def _pagerduty(given: Mapping[str, Any], where: str, private: bool) -> Receiver:
    key = Secret.of(given["pagerduty_key"], f"{where}.pagerduty_key")
    if not _TOKEN.fullmatch(key.reveal()):
        raise PolicyError(
            f"{where}.pagerduty_key: must be the integration's routing key: up to 128 characters without white space"
        )
    path = f"{where}.pagerduty_url"
    url = Secret.of(given["pagerduty_url"], path) if "pagerduty_url" in given else Secret(PAGERDUTY_URL, public=True)
    return Receiver("pagerduty", "", Endpoint.of(url, path, private), key)


def _webhook(value: object, where: str, private: bool) -> Receiver:
    if not isinstance(value, Mapping):
        return Receiver("webhook", "", _endpoint(value, where, private))
    _known(value, _WEBHOOK, where)
    if value.get("url") is None:
        raise PolicyError(f"{where}.url: missing")
    secret = None if value.get("secret") is None else Secret.of(value["secret"], f"{where}.secret")
    if secret is not None and len(secret.reveal()) < _LEAST_SECRET:
        raise PolicyError(f"{where}.secret: shorter than {_LEAST_SECRET} characters, which can be guessed")
    headers = _headers(value.get("headers"), f"{where}.headers")
    return Receiver("webhook", "", _endpoint(value["url"], f"{where}.url", private), secret, headers)


def _headers(value: object, where: str) -> tuple[tuple[str, Secret], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where}: must be a table of names and values, not a {type(value).__name__}")
    headers = []
    for name, text in value.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise PolicyError(f"{where}: is not a valid header name")
        if name.lower() in _OUR_HEADERS or name.lower().startswith("x-runguard-"):
            raise PolicyError(f"{where}.{name}: is set by RunGuard itself")
        secret = Secret.of(text, f"{where}.{name}")
        if not _HEADER_VALUE.fullmatch(secret.reveal()):
            raise PolicyError(f"{where}.{name}: must be one line of printable ASCII, up to 2048 characters")
        headers.append((name, secret))
    return tuple(headers)


def _endpoint(value: object, where: str, private: bool) -> Endpoint:
    return Endpoint.of(Secret.of(value, where), where, private)


def _limits(given: Mapping[str, Any], where: str) -> tuple[float, float]:
    deadline_s = _seconds(given.get("deadline_seconds", DEADLINE_S), f"{where}.deadline_seconds", _MOST_DEADLINE_S)
    timeout_s = _seconds(
        given.get("timeout_seconds", min(TIMEOUT_S, deadline_s)), f"{where}.timeout_seconds", _MOST_TIMEOUT_S
    )
    if timeout_s > deadline_s:
        raise PolicyError(
            f"{where}.timeout_seconds = {timeout_s:g}: one attempt cannot take longer than deadline_seconds = "
            f"{deadline_s:g}"
        )
    return timeout_s, deadline_s


def _seconds(value: object, where: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{where}: must be a number of seconds, not a {type(value).__name__}")
    if not 0 < value <= most or not isfinite(value):
        raise PolicyError(f"{where} = {float(value):g}: must be greater than 0 and at most {most:g} seconds")
    return float(value)


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{where}: must be true or false, not a {type(value).__name__}")
    return value


def _level(value: object, where: str) -> int | None:
    if value is True:
        return None
    if isinstance(value, str) and value.lower() in _LEVELS:
        return logging.getLevelNamesMapping()[value.upper()]
    raise PolicyError(f"{where}: must be true, false or one of {', '.join(_LEVELS)}")


def _callable(value: object, where: str) -> Callable[..., Any]:
    if not callable(value):
        raise PolicyError(f"{where}: must be a function of one alert, not a {type(value).__name__}")
    return value


def _known(table: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key in known:
            continue
        name = mask(key, 40) if isinstance(key, str) else type(key).__name__
        raise PolicyError(f"{where}.{name}: no such setting; {nearest(name, known)}")
