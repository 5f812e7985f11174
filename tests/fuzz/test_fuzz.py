"""The short form of the fuzzers, and every input that has ever failed. ``make fuzz`` is the long form."""

import hashlib
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from runguard.core.identity import answer_text, call_fingerprint
from runguard.core.outcomes import classify
from tests.faults.leftovers import look, traced

from . import play
from .targets import TARGETS, Target
from .values import build, shrink

ROOT = Path(__file__).parents[2]
INPUTS = {"fingerprints": 120, "outcomes": 300, "readers": 150, "sources": 30}
TRACED = 12
KEPT = sorted(play.FOUND.glob("*/*.json"))


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_guarantee(name: str) -> None:
    assert play.play(name, seed=int(os.environ.get("SEED", "0")), seconds=600, most=INPUTS[name]) == INPUTS[name]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_failed_once_does_not_fail_again(path: Path) -> None:
    TARGETS[path.parent.name].check(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_takes_a_bounded_number_of_steps(name: str) -> None:
    target = TARGETS[name]
    for form in islice(play.inputs(target, 1), TRACED):
        assert play.steps_of(target.check, form) < target.most_steps, form


@pytest.mark.parametrize("name", TARGETS)
async def test_nothing_is_kept_of_an_input(name: str) -> None:
    target = TARGETS[name]
    forms = list(islice(play.inputs(target, 2), 6))
    for form in forms:
        target.check(form)
    with traced():
        for form in forms:
            target.check(form)
        before = look()
        for form in forms:
            target.check(form)
        after = look()
    assert {kind: more for kind, more in after.more_than(before).items() if more > 20} == {}
    assert after.memory - before.memory < 65_536
    assert after.threads <= before.threads  # one that another test started may end here
    assert after.descriptors <= before.descriptors


def answers() -> str:
    """One digest of what fingerprints and outcomes say about the same inputs."""
    total = hashlib.sha256()
    for form in islice(play.inputs(TARGETS["outcomes"], 3), 60):
        value = build(form)
        total.update(call_fingerprint("tool", {"x": value}) + repr(classify(value)).encode("utf-8", "surrogatepass"))
        total.update(answer_text(value).encode("utf-8", "surrogatepass"))
    return total.hexdigest()


def test_every_process_gives_the_same_answers() -> None:
    """Sets have another order and texts another hash in each process."""
    command = [sys.executable, "-c", "from tests.fuzz.test_fuzz import answers; print(answers())"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == answers()


# ---- the fuzzer itself ----------------------------------------------------------------------------------------------


def test_a_planted_defect_is_found_made_small_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(form: Any) -> None:
        if "error" in json.dumps(form):
            raise RuntimeError("planted")

    planted = Target(check, ({"a": [1, 2, {"status": "fine"}]},), ("error", "b"), 1)
    monkeypatch.setitem(TARGETS, "planted", planted)
    monkeypatch.setattr(play, "FOUND", tmp_path)
    with pytest.raises(RuntimeError, match="planted"):
        play.play("planted", seed=0, seconds=600, most=1_000)
    (kept,) = (tmp_path / "planted").iterdir()
    text = kept.read_text(encoding="utf-8")
    assert len(text) < 40
    assert "error" in text
    assert text.strip() in capsys.readouterr().out


def test_an_endless_walk_is_found_by_its_steps() -> None:
    assert play.steps_of(lambda form: None, {}) == 0
    assert play.steps_of(TARGETS["outcomes"].check, {"error": "x"}) > 20


def test_the_same_seed_gives_the_same_inputs() -> None:
    target = TARGETS["sources"]
    assert list(islice(play.inputs(target, 7), 50)) == list(islice(play.inputs(target, 7), 50))


def test_a_failing_form_is_made_smaller() -> None:
    assert shrink({"a": [1, {"b": 2, "bad": 3}], "c": 4}, lambda form: "bad" in json.dumps(form)) == {"bad": 3}
