"""The URL of a SQLite store."""

from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from runguard.core.errors import PolicyError
from runguard.ledger.identity import Seen
from runguard.ledger.sqlite.session import SqliteSession


class SqliteStore:
    """``sqlite:///relative.db`` or ``sqlite:////absolute.db``.

    ``?synchronous=normal`` is faster, and a power cut may lose the last moments.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if "@" in parts.netloc:
            raise PolicyError(
                "store = 'sqlite://…': a file has no user and password; write 'sqlite:///relative/path.db' or "
                "'sqlite:////absolute/path.db'"
            )
        if parts.netloc or parts.fragment or not path.startswith("/") or path == "/" or "\0" in path:
            raise PolicyError(
                f"store = {url!r}: write 'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db' (and "
                "%23 for a #)"
            )
        if path.endswith(":memory:"):
            raise PolicyError(f"store = {url!r}: for accounts that live with the process use store = 'memory'")
        options = parse_qs(parts.query)
        self.synchronous = options.pop("synchronous", ["full"])[0].lower()
        if self.synchronous not in ("full", "normal") or options:
            raise PolicyError(
                f"store = {url!r}: the only option of a SQLite store is ?synchronous=full (default) or normal"
            )
        self.path = Path(path[1:]).expanduser().absolute()  # now: a program may change its directory
        self.name = f"sqlite:///{self.path}"
        self.seen = Seen(self.name)
        lost = (
            "a power cut loses nothing that was settled"
            if self.synchronous == "full"
            else "a power cut may lose the last moments"
        )
        self.durable = f"survives the end of any process; {lost}"

    def connect(self, timeout: float) -> SqliteSession:
        return SqliteSession(self.path, self.synchronous, timeout, self.seen)
