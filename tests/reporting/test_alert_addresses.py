"""Addresses that alerts are never sent to, and TLS."""

import io
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from runguard.alerts import AlertSettings
from runguard.errors import PolicyError
from runguard.reporting import alerts as addresses
from runguard.reporting import delivery as transport
from runguard.reporting.alerts import refusal
from tests.kit.alert_servers import (
    CANARY,
    PATIENT,
    Server,
    alert,
    alerts,
    sent,
    short_pauses_and_no_leftovers,  # noqa: F401 - an autouse fixture
)
from tests.kit.examples import each_row
from tests.kit.optional import present

# ---- where alerts do not go -----------------------------------------------------------------------------------------


REFUSED = {
    "0.0.0.0": "unspecified",
    "10.1.2.3": "private",
    "100.100.100.200": "private",
    "127.0.0.2": "loopback",
    "168.63.129.16": "cloud-internal",
    "169.254.169.254": "link-local",
    "172.31.255.255": "private",
    "192.0.0.192": "reserved",
    "192.168.1.1": "private",
    "198.18.0.1": "reserved",
    "224.0.0.1": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "reserved",
    "::": "unspecified",
    "::1": "loopback",
    "::127.0.0.1": "reserved",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:169.254.169.254": "link-local",
    "64:ff9b::a9fe:a9fe": "link-local",
    "64:ff9b::10.0.0.1": "private",
    "64:ff9b:1::1": "reserved",
    "100::1": "reserved",
    "2001::1": "reserved",
    "2001:db8::1": "reserved",
    "2002:a00:1::1": "reserved",
    "3fff::1": "reserved",
    "5f00::1": "reserved",
    "fd00:ec2::254": "private",
    "fe80::1": "link-local",
    "fe80::1%1": "link-local",
    "fec0::1": "private",
    "ff02::1": "multicast",
}


@each_row(("address", "word"), REFUSED.items())
def test_addresses_that_are_not_public_are_refused(address: str, word: str) -> None:
    assert refusal(ip_address(address)) == word


