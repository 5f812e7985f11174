"""The URL of a Postgres store."""

import re
from typing import Final
from urllib.parse import unquote, urlsplit

from runguard.core.errors import PolicyError
from runguard.ledger.identity import Seen
from runguard.ledger.postgres.session import PostgresSession

_DEFAULT_SCHEMA: Final = "runguard"
_SCHEMA_NAME: Final = re.compile(r"(?!pg_)[A-Za-z_][A-Za-z0-9_]{0,62}")
_HOSTS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,@/]*)(:\d*)?(,(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,@/]*)(:\d*)?)*")
_SYNCHRONOUS: Final = re.compile(r"synchronous_commit\s*=\s*(\w+)")


class PostgresStore:
    """``postgresql://user:password@host:5432/database``.

    ``?schema=name`` sets another schema than "runguard". Other options go to libpq.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("postgresql://#")._replace(fragment="?")  # refused below
        hosts, query = parts.netloc.rpartition("@")[2], [part for part in parts.query.split("&") if part]
        # A message never repeats a URL that cannot be parsed: any part of it may be the password.
        if parts.scheme not in ("postgresql", "postgres"):
            raise PolicyError("a PostgreSQL store is 'postgresql://user:password@host:5432/database'")
        if parts.fragment or "@" in parts.path or not _HOSTS.fullmatch(hosts) or any("=" not in part for part in query):
            raise PolicyError(
                "store = 'postgresql://…': not understood; write 'postgresql://user:password@host:5432/database' "
                "and any of @ : / ? # % in the user or password as %40 %3A %2F %3F %23 %25"
            )
        options = {name: unquote(value) for name, _, value in (part.partition("=") for part in query)}
        self.schema = options.get("schema", _DEFAULT_SCHEMA)
        if not _SCHEMA_NAME.fullmatch(self.schema):
            raise PolicyError(
                f"store = 'postgresql://…?schema={self.schema}': a schema's name has letters, digits and "
                "underscores, and no pg_ in front"
            )
        kept = [
            f"{name}={value.replace('=', '%3D')}"
            for name, _, value in (part.partition("=") for part in query)
            if name != "schema"
        ]
        self._url = parts._replace(query="&".join(kept)).geturl()
        if not parts.netloc:  # urlunsplit drops the empty authority, which libpq needs
            self._url = f"{parts.scheme}://{self._url.removeprefix(f'{parts.scheme}:').removeprefix('//')}"
        shown = {"host": options.get("host"), "schema": self.schema if self.schema != _DEFAULT_SCHEMA else None}
        extra = "&".join(f"{name}={value}" for name, value in shown.items() if value)
        self.name = f"postgresql://{hosts}{parts.path}" + (f"?{extra}" if extra else "")
        self.seen = Seen(self.name)
        commits = _SYNCHRONOUS.findall(options.get("options", ""))
        survives = "survives the end of any process"
        if commits and commits[-1].lower() in ("off", "false", "no", "0"):
            self.durable = f"{survives}; a crash of the server may lose the last moments (synchronous_commit = off)"
        else:
            self.durable = (
                f"{survives}, of the server too; a power cut loses nothing that was settled, as long as the server "
                "runs with fsync"
            )

    def connect(self, timeout: float) -> PostgresSession:
        try:
            import psycopg
        except ImportError:
            raise PolicyError(
                "store = 'postgresql://…' needs psycopg: pip install 'runguard-agents[postgres]'"
            ) from None
        try:
            params = psycopg.conninfo.conninfo_to_dict(self._url)
        except psycopg.Error:  # its message may quote the URL
            raise PolicyError(
                f"store = {self.name!r}: libpq does not understand an option after the question mark, or a "
                "part before it"
            ) from None
        return PostgresSession(self.name, self.schema, params, timeout, self.seen)
