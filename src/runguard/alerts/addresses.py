"""Check where an alert may go: the URL when it is read, and every address when it is used.

A name is resolved once per attempt, all its addresses are checked, and the connection goes to one of exactly these, so
that a changed DNS answer has no effect.
"""

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from socket import getaddrinfo
from typing import Any, Final, Self
from urllib.parse import urlsplit

from runguard.alerts.secret import Secret
from runguard.core.errors import PolicyError

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
        """PolicyError names the setting, never the value."""
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


_LOOPBACK_V4: Final = IPv4Network("127.0.0.0/8")
_LOOPBACK_V6: Final = IPv6Address("::1")


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
