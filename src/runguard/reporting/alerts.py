"""Alerts and their settings, with checked addresses and masked secrets.

``engine/decide`` makes alerts, ``reporting/delivery`` sends them, ``policy/settings`` parses the settings.
"""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from math import isfinite
from socket import getaddrinfo
from typing import Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from runguard.core.errors import PolicyError, did_you_mean

# ---- An alert, and the masked form in which it is sent.

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


# ---- Secrets: a string that only ``reveal()`` shows, and texts in which secrets are masked.

_FROM_ENVIRONMENT: Final = "env:"
HIDDEN: Final = "***"
MAX_CHARS: Final = 1_000
_BEYOND: Final = 512  # read beyond the limit, so that a key across it is recognized and masked
_WORD: Final = 64
_SECRET_NAME: Final = (
    r"(?:(?:api|access|private|routing)[_-]?key|token|secret|passwd|password|authorization|credential|cookie)"
)
_GAPS: Final = re.compile(r"[\x00-\x20\x7f-\x9f\u2028\u2029]+")
# Zero-width and direction characters could hide a key or reverse a name.
_INVISIBLE: Final = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")
_URL: Final = re.compile(
    r"(?i)([a-z][a-z0-9+.-]{1,20}://)(?:[^\s/@]{0,256}@)?([^\s/?#@\"'<>]{0,255})([/?#][^\s\"'<>]*)?"
)
_AUTHORISED: Final = re.compile(r"(?i)\b(?:(bearer)[ :]{1,3}[\w.~+/=-]{8,}|(basic)[ :]{1,3}[\w+/=-]{16,})")
_NAMED: Final = re.compile(rf"(?i)({_SECRET_NAME})([\"']?\s{{0,2}}[=:]\s{{0,2}}[\"']?)[^\s\"',;&]{{3,}}")
_PROVIDER: Final = re.compile(
    r"\b(?:"
    r"sk[-_][\w-]{12,}"
    r"|[pr]k_(?:live|test)_\w{8,}"
    r"|AIza[\w-]{16,}"
    r"|ya29\.[\w.-]{8,}"
    r"|GOCSPX-[\w-]{8,}"
    r"|(?:xox[a-z]|xapp)-[\w-]{6,}"
    r"|gh[a-z]_\w{16,}"
    r"|github_pat_\w{16,}"
    r"|glpat-[\w-]{12,}"
    r"|hf_\w{16,}"
    r"|gsk_\w{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|eyJ[\w-]{6,}[\w.-]*"
    r")"
)
_PEM: Final = re.compile(r"-----BEGIN [A-Z ]{0,40}KEY-----[^-]*(?:-----END [A-Z ]{0,40}KEY-----)?")
_IS_SECRET_NAME: Final = re.compile(rf"(?i){_SECRET_NAME}$")


class Secret:
    """Only ``reveal()`` returns the text. A secret from the environment is pickled as the name of its variable.

    Other secrets cannot be pickled, unless they are ``public``.
    """

    __slots__ = ("_public", "_text", "_variable")

    def __init__(self, text: str, variable: str = "", public: bool = False) -> None:
        self._text = text
        self._variable = variable
        self._public = public

    @classmethod
    def of(cls, value: object, where: str) -> Self:
        """Create a secret from a setting: the text itself, or ``env:NAME``.

        PolicyError names the setting and the variable, never the text.
        """
        if not isinstance(value, str):
            raise PolicyError(f"{where}: must be a text, not a {type(value).__name__}")
        if not value.startswith(_FROM_ENVIRONMENT):
            if not value:
                raise PolicyError(f"{where}: is empty; remove it, or write env:NAME to read a variable")
            return cls(value)
        variable = value.removeprefix(_FROM_ENVIRONMENT).strip()
        if not variable.replace("_", "").isalnum() or not variable.isascii():
            raise PolicyError(f"{where}: env: must be followed by the name of an environment variable")
        text = os.environ.get(variable, "").strip()  # secrets mounted from files end in a line break
        if not text:
            raise PolicyError(
                f"{where}: the environment variable {variable} is {'empty' if variable in os.environ else 'not set'}"
            )
        return cls(text, variable)

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Secret({_FROM_ENVIRONMENT + self._variable if self._variable else '***'})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._public:
            return type(self), (self._text, "", True)
        if not self._variable:
            raise TypeError("a literal secret cannot be pickled; write env:NAME, and set the variable where it is read")
        return type(self).of, (_FROM_ENVIRONMENT + self._variable, "alerts")


