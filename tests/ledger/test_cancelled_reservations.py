"""A reservation that reaches the store after its caller was cancelled: nothing is held, and nothing looks damaged."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from runguard.core.money import UNLIMITED
from runguard.ledger import remote, write_queue
from runguard.ledger.ledger import StoreSession
from runguard.ledger.sqlite import SqliteStore
from tests.kit.ledgers import Desk
from tests.kit.waiting import until_async


class LateStore:
    """A SQLite store that reserves only when ``let_go`` is set."""

    def __init__(self, path: Path) -> None:
        self._store = SqliteStore(f"sqlite:///{path}/guard.db")
        self.name, self.durable, self.reserving = self._store.name, self._store.durable, 0
        self.let_go, self.done = threading.Event(), threading.Event()

    def connect(self, timeout: float) -> StoreSession:
        session: Any = self._store.connect(timeout)
        reserve = session.reserve

        def late(*args: Any, **kwargs: Any) -> Any:
            self.reserving += 1
            assert self.let_go.wait(30)
            try:
                return reserve(*args, **kwargs)
            finally:
                self.done.set()

        session.reserve = late
        made: StoreSession = session
        return made


@pytest.mark.parametrize("known", [False, True], ids=["new accounts", "known account"])
async def test_it_holds_nothing_and_is_no_fault_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    store, faults = LateStore(tmp_path), list[BaseException]()

    def noted(name: str, error: BaseException) -> BaseException:
        faults.append(error)
        return error

    monkeypatch.setattr(write_queue, "fault_of", noted)
    ledger = remote.StoreLedger(store, 5.0)
    desk = Desk(ledger)
    accounts = [desk.account("a"), desk.account("b", user="bob")]
    if known:
        store.let_go.set()
        ledger.release(await desk.held(accounts[:1], (1, 0, 1)))
        store.let_go.clear()
        store.done.clear()
    before = store.reserving
    caller = asyncio.create_task(desk.reserve(accounts, (1, UNLIMITED // 10**6, 1)))
    await until_async(lambda: store.reserving > before)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ledger.flush(10)  # the release is in the store
    store.let_go.set()
    await until_async(store.done.is_set)
    assert await desk.held(accounts, (100, 0, 1)), "the whole cap is free"
    assert faults == []
    ledger.close()
