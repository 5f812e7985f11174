"""Workers on a store that can vanish."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

from click.testing import CliRunner

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.alerts import Alert
from runguard.cli.main import main
from runguard.ledger import remote
from runguard.testing import Recording, ScriptedModel, run
from tests.kit.money import PRICES
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Place
from tests.kit.tools import step


class Worker:
    """One worker, with the model that it pays."""

    def __init__(self, url: str, **policy: Any) -> None:
        self.alerts: list[Alert] = []
        settings = {
            "prices": PRICES,
            "tokens": lambda _: 1_000,
            "store": url,
            "store_timeout": 5.0,
            "budgets": [Budget(usd="0.10", per="user")],
        }
        with mock.patch.dict(remote._open, clear=True):
            self.plugin = RunGuardPlugin(**{**settings, "alerts": self.alerts.append, **policy})
        self.model, self.ledger = steps(1), self.plugin.guard.accounts.ledger

    async def calls(self, attempts: int) -> int:
        """How many of so many attempts became a call, each as if a second had passed since the last."""
        before = self.model.calls
        for _ in range(attempts):
            self.ledger.link.down_until = 0.0  # type: ignore[attr-defined]
            self.last = await play(self.plugin, self.model)
        assert self.plugin.guard.guard_errors == 0
        return self.model.calls - before

    @property
    def why(self) -> str:
        return self.plugin.trips[-1].message

    @property
    def id(self) -> str:
        return str(self.ledger.link.seen.text.partition(" ")[0])  # type: ignore[attr-defined]


async def play(plugin: RunGuardPlugin, model: ScriptedModel) -> Recording:
    async with asyncio.timeout(30):
        return await run(agent(model, tools=[step]), plugins=[plugin], user_id="alice")


Make = Callable[..., Worker]


def store_command(*arguments: str) -> dict[str, Any]:
    ran = CliRunner().invoke(main, ["store", *arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


class Ground:
    """What is under a store: looked at and changed past RunGuard."""

    def __init__(self, place: Place) -> None:
        self.place, self.kind = place, place.kind
        parts = urlsplit(place.url)
        self.apart = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.server, self.path = (
            parts._replace(query="").geturl(),
            Path(parts.path[1:] if place.kind == "sqlite" else "/nowhere"),
        )

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.server)

    def sql(self, *statements: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.server, autocommit=True) as db:
            for statement in statements:
                # a worker may be writing at this moment, and the server ends one of two that wait for each other
                for _ in range(10):
                    with contextlib.suppress(psycopg.errors.DeadlockDetected):
                        answer = db.execute(statement.replace("runguard", self.apart["schema"]))
                        break
            return answer.fetchall() if answer.description else []

    def things(self) -> list[str]:
        """Everything that somebody made there, by name."""
        if self.kind == "sqlite":
            if not self.path.exists():
                return sorted(file.name for file in self.path.parent.iterdir())
            with contextlib.closing(sqlite3.connect(self.path)) as db:
                names = [
                    str(name)
                    for (name,) in db.execute(
                        "SELECT name FROM sqlite_master UNION ALL SELECT key FROM accounts" if self._ours(db) else _ALL
                    )
                ]
                return sorted(names)
        if self.kind == "redis":
            return sorted(key.decode() for key in self.client().keys(f"{{{self.apart['namespace']}}}:*"))
        tables = self.sql(
            "SELECT relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace WHERE nspname = 'runguard'"
        )
        return sorted(name for (name,) in tables)

    @staticmethod
    def _ours(db: sqlite3.Connection) -> bool:
        return bool(db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'accounts'").fetchone()[0])

    def files(self) -> list[Path]:
        return [self.path, self.path.with_name(f"{self.path.name}-wal"), self.path.with_name(f"{self.path.name}-shm")]

    # ---- ways -------------------------------------------------------------------------------------------------------

    def gone(self) -> None:
        """Removed, and nothing in its place."""
        if self.kind == "sqlite":
            for file in self.files():
                file.unlink(missing_ok=True)
        elif self.kind == "redis":
            self.client().eval(
                "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end",
                0,
                f"{{{self.apart['namespace']}}}:*",
            )
        else:
            self.sql("DROP SCHEMA runguard CASCADE")

    def begun_anew(self) -> None:
        """Removed, and made again by a worker that was just started."""
        self.gone()
        self.place.connect().close()

    def emptied(self) -> None:
        """Everything is there but the rows."""
        if self.kind == "sqlite":
            with contextlib.closing(sqlite3.connect(self.path)) as db, db:
                for table in ("accounts", "holds", "marks", "documents", "claims", "records", "runs"):
                    db.execute(f"DELETE FROM {table}")
        elif self.kind == "redis":
            prefix = f"{{{self.apart['namespace']}}}:"
            self.client().delete(
                *[key for key in self.client().keys(f"{prefix}*") if key.decode() != f"{prefix}schema"]
            )
        else:
            self.sql(
                "TRUNCATE runguard.accounts, runguard.holds, runguard.marks, runguard.documents, "
                "runguard.claims, runguard.records, runguard.runs"
            )


_ALL = "SELECT name FROM sqlite_master"
