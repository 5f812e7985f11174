"""Code of the user that runs while a call is asked for: it keeps nobody else waiting, and may make guarded calls."""

import threading
from pathlib import Path
from typing import Any

from runguard import Budget, guard
from runguard.core.money import Scope


def in_thread(do: Any, seconds: float = 20.0) -> Any:
    """Return what ``do`` returns; fail where it takes longer, as a call that waits for itself does."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(do()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "the call did not come back"
    return results[0]


def test_a_cap_function_may_make_a_guarded_call(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    plans = guard(lambda: {"usd": 0.01}, budget={"max_usd": 1}, store=store)

    def cap(_: Scope) -> float:
        plans()
        return 5.0

    ask = guard(lambda: {"usd": 0.01}, budget=[Budget(usd=cap, per="app")], store=store)
    assert in_thread(ask) == {"usd": 0.01}
    assert plans.spend()["calls"] == 1


def test_a_slow_cap_function_keeps_no_other_guard_waiting(tmp_path: Path) -> None:
    others_are_done, is_asked = threading.Event(), threading.Event()

    def cap(_: Scope) -> float:
        is_asked.set()
        assert others_are_done.wait(20)
        return 5.0

    slow = guard(lambda: {"usd": 0.01}, budget=[Budget(usd=cap, per="app")], store=f"sqlite:///{tmp_path}/slow.db")
    quick = guard(lambda: {"usd": 0.01}, budget={"max_usd": 1}, store=f"sqlite:///{tmp_path}/quick.db")
    waiting = threading.Thread(target=slow, daemon=True)
    waiting.start()
    assert is_asked.wait(20)
    for _ in range(3):
        in_thread(quick)
    others_are_done.set()
    waiting.join(20)
    assert slow.spend()["calls"] == 1
