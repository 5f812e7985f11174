"""A fault of telemetry never reaches the caller, and its page lists every name."""

import ast
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import runguard
from runguard.core.money import Budget
from runguard.reporting import telemetry
from runguard.reporting.telemetry import Telemetry
from tests.kit.driver import Driver
from tests.kit.telemetry import INFO, Sdk, loop, report, stop_of

pytest.importorskip("opentelemetry.sdk")


SOURCE = Path(runguard.__file__).parent


DOCS = Path(__file__).parents[2] / "docs"


# ---- nothing of it reaches the caller -------------------------------------------------------------------------------


class Broken:
    """An API of which everything raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("broken")


def test_an_api_that_raises_is_nobodys_trouble_and_said_once(
    drive: type[Driver], sdk: Sdk, caplog: pytest.LogCaptureFixture
) -> None:
    d = drive(budgets=[Budget(tokens=100, per="app")])
    told = Telemetry.of(d.guard)
    wires: Any = sdk.wires
    wires._span = wires._counter = wires._emit = wires._histogram = Broken()
    with sdk.tracer.start_as_current_span("call"):
        loop(d, told)
    assert told is not None
    told.took(1e-6)
    assert told.flush() is False
    assert sdk.points("runguard.budget.limit") == []
    assert sdk.wires.failures > 3
    assert [record.getMessage().split(":")[0] for record in caplog.records].count("runguard.telemetry_failed") == 1


def test_what_one_signal_breaks_the_others_still_carry(drive: type[Driver], sdk: Sdk) -> None:
    told = Telemetry.of(drive().guard)
    wires: Any = sdk.wires
    wires._span = wires._counter = Broken()
    report(told, stop_of())
    assert len(sdk.events()) == 1


def test_an_exporter_that_raises_or_hangs_is_not_on_the_path(
    drive: type[Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()

    class Exporter(InMemoryLogRecordExporter):
        def export(self, batch: Any) -> Any:
            hang.wait(20)
            raise RuntimeError("broken exporter")

    loggers = LoggerProvider()
    loggers.add_log_record_processor(SimpleLogRecordProcessor(Exporter()))  # type: ignore[no-untyped-call]
    wires = Telemetry(MeterProvider([InMemoryMetricReader()]).get_meter("runguard"), loggers.get_logger("runguard"))
    monkeypatch.setattr(telemetry, "_telemetry", wires)
    told = Telemetry.of(drive().guard)
    report(told, stop_of(), stop_of())
    assert told is not None
    assert told.flush(0.05) is False  # it hangs over there
    hang.set()
    assert told.flush(10) is True


def test_a_guard_whose_budgets_cannot_be_read_hides_no_other(
    drive: type[Driver], sdk: Sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = [drive(budgets=[Budget(tokens=100, per="app")]) for _ in range(2)]
    told = [Telemetry.of(d.guard) for d in drivers]
    for d in drivers:
        d.start("r1", app="shop", user="ann", session="s1")
        d.bill(10, 5, run="r1")
    monkeypatch.setattr(drivers[0].guard, "accounts", Broken())
    assert sdk.gauges("app", "tokens")["used"] == {"app:shop": 15}
    assert len(told) == 2


def test_an_old_logs_api_means_no_log_events(drive: type[Driver]) -> None:
    class OldLogger:
        def emit(self, record: Any) -> None:
            raise AssertionError("a record made from the API alone breaks the export of everybody's")

    reader = InMemoryMetricReader()
    wires = Telemetry(MeterProvider([reader]).get_meter("runguard"), OldLogger())  # type: ignore[arg-type]
    wires.decided(stop_of(), INFO, "writer", None)
    assert wires.outbox.flush()
    assert (wires.failures, wires.outbox.failed) == (0, 0)
    assert reader.get_metrics_data() is not None


def in_a_process(code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.metrics"])
def test_without_the_api_there_is_no_telemetry_and_no_word_about_it(missing: str) -> None:
    said = in_a_process(f"""
        import sys
        sys.modules[{missing!r}] = None
        from runguard.engine.guard import Guard
        from runguard.policy import Policy
        from runguard.reporting.telemetry import Telemetry
        print(Telemetry.of(Guard(Policy())))
    """)
    assert said == "None\n"


def test_providers_may_be_set_after_the_guard_was_made() -> None:
    """The global way, as programs go it: the API's stand-ins connect when the providers come. And no SDK is needed
    before.
    """
    said = in_a_process("""
        import sys
        from runguard.core.money import Budget
        from runguard.engine.guard import Guard
        from runguard.core.decision import Action, Decision, Finding
        from runguard.core.events import ModelCall, RunInfo
        from runguard.policy import Policy
        from runguard.pricing.rates import Usage
        from runguard.reporting.telemetry import Telemetry
        guard = Guard(Policy(budgets=(Budget(tokens=100, per="app"),)))
        told = Telemetry.of(guard)
        stop = Decision(Action.STOP, Finding("stall", Action.STOP, 1, 1, "failures"))
        told.decided(stop, RunInfo("r"), "a", None)
        assert told.flush()
        assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")]

        from opentelemetry import _logs, metrics
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        reader, exporter, loggers = InMemoryMetricReader(), InMemoryLogRecordExporter(), LoggerProvider()
        loggers.add_log_record_processor(SimpleLogRecordProcessor(exporter))
        metrics.set_meter_provider(MeterProvider([reader]))
        _logs.set_logger_provider(loggers)
        told.decided(stop, RunInfo("r"), "a", None)
        told.took(1e-6)
        run = guard.start(RunInfo("r", app="shop"))
        guard.settle(guard.accounts.open_settled(run.run_costs, ModelCall("r", "", "a", 0.0)), Usage(10, 5))
        assert told.flush()
        (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
        print(scope.scope.name, len(scope.scope.version) > 0, *sorted(metric.name for metric in scope.metrics))
        print(*[data.log_record.event_name for data in exporter.get_finished_logs()])
    """)
    names = (
        "runguard.budget.limit runguard.budget.reserved runguard.budget.used runguard.decisions runguard.guard.duration"
    )
    assert said == f"runguard True {names}\nrunguard.decision\n"


# ---- the page -------------------------------------------------------------------------------------------------------


def logged() -> set[str]:
    """Every event name that is logged anywhere, from the texts of the log calls."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"^runguard\.([a-z_]+|%s): ", node.value))
    assert "%s" in found
    return (found - {"%s"}) | {"warn", "nudge", "block"}  # a stop is logged as its trip


def test_the_page_lists_every_log_event_and_no_other() -> None:
    section = (DOCS / "reference" / "logs.md").read_text(encoding="utf-8")
    listed = {
        name
        for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`runguard\.([a-z_]+)`", row)
    }
    assert logged() - listed == set(), "logged, and not on the page"
    assert listed - logged() == set(), "on the page, and never logged"


def test_the_page_names_every_instrument_and_attribute() -> None:
    page = (DOCS / "reference" / "telemetry.md").read_text(encoding="utf-8")
    names = {
        value for name, value in vars(telemetry).items() if name.isupper() and isinstance(value, str) and "." in value
    }
    assert len(names) > 15
    assert {name for name in names if f"`{name}`" not in page} == set()
