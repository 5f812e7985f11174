"""A store's URL -> its ledger."""

from importlib import import_module
from typing import Final

from runguard.core.errors import PolicyError
from runguard.ledger.base import Ledger
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.store import Store

_KINDS: Final = "memory, sqlite:///path, redis://host:6379/0, postgresql://user@host/database"


def check_store(url: str) -> None:
    """Check a store URL without connecting."""
    if url != "memory":
        store_of(url)


def store_name(url: str) -> str:
    """A URL for people: without a password."""
    return url if url == "memory" else store_of(url).name


def open_ledger(url: str, timeout: float, retention_s: float = 30 * 86_400.0) -> Ledger:
    if url == "memory":
        return MemoryLedger()
    from runguard.ledger.remote import ledger_of

    return ledger_of(store_of(url), url, timeout, retention_s)


def store_of(url: str) -> Store:
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from runguard.ledger.sqlite.backend import SqliteStore

        return SqliteStore(url)
    if scheme in ("redis", "rediss", "unix", "valkey", "valkeys"):
        from runguard.ledger.redis.backend import RedisStore

        _need("redis", "redis", scheme)
        return RedisStore(url)
    if scheme in ("postgresql", "postgres"):
        from runguard.ledger.postgres.backend import PostgresStore

        _need("psycopg", "postgres", scheme)
        return PostgresStore(url)
    shown = f"{scheme}:…" if ":" in url else url  # the rest may hold a password
    meant = (
        f"; a file is written 'sqlite:///{url}'"
        if ":" not in url and url.rpartition(".")[2] in ("db", "sqlite", "sqlite3")
        else ""
    )
    raise PolicyError(f"store = '{shown}': no such store{meant}; known: {_KINDS}")


def _need(package: str, extra: str, scheme: str) -> None:
    """Import a client here: its import must not eat up the deadline of the first paid call."""
    try:
        import_module(package)
    except ImportError:
        raise PolicyError(
            f"store = '{scheme}://…' needs {package}, which is not installed: pip install 'runguard-agents[{extra}]'"
        ) from None
