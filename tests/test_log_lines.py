"""No line of the log can be forged: names and texts of others are written out, whichever module logs them."""

import ast
import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runguard
from runguard import Budget, RunStoppedError, Threshold, guard, guard_async
from runguard.background import OneLine

HOSTILE = "eve\n2026-01-01 CRITICAL root: all is well\r\x1b[2J\x1b]0;owned\x07\x85\u2028\u202e\x9b31m"
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SOURCES = sorted(Path(runguard.__file__).parent.rglob("*.py"))


def assert_clean(records: list[logging.LogRecord]) -> None:
    for record in records:
        assert not CONTROLS.search(record.getMessage()), repr(record.getMessage())
        for line in logging.Formatter().format(record).split("\n"):
            assert not CONTROLS.search(line), repr(line)
            assert not line.startswith("2026-01-01"), "a line of its own"


def logged(log: Callable[..., None], *args: Any, **how: Any) -> str:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logger = logging.getLogger("runguard")
    logger.addHandler(handler)
    try:
        log(*args, **how)
    finally:
        logger.removeHandler(handler)
    assert_clean(records)
    return logging.Formatter().format(records[0])


@given(text=st.text(alphabet=st.characters(codec=None, exclude_categories=())))
def test_whatever_is_logged_stays_on_its_line(text: str) -> None:
    log = logging.getLogger("runguard")
    for value in (text, ValueError(text), [text], {text: text}, Path(text.replace("\0", ""))):
        logged(log.error, "runguard.x: %s and %r, %.80r", value, value, value)
    logged(log.error, "runguard.x: %(name)s", {"name": text})
    try:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise KeyError(text) from error
    except KeyError:
        line = logged(log.exception, "runguard.x: %s", text)
    assert "ValueError" in line
    assert "direct cause" in line


def test_numbers_and_plain_names_stay_as_they_are() -> None:
    assert (
        logged(logging.getLogger("runguard").error, "runguard.x: %d of %.1f, %s, %s", 5, 2.5, "ann@example.com", None)
        == "runguard.x: 5 of 2.5, ann@example.com, None"
    )


def test_a_text_that_cannot_be_asked_for_breaks_no_log_line() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "a Broken without a text" in logged(logging.getLogger("runguard").error, "runguard.x: %r", Broken())


def test_every_module_logs_through_the_one_logger_with_a_fixed_text() -> None:
    """What is foreign comes as an argument: the filter sees arguments, and cannot tell what is foreign in a text that
    was put together.
    """
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, node.func.value
            if name == "getLogger":
                assert [ast.literal_eval(argument) for argument in node.args] == ["runguard"], path
            if (
                isinstance(owner, ast.Name)
                and owner.id == "_log"
                and name in ("debug", "info", "warning", "error", "exception", "critical", "log")
            ):
                text = node.args[1 if name == "log" else 0]
                is_fixed = isinstance(text, ast.Constant) or (isinstance(text, ast.Name) and text.id == "message")
                assert is_fixed, f"{path.name}:{node.lineno}: give foreign text as an argument"


def test_the_filter_is_there_once() -> None:
    assert len([one for one in logging.getLogger("runguard").filters if isinstance(one, OneLine)]) == 1


@pytest.mark.parametrize(
    "code",
    [
        "runguard.guard(print)",
        "runguard.BudgetMonitor(5)",
        "from runguard.alerts import Alerts",
        "from runguard.ledger import memory",
        "from runguard.engine import tools",
    ],
)
def test_the_filter_is_there_before_anything_can_be_logged(code: str) -> None:
    asks = (
        "import logging, runguard; assert not logging.getLogger('runguard').filters\n"
        + code
        + "\nassert logging.getLogger('runguard').filters"
    )
    subprocess.run([sys.executable, "-c", asks], check=True, timeout=50)


async def test_hostile_names_through_many_rules(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "runguard")

    def broken(scope: Any) -> float:
        raise KeyError(HOSTILE)

    def fails(*args: Any) -> Any:
        raise ConnectionError(HOSTILE)

    thresholds = [Threshold(0.1), Threshold(0.2, action="nudge"), Threshold(0.9, callback=fails)]
    with runguard.run(user=HOSTILE, session=HOSTILE, app=HOSTILE, labels={"team": HOSTILE}):
        paid = guard(
            lambda *args: {"usd": 0.3, "sig": HOSTILE, "model": HOSTILE},
            name=HOSTILE,
            budget=[
                Budget(usd=1, per="user", thresholds=thresholds),
                Budget(calls=3, per="session"),
                Budget(usd=9, per="label:team"),
            ],
            loop={"repeats": 2},
            tokens=fails,
            on_trip=fails,
        )
        for call in (
            paid,
            guard(dict, name=HOSTILE, budget=Budget(usd=broken, per="user")),
            guard(lambda: {"model": HOSTILE}, name=HOSTILE, budget={"max_usd": 1}),
            guard(dict, name=HOSTILE, budget={"max_usd": 1}, cost=lambda result: HOSTILE),
            guard(lambda: {"sig": 1}, name=HOSTILE, loop=True, signature=fails),
            guard(fails, name=HOSTILE, breaker={"failures": 1}),
            guard(dict, name=HOSTILE, context={"max_context_tokens": 5}, tokens=lambda: 50),
        ):
            for _ in range(5):
                try:
                    call()
                except (RunStoppedError, ConnectionError):
                    continue
            call.flush(5)
        stopped = guard_async(asyncio.sleep, name=HOSTILE, budget={"max_calls": 1})
        stopped.stop("all", actor=HOSTILE, reason=HOSTILE)
        with pytest.raises(RunStoppedError):
            await stopped(0)
    codes = {record.getMessage().split(":")[0] for record in caplog.records}
    assert {
        "runguard.trip",
        "runguard.warn",
        "runguard.budget_function_failed",
        "runguard.callback_failed",
        "runguard.signature_failed",
    } <= codes
    assert "eve\\n2026" in caplog.text or "eve\\x0a2026" in caplog.text
    assert_clean(caplog.records)
