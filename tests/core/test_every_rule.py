"""What every rule guarantees."""

import pkgutil
import random
import sys
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from runguard.core import rules as detectors
from runguard.core.decision import Rungs
from runguard.core.events import (
    HandOff,
    ModelResult,
    Outcome,
)
from runguard.core.rules.agents import HandOffCycle, HandOffRounds, ReEntry
from runguard.core.rules.failures import EmptyAnswers, Stall
from runguard.core.rules.limits import Growth
from runguard.core.rules.repetition import Cycle, NoNewAnswers, Polling, Repetition, SameCall
from tests.kit.detectors import answer, failing, page, results
from tests.kit.driver import Driver


def test_every_detector_says_what_it_sees() -> None:
    found = 0
    for module in pkgutil.iter_modules(detectors.__path__):
        for name, kind in vars(import_module(f"{detectors.__name__}.{module.name}")).items():
            if isinstance(kind, type) and hasattr(kind, "observe") and name not in ("Rule", "Limit"):
                found += 1
                assert getattr(kind, "sees", None), name
    assert found >= 18


def weigh(root: Any) -> tuple[int, int]:
    """How many objects hang on ``root``, and their bytes; code and classes aside."""
    seen: dict[int, Any] = {}
    pending = [root]
    while pending:
        item = pending.pop()
        if (
            id(item) in seen
            or isinstance(item, type)
            or callable(item)
            or type(item).__module__ in ("builtins.module", "_thread", "threading")
        ):
            continue
        seen[id(item)] = item
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            pending += item
        pending += [
            getattr(item, name)
            for kind in type(item).__mro__
            for name in getattr(kind, "__slots__", ())
            if hasattr(item, name)
        ]
        if type(item).__module__.startswith("runguard") and hasattr(item, "__dict__"):
            pending += vars(item).values()
    return len(seen), sum(map(sys.getsizeof, seen.values()))


@pytest.mark.parametrize(
    ("detector", "event"),
    [
        pytest.param(HandOffCycle(Rungs(stop=9)), lambda n: HandOff("run", "", f"agent {n}", "b", 0.0), id="hand-offs"),
        pytest.param(
            HandOffRounds(Rungs(stop=9), 64),
            lambda n: HandOff("run", "", f"agent {n}", "b", 0.0),
            id="rounds of hand-offs",
        ),
        pytest.param(ReEntry(9), lambda n: HandOff("run", "", f"agent {n}", f"agent {n + 1}", 0.0), id="re-entries"),
        pytest.param(Growth(Rungs(stop=9)), lambda n: ModelResult("run", "", f"agent {n}", 0.0, 100), id="growth"),
        pytest.param(Stall(Rungs(stop=9)), lambda n: results(failing(f"failure {n}", tool=f"tool {n}")), id="stall"),
        pytest.param(
            EmptyAnswers(Rungs(stop=9)), lambda n: results(answer(tool=f"tool {n}", outcome=Outcome.EMPTY)), id="empty"
        ),
        pytest.param(
            Polling(Rungs(stop=9), lambda tool: True),
            lambda n: results(answer(f"call {n}", f"answer {n}")),
            id="polling",
        ),
        pytest.param(Cycle(Rungs(stop=9), 64), lambda n: results(answer(f"call {n}")), id="cycle"),
        pytest.param(Repetition(Rungs(stop=9)), lambda n: results(answer(f"call {n}")), id="repetition"),
        pytest.param(SameCall(Rungs(stop=9)), lambda n: results(answer(f"call {n}")), id="same call"),
        pytest.param(SameCall(Rungs(stop=9)), lambda n: results(answer("call", page(n))), id="pages"),
        pytest.param(NoNewAnswers(Rungs(stop=9)), lambda n: results(answer(f"call {n}"), batch=str(n)), id="no news"),
        pytest.param(
            NoNewAnswers(Rungs(stop=9)), lambda n: ModelResult("run", "", "agent", 0.0, text_id=n + 1), id="words"
        ),
    ],
)
def test_the_state_of_a_detector_is_bounded(detector: Any, event: Callable[..., Any]) -> None:
    for n in range(2_000):
        detector.observe(event(n))
    assert weigh(detector)[0] < 1_500


def test_the_state_of_a_run_is_bounded(drive: type[Driver]) -> None:
    d = drive(
        mode="shadow",  # so that it goes on whatever is found
        max_tool_calls=None,
        rules={"cycle": {"stop": 3}},
        tools={"poll_*": {"polling": True}, "many_*": {"max_calls": 10}},
    )
    rng = random.Random(7)
    weights = []
    for _ in range(2):
        for n in range(4_000):  # four events each: 32,000 in all, and what is kept is full after half of them
            tool = rng.choice(["same", "read", f"poll_{n % 500}", f"many_{n % 3}", f"made_up_{rng.random()}"])
            says = rng.choice(
                [
                    "same",
                    f"fact {rng.random()}",
                    "Error: boom",
                    f"Error: kind {'x' * (n % 100)}",
                    [],
                    "x" * (n % 50) ** 2,
                ]
            )
            d.tool(tool, {"n": rng.choice([0, 1, rng.random()])}, says)
            d.model_result(rng.randint(1, 10_000), agent=f"agent {rng.choice([0, rng.random()])}")
            d.hand_off(f"agent {rng.choice([0, rng.random()])}", "b")
        weights.append(weigh(d.guard.runs["run"]))
    objects, size = zip(*weights, strict=True)
    assert objects[1] < 20_000
    assert objects[1] < 1.1 * objects[0]
    assert size[1] < 3_000_000


def test_a_loop_that_never_ends_keeps_the_state_bounded_in_shadow_mode(drive: type[Driver]) -> None:
    d = drive(mode="shadow", max_tool_calls=None, rules={"no_news": False, "same_call": False, "empty": False})
    weights = []
    for start in (0, 600):
        for n in range(start, start + 600):  # every call is made until it would have been stopped, then the next one
            for _ in range(9):
                d.tool(args={"n": n})
        weights.append(weigh(d.guard.runs["run"])[0])
    assert weights[1] < 1.1 * weights[0]