def mask(text: str, limit: int = MAX_CHARS) -> str:
    """Return one line of at most ``limit`` characters with secrets as ``***`` and URLs reduced to scheme and host."""
    return mask_also(text, (), limit)


def mask_also(text: str, secrets: tuple[str, ...], limit: int = MAX_CHARS) -> str:
    """Mask a text, including the given secrets."""
    seen = text[: limit + _BEYOND]
    is_whole = len(seen) == len(text)
    # without line breaks and control characters
    line = _INVISIBLE.sub("", _GAPS.sub(" ", seen if is_whole else _without_last_word(seen))).strip()
    for secret in secrets:
        line = line.replace(secret, HIDDEN)
    line = _masked(line)
    return line if is_whole and len(line) <= limit else f"{line[: limit - 1]}…"


def names_a_secret(name: str) -> bool:
    """Return whether a fact of this name is secret: ``api_key``, ``db_password``; ``tokens`` is a count."""
    return _IS_SECRET_NAME.search(name[-64:]) is not None


def _masked(text: str) -> str:
    text = _PEM.sub(HIDDEN, text)
    text = _URL.sub(_bare_url, text)
    text = _AUTHORISED.sub(lambda found: f"{found[1] or found[2]} {HIDDEN}", text)  # keeps the scheme
    text = _PROVIDER.sub(HIDDEN, text)
    return _NAMED.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}", text)  # keeps the name


def _bare_url(found: re.Match[str]) -> str:
    scheme, host, rest = found.groups()
    return f"{scheme}{host}{'/' + HIDDEN if rest and rest != '/' else ''}"


def _without_last_word(text: str) -> str:
    """Mask the last word, which may be the first half of a key."""
    head, gap, _ = text[-_WORD:].rpartition(" ")
    return text[:-_WORD] + head if gap else text


# ---- Where an alert may go: the URL is checked when it is read, and every address when it is used.

Sockaddr = tuple[socket.AddressFamily, tuple[Any, ...]]
_MAX_URL: Final = 2_048
_MAX_ADDRESSES: Final = 8
_PORTS: Final = {"https": 443, "http": 80}
_NOT_IN_A_URL: Final = re.compile(r"[^!-~]|[\\\"<>^`{|}]")  # urlsplit silently drops some of these
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC: Final = re.compile(r"\d+|0x[0-9a-f]*")

_REFUSED_V4: Final = tuple(
    (IPv4Network(network), word)
    for network, word in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "private"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "cloud-internal"),  # looks public, but is Azure's internal metadata address
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "reserved"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "reserved"),
        ("198.51.100.0/24", "reserved"),
        ("203.0.113.0/24", "reserved"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
    )
)
_REFUSED_V6: Final = tuple(
    (IPv6Network(network), word)
    for network, word in (
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("fe80::/10", "link-local"),
        ("fc00::/7", "private"),
        ("fec0::/10", "private"),
        ("ff00::/8", "multicast"),
        ("2001::/23", "reserved"),  # Teredo and other tunnels among them
        ("2001:db8::/32", "reserved"),
        ("2002::/16", "reserved"),  # 6to4: a tunnel to any IPv4 address
        ("3fff::/20", "reserved"),
    )
)
_LOOPBACK_V4: Final = IPv4Network("127.0.0.0/8")
_LOOPBACK_V6: Final = IPv6Address("::1")
_PUBLIC_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")


