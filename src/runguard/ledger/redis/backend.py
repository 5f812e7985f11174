"""The URL of a Redis or Valkey store."""

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from runguard.core.errors import PolicyError
from runguard.ledger.identity import Seen
from runguard.ledger.redis.session import RedisSession

_SCHEMES: Final = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_OPTIONS: Final = frozenset({"db", "client_name", "socket_keepalive"})
_TLS: Final = frozenset(
    {
        "ssl_cert_reqs",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_check_hostname",
        "ssl_min_version",
        "ssl_ciphers",
    }
)
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,99}")


class RedisStore:
    """``redis://[user:password@]host[:port][/db]``, ``rediss://`` with TLS, or ``unix:///path``.

    ``?namespace=`` separates programs that share a server.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise PolicyError(
                "store: this Redis URL cannot be read; write 'redis://host:6379/0?namespace=name'"
            ) from None
        if parts.scheme not in _SCHEMES:
            raise PolicyError(f"store = '{parts.scheme}://…': write redis://, rediss://, valkey:// or unix://")
        scheme = _SCHEMES[parts.scheme]
        place = parts.path if scheme == "unix" else _host(parts.hostname or "localhost", port)
        self.name = f"{parts.scheme}://{place}"
        options: dict[str, str] = {}
        for key, value in query:
            if key in options:
                raise PolicyError(f"store = {self.name!r}: option {key} is given twice")
            options[key] = value
        self.namespace = options.pop("namespace", "runguard")
        if not _NAMESPACE.fullmatch(self.namespace):
            raise PolicyError(
                f"store = {self.name!r}: namespace = {self.namespace!r}: letters, digits and _ . : / - only, "
                "at most 100"
            )
        allowed = _OPTIONS | (_TLS if scheme == "rediss" else frozenset())
        unknown = sorted(set(options) - allowed)
        if unknown:
            raise PolicyError(
                f"store = {self.name!r}: option {unknown[0]!r} is not one of: "
                f"{', '.join(sorted(allowed | {'namespace'}))}"
            )
        if scheme == "unix" and not parts.path.startswith("/"):
            raise PolicyError(f"store = {self.name!r}: write 'unix:///path/of/the.sock'")
        database = options.get("db", parts.path.strip("/") if scheme != "unix" else "") or "0"
        if not re.fullmatch(r"\d{1,5}", database):
            raise PolicyError(f"store = {self.name!r}: the database is a number, as in 'redis://host:6379/0'")
        if database != "0":
            self.name += f"/{database}" if scheme != "unix" else f"?db={database}"
        if self.namespace != "runguard":
            self.name += f"{'&' if '?' in self.name else '?'}namespace={self.namespace}"
        self.seen = Seen(self.name)
        self._url = f"{scheme}://{parts.netloc}{parts.path}?{urlencode(options)}"
        self.durable = (
            "survives the end of any client; a crash of the server loses nothing with appendfsync always, "
            "about a second with everysec, "
            "and all since the last snapshot without an append-only file; a failover loses what the replica "
            "had not yet received"
        )

    def __repr__(self) -> str:
        return f"RedisStore({self.name!r})"

    def connect(self, timeout: float) -> RedisSession:
        return RedisSession(self._url, self.name, self.namespace, timeout, self.seen)


def _host(host: str, port: int | None) -> str:
    host = unquote(host)
    return f"{f'[{host}]' if ':' in host else host}:{port or 6379}"