@each_row(
    "address",
    [
        "8.8.8.8",
        "172.32.0.1",
        "100.128.0.1",
        "169.253.1.1",
        "2606:4700::1111",
        "2a00:1450::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_public_addresses_are_not(address: str) -> None:
    assert refusal(ip_address(address)) == ""


def point(monkeypatch: pytest.MonkeyPatch, *found: str) -> list[str]:
    """The resolver answers with these addresses; what is asked of it is kept."""
    asked: list[str] = []

    def lookup(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in found]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port))
            for family, address in zip(families, found, strict=True)
        ]

    monkeypatch.setattr(addresses, "getaddrinfo", lookup)
    return asked


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every attempt to connect is kept, and fails."""
    tried: list[Any] = []

    class Never:
        def __init__(self, *_: Any) -> None:
            pass

        def settimeout(self, _: float) -> None:
            pass

        def connect(self, sockaddr: Any) -> None:
            tried.append(sockaddr)
            raise ConnectionRefusedError

        def close(self) -> None:
            pass

    monkeypatch.setattr(
        transport, "socket", SimpleNamespace(socket=Never, SOCK_STREAM=socket.SOCK_STREAM, gaierror=socket.gaierror)
    )
    return tried


@pytest.mark.parametrize(
    "bad", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "0.0.0.0", "::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1"]
)
def test_a_name_that_leads_inside_is_never_connected_to(
    monkeypatch: pytest.MonkeyPatch, no_connection: list[Any], caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    point(monkeypatch, "93.184.215.14", bad)  # one good address does not excuse a bad one
    told = alerts(webhook=f"https://alerts.example/{CANARY}")
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection == []
    assert "set allow_private = true to allow it" in caplog.text
    assert CANARY not in caplog.text


def test_the_connection_goes_to_the_checked_address_and_the_name_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch, no_connection: list[Any]
) -> None:
    asked = point(monkeypatch, "93.184.215.14", "2606:4700::1111")
    endpoint = AlertSettings.parse({"webhook": "https://alerts.example:8443/x"}).receivers[0].endpoint
    assert endpoint is not None
    with pytest.raises(transport.UndeliveredError):
        transport.post(endpoint, {}, b"{}", 1)
    assert asked == ["alerts.example"]
    assert no_connection == [("93.184.215.14", 8443), ("2606:4700::1111", 8443)]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://alerts.example/x", "alerts.example"),
        ("https://alerts.example:8443/x", "alerts.example:8443"),
        ("http://[::1]:80/", "[::1]"),
    ],
)
def test_the_host_header_is_the_name_as_it_is_written(monkeypatch: pytest.MonkeyPatch, url: str, host: str) -> None:
    said: list[bytes] = []
    wire = SimpleNamespace(
        sendall=said.append, makefile=lambda _: io.BytesIO(b"HTTP/1.1 204 No Content\r\n\r\n"), close=lambda: None
    )
    monkeypatch.setattr(transport._Pinned, "connect", lambda connection: setattr(connection, "sock", wire))
    transport.post(present(AlertSettings.parse({"webhook": url}).receivers[0].endpoint), {}, b"{}", 1)
    assert f"\r\nHost: {host}\r\n".encode() in b"".join(said)


def test_a_name_that_changes_its_mind_gains_nothing(monkeypatch: pytest.MonkeyPatch, no_connection: list[Any]) -> None:
    """DNS rebinding: public when it is checked, inside when it is asked again."""
    answers = iter(["93.184.215.14", "169.254.169.254", "169.254.169.254"])

    def lookup(_: str, port: int, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(addresses, "getaddrinfo", lookup)
    told = alerts(webhook="https://alerts.example/x")
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection == [("93.184.215.14", 443)]


def test_private_places_are_reached_when_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, no_connection: list[Any]
) -> None:
    point(monkeypatch, "10.0.0.7")
    told = alerts(webhook="https://alerts.internal/x", allow_private=True, deadline_seconds=0.1)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection[0] == ("10.0.0.7", 443)


def test_localhost_must_be_loopback(
    monkeypatch: pytest.MonkeyPatch, no_connection: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    point(monkeypatch, "93.184.215.14")
    told = alerts(webhook="http://localhost/x")
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection == []
    assert "not loopback on this machine" in caplog.text


def test_localhost_is_reached(serve: Callable[..., Server]) -> None:
    server = serve()
    told = alerts(webhook=server.url(host="localhost"))
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert server.requests[0][1]["host"] == f"localhost:{server.port}"


def test_a_name_that_cannot_be_looked_up_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def away(host: str, port: int, **_: Any) -> None:
        asked.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(addresses, "getaddrinfo", away)
    told = alerts(webhook="https://alerts.example/x", deadline_seconds=0.3)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(asked) >= 2
    assert "the name could not be resolved" in caplog.text


BAD_URLS = {
    "http://alerts.example/x": "must begin with https://",
    "ftp://alerts.example/x": "must be a URL that begins with https://",
    "file:///etc/passwd": "must be a URL that begins with https://",
    "alerts.example/x": "must be a URL that begins with https://",
    "https:///x": "must be a URL that begins with https://",
    "https://alerts.example:0/x": "must be a URL that begins with https://",
    "https://user:pass@alerts.example/x": "user and password in a URL are refused",
    "https://user@alerts.example/x": "user and password in a URL are refused",
    "https://alerts.example/x#part": "fragment",
    "https://alerts.example:99999/x": "not a valid URL",
    "https://[::1/x": "not a valid URL",
    "https://alerts.example/a b": "characters that a URL cannot have",
    "https://alerts.example/a\r\nX-Evil: 1": "characters that a URL cannot have",
    "https://alerts.example\\@127.0.0.1/": "characters that a URL cannot have",
    "https://bücher.example/": "characters that a URL cannot have",
    "https://alerts..example/": "the host is not a valid name",
    "https://-alerts.example/": "the host is not a valid name",
    "https://fe80::1%25eth0/": "not a valid URL",
    "https://2130706433/": "write the address in its usual form",
    "https://0x7f000001/": "write the address in its usual form",
    "https://0x7f.1/": "write the address in its usual form",
    "https://0177.0.0.1/": "write the address in its usual form",
    "https://127.1/": "write the address in its usual form",
    "http://2130706433/": "write the address in its usual form",
    "https://169.254.169.254/latest/meta-data": "the address is link-local; set allow_private = true to allow it",
    "https://10.0.0.1/": "the address is private",
    "https://0.0.0.0/": "the address is unspecified",
    "https://[::]/": "the address is unspecified",
    "https://[::ffff:127.0.0.1]/": "the address is loopback",
    "https://[0:0:0:0:0:ffff:7f00:1]/": "the address is loopback",
    "https://[fd00::1]/": "the address is private",
    "https://[64:ff9b::a9fe:a9fe]/": "the address is link-local",
    "http://[::ffff:127.0.0.1]/": "the address is loopback",
    "http://localhost.evil.example/": "must begin with https://",
    "http://127.0.0.1.evil.example/": "must begin with https://",
    "https://" + "a" * 3000: "longer than 2048 characters",
}


@each_row(("url", "message"), BAD_URLS.items())
@each_row("setting", ["slack_webhook", "webhook"])
def test_urls_that_cannot_be_meant_are_refused_when_they_are_read(setting: str, url: str, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        AlertSettings.parse({setting: url})
    assert str(raised.value).startswith(f"alerts.{setting}: ")
    assert message in str(raised.value)
    assert url not in str(raised.value)


@each_row(
    "url",
    [
        "http://127.0.0.1:1/x",
        "http://127.9.9.9/",
        "http://[::1]:8080/",
        "http://localhost/",
        "https://hooks.slack.com/services/T/B/X",
        "https://8.8.8.8/",
    ],
)
def test_urls_that_can_be_meant_are_taken(url: str) -> None:
    assert len(AlertSettings.parse({"webhook": url}).receivers) == 1


def test_plain_http_stays_refused_where_private_places_are_allowed() -> None:
    with pytest.raises(PolicyError, match="must begin with https"):
        AlertSettings.parse({"webhook": "http://10.0.0.1/", "allow_private": True})
    assert AlertSettings.parse({"webhook": "https://10.0.0.1/", "allow_private": True})


# ---- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch, certificate: str) -> Iterator[None]:
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    transport._trust.cache_clear()
    yield
    transport._trust.cache_clear()


def test_an_unverified_certificate_is_refused_and_not_tried_again(
    tls: tuple[Server, list[str | None]], caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = tls
    told = alerts(webhook=server.url(scheme="https"), deadline_seconds=PATIENT, timeout_seconds=PATIENT)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert server.requests == []
    assert "the certificate is not trusted (self-signed certificate)" in caplog.text


def test_a_trusted_certificate_is_checked_against_the_name_on_a_pinned_connection(
    tls: tuple[Server, list[str | None]], trusting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, names = tls
    point(monkeypatch, "127.0.0.1")
    told = alerts(
        webhook=server.url(scheme="https", host="alerts.example"), allow_private=True, timeout_seconds=PATIENT
    )
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert names == ["alerts.example"]
    assert server.requests[0][1]["host"] == f"alerts.example:{server.port}"


def test_a_trusted_certificate_of_another_name_is_refused(
    tls: tuple[Server, list[str | None]],
    trusting: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, _ = tls
    point(monkeypatch, "127.0.0.1")
    told = alerts(webhook=server.url(scheme="https", host="other.example"), allow_private=True, timeout_seconds=PATIENT)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert server.requests == []
    assert "the certificate is not trusted" in caplog.text
