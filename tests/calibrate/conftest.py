"""Recordings with known answers, made here."""

import json
from pathlib import Path
from typing import Any

import pytest

from runguard.core.decision import Rungs
from runguard.policy.settings import RULES

from ..replay.conftest import looping, working  # noqa: TID252 - the tests are no package


@pytest.fixture(autouse=True)
def no_policy_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY", "RUNGUARD_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write(path: Path, *runs: Any) -> Path:
    path.write_text("".join((run if isinstance(run, str) else json.dumps(run)) + "\n" for run in runs))
    return path


def sized(name: str, prompt: int, calls: int = 1, **facts: Any) -> dict[str, Any]:
    """One run: so many model calls, each with that prompt and ten tokens of answer, one tool call and one second after
    the other.
    """
    run = working(name, calls, **facts)
    for step in run["steps"]:
        if step["kind"] == "model":
            step |= {"input_tokens": prompt, "output_tokens": 10}
    return run


def repeating(name: str, times: int, then: int = 2, **facts: Any) -> dict[str, Any]:
    """The same call and answer so many times, then work that costs something."""
    run, rest = looping(name, times, **facts), working(name, then)
    for number, step in enumerate(rest["steps"][1:]):
        step = {**step, "ts": 2_000 + number}
        if "call_id" in step:
            step["call_id"] = f"then-{step['call_id']}"
        if step["kind"] == "model":
            step["input_tokens"] = 50_000
        run["steps"].append(step)
    return run


def rungs_of(rule: str) -> Rungs:
    return RULES[rule][0]
