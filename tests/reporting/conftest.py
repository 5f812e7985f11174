"""Fixtures of this directory."""

import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

import pytest

from runguard.reporting import telemetry
from tests.kit.alert_servers import Server
from tests.kit.telemetry import Sdk


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Any, **how: Any) -> Server:
        servers.append(Server(*answers, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A self-signed certificate for alerts.example and 127.0.0.1, with its key, in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "alerts.example")])
    start = datetime.now(UTC) - timedelta(days=1)  # noqa: TID251
    names = [x509.DNSName("alerts.example"), x509.IPAddress(ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + built.public_bytes(serialization.Encoding.PEM))
    return str(path)


@pytest.fixture
def tls(serve: Callable[..., Server], certificate: str) -> tuple[Server, list[str | None]]:
    """A TLS server, and the names that clients asked it for."""
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _sock, name, _context: names.append(name)
    return serve(tls=context), names


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sdk]:
    made = Sdk()
    monkeypatch.setattr(telemetry, "_telemetry", made.wires)
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()
    made.loggers.shutdown()