class RefusedAddressError(Exception):
    """The name resolves to a forbidden address."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked URL. Its path is as secret as a password: ``str`` shows only scheme and host."""

    url: Secret
    scheme: str
    host: str
    port: int
    path: Secret
    loopback: bool
    allow_private: bool

    @classmethod
    def of(cls, url: Secret, where: str, allow_private: bool) -> Self:
        """Check a URL. PolicyError names the setting, never the value."""
        text = url.reveal()
        if len(text) > _MAX_URL:
            raise PolicyError(f"{where}: longer than {_MAX_URL} characters")
        if _NOT_IN_A_URL.search(text):
            raise PolicyError(
                f"{where}: has characters that a URL cannot have; write a host in its xn-- form and the rest "
                "percent-encoded"
            )
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:  # its message would contain the value
            raise PolicyError(f"{where}: not a valid URL") from None
        if parts.username is not None or parts.password is not None:
            raise PolicyError(f"{where}: user and password in a URL are refused; use a header of 'webhook'")
        if parts.scheme not in _PORTS or not parts.hostname or port == 0:
            raise PolicyError(f"{where}: must be a URL that begins with https://")
        if parts.fragment:
            raise PolicyError(f"{where}: a URL with a fragment ('#') is refused: no server would see it")
        loopback = _check_host(parts.hostname, where, allow_private)
        if parts.scheme == "http" and not loopback:
            raise PolicyError(
                f"{where}: must begin with https://; plain http is allowed only for 127.0.0.1, [::1] and localhost"
            )
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(
            url, parts.scheme, parts.hostname, port or _PORTS[parts.scheme], Secret(path), loopback, allow_private
        )

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}/***"

    def __reduce__(self) -> tuple[Any, ...]:
        # checked again: the variable may have another value there
        return type(self).of, (self.url, "alerts", self.allow_private)


def _check_host(host: str, where: str, allow_private: bool) -> bool:
    """Return whether the host is written as a loopback address or name."""
    try:
        address = ip_address(host)
    except ValueError:
        labels = host.removesuffix(".").split(".")
        if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
            raise PolicyError(f"{where}: the host is not a valid name") from None
        # some programs read 2130706433, 0x7f.1 and 0177.0.0.1 as 127.0.0.1, others do not
        if _NUMERIC.fullmatch(labels[-1]):
            raise PolicyError(f"{where}: write the address in its usual form, such as 192.0.2.1") from None
        return host == "localhost"
    if address in _LOOPBACK_V4 or address == _LOOPBACK_V6:
        return True
    word = refusal(address)
    if word and not allow_private:
        raise PolicyError(f"{where}: the address is {word}; set allow_private = true to allow it")
    return False


def refusal(address: IPv4Address | IPv6Address) -> str:
    """Return why this address is forbidden, in one word; empty if it is allowed. Checks an embedded IPv4 address."""
    if isinstance(address, IPv4Address):
        return next((word for network, word in _REFUSED_V4 if address in network), "")
    if address.ipv4_mapped is not None:
        return refusal(address.ipv4_mapped)
    if address in _NAT64:  # how a machine without IPv4 reaches the rest of the world
        return refusal(IPv4Address(int(address) & 0xFFFF_FFFF))
    word = next((word for network, word in _REFUSED_V6 if address in network), "")
    return word or ("" if address in _PUBLIC_V6 else "reserved")


def resolve(endpoint: Endpoint) -> list[Sockaddr]:
    """Return the checked addresses of a name. One forbidden address refuses the name: its owner must not choose.

    Call it once per attempt and connect to one of exactly these, so that a changed DNS answer has no effect.
    The system's resolver has its own time limit; the receiver's own thread waits for it.
    """
    found = getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    places: list[Sockaddr] = [
        (family, sockaddr) for family, _, _, _, sockaddr in found if family in (socket.AF_INET, socket.AF_INET6)
    ]
    if not places:
        raise RefusedAddressError("the name has no address")
    for _, sockaddr in places:
        address = ip_address(str(sockaddr[0]))
        if endpoint.loopback:
            if address not in _LOOPBACK_V4 and address != _LOOPBACK_V6:
                raise RefusedAddressError("the name is not loopback on this machine")
        elif not endpoint.allow_private and (word := refusal(address)):
            raise RefusedAddressError(
                f"the name resolves to an address that is {word}; set allow_private = true to allow it"
            )
    return places[:_MAX_ADDRESSES]


# ---- ``alerts=...`` or ``[alerts]`` -> frozen ``AlertSettings``. No message shows a secret.

PAGERDUTY_URL: Final = "https://events.pagerduty.com/v2/enqueue"
TIMEOUT_S: Final = 2.0
DEADLINE_S: Final = 60.0
_MOST_TIMEOUT_S: Final = 60.0
_MOST_DEADLINE_S: Final = 3_600.0
_LEAST_SECRET: Final = 16
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
        """Yield every text of this receiver that no message or log may contain."""
        if self.endpoint is not None:
            yield self.endpoint.url.reveal()
            yield self.endpoint.path.reveal()
        for secret in (self.secret, *(value for _, value in self.headers)):
            if secret is not None:
                yield secret.reveal()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without secrets."""
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
        """Return plain data without secrets, for digests and reports."""
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
    private = given.get("allow_private", False)
    if not isinstance(private, bool):
        raise PolicyError(f"{where}.allow_private: must be true or false, not a {type(private).__name__}")
    if "pagerduty_url" in given and "pagerduty_key" not in given:
        raise PolicyError(f"{where}.pagerduty_url: has no effect without pagerduty_key")
    if given and not any(key in given for key in _RECEIVERS):
        raise PolicyError(f"{where}: has no receiver; add one of {', '.join(_RECEIVERS)}")
    found = [read(given, f"{where}.{key}", private) for key, read in _RECEIVERS.items() if key in given]
    return [replace(one, timeout_s=timeout_s, deadline_s=deadline_s) for one in found if one is not None]


def _slack(given: Mapping[str, Any], where: str, private: bool) -> Receiver:
    return Receiver("slack", "", _endpoint(given["slack_webhook"], where, private))


def _pagerduty(given: Mapping[str, Any], where: str, private: bool) -> Receiver:
    key = Secret.of(given["pagerduty_key"], where)
    if not _TOKEN.fullmatch(key.reveal()):
        raise PolicyError(f"{where}: must be the integration's routing key: up to 128 characters without white space")
    path = where.replace("_key", "_url")
    url = Secret.of(given["pagerduty_url"], path) if "pagerduty_url" in given else Secret(PAGERDUTY_URL, public=True)
    return Receiver("pagerduty", "", Endpoint.of(url, path, private), key)


def _webhook(given: Mapping[str, Any], where: str, private: bool) -> Receiver:
    value = given["webhook"]
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


def _log(given: Mapping[str, Any], where: str, private: bool) -> Receiver | None:
    level = given["log"]
    if level is True:
        return Receiver("log", "")
    if level is False:
        return None
    if isinstance(level, str) and level.lower() in _LEVELS:
        return Receiver("log", "", level=logging.getLevelNamesMapping()[level.upper()])
    raise PolicyError(f"{where}: must be true, false or one of {', '.join(_LEVELS)}")


def _function(given: Mapping[str, Any], where: str, private: bool) -> Receiver:
    if not callable(given["call"]):
        raise PolicyError(f"{where}: must be a function of one alert, not a {type(given['call']).__name__}")
    return Receiver("call", "", call=given["call"])


# the settings of receivers, and what makes a receiver of one; ``log = false`` makes none
_RECEIVERS: Final[dict[str, Callable[[Mapping[str, Any], str, bool], Receiver | None]]] = {
    "slack_webhook": _slack,
    "pagerduty_key": _pagerduty,
    "webhook": _webhook,
    "log": _log,
    "call": _function,
}


def _known(table: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key in known:
            continue
        name = mask(key, 40) if isinstance(key, str) else type(key).__name__
        raise PolicyError(f"{where}.{name}: no such setting; {did_you_mean(name, known)}")
