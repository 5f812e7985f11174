"""Forecasts of budgets that two workers share, on every store: the spending of both counts."""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal

from runguard import Budget
from runguard.alerts import Alert
from runguard.core.money import LEAST_CALLS, Window
from runguard.testing import ScriptedModel, call, run, text
from runguard.view import StoreView
from tests.kit.commands import runguard
from tests.kit.processes import Process
from tests.kit.rule_agents import agent
from tests.kit.shared_stores import CALL, Make
from tests.kit.stores import Place
from tests.kit.tools import step

EACH = LEAST_CALLS // 2 + 1  # too few for a forecast without the calls of the other worker


def model() -> ScriptedModel:
    return ScriptedModel([*[call("step", q=n) for n in range(EACH - 1)], text("done")])


async def test_a_shared_day_counts_the_calls_of_both_workers(place: Place, worker: Make) -> None:
    budgets = [Budget(usd=1_000, per="app", window="1d")]
    first, second = worker(budgets=budgets), worker(budgets=budgets)
    await run(agent(model(), step), plugins=[first], user_id="alice", session_id="a")
    assert first.flush(10)
    assert first.snapshot()["forecasts"] == []
    await run(agent(model(), step), plugins=[second], user_id="bob", session_id="b")
    assert second.flush(10)
    (found,) = second.snapshot()["forecasts"]
    assert (found["calls"], found["scope"]) == (2 * EACH, "app:app")
    view = StoreView(place.url)
    try:
        (row,) = [row for row in view.budgets() if row.scope == "app:app"]
        now = view.now()
    finally:
        view.close()
    assert row.spent == 2 * EACH * CALL
    assert row.forecast is not None
    assert row.forecast.calls == 2 * EACH
    _, begins, ends = Window.parse("1d").bounds(now)
    passed = (now - begins) / (ends - begins)
    assert abs(row.forecast.share_at_end - float(row.spent / Decimal(1_000)) / passed) < 0.01 / passed
    printed = runguard("status", "--store", place.url).stdout
    assert ("by then" in printed) or ("used up in about" in printed)


def test_a_process_forecasts_what_another_one_spends(place: Place, process: Callable[[], Process]) -> None:
    workers = [process(), process()]
    for number, worker in enumerate(workers):
        worker.do("open", url=place.url, budgets=[{"usd": 1_000, "per": "app", "window": "1d"}])
        assert worker.do("run", session=f"s{number}", calls=EACH)["trips"] == []
        assert worker.do("flush", seconds=10)
    assert workers[0].do("snapshot")["forecasts"] == []
    (found,) = workers[1].do("snapshot")["forecasts"]
    assert (found["calls"], found["scope"]) == (2 * EACH, "app:app")


async def test_two_workers_report_once_that_their_budget_will_not_last(worker: Make) -> None:
    offset = 12 - datetime.now(UTC).hour  # noqa: TID251 - a store uses the real time; there it is noon
    budget = Budget(
        calls=2 * EACH + 1, per="app", window="1d", tz=f"Etc/GMT{-offset:+d}", thresholds=[], burn_alert=True
    )
    alerts: list[Alert] = []
    first, second = (worker(budgets=[budget], alerts=alerts.append) for _ in range(2))
    for session, plugin in enumerate((first, second)):
        await run(agent(model(), step), plugins=[plugin], user_id="alice", session_id=str(session))
        assert plugin.flush(10)
    assert [alert.kind for alert in alerts] == ["burn_rate"]
    assert alerts[0].facts["limit"] == str(2 * EACH + 1)
    last = ScriptedModel([text("done")])
    await run(agent(last), plugins=[first], user_id="alice", session_id="last")
    assert (last.calls, first.flush(10), len(alerts)) == (1, True, 1)
