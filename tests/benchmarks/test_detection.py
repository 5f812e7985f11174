"""The detection benchmark: its figures, and what it tells of runs made here."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from detection import main, recorded, settings
from detection_curve import draw
from detection_figures import OWN, Judged, lines
from detection_report import NOT_READ
from made_up import HEALTHY, LOOPS
from replays import Verdict
from shapes import work

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "detection.py"


Told = Callable[..., str]


@pytest.fixture
def detection(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    def tell(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--workers", "1", *options])
        main()
        return capsys.readouterr().out

    return tell


def run(name: str, steps: Any, **facts: Any) -> dict[str, Any]:
    return {"id": name, "source": "made up", "capped": False, "steps": list(steps), **facts}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few of the made-up runs, for one test starts the script, which tries them all."""
    monkeypatch.setattr("detection.LOOPS", dict(list(LOOPS.items())[:3]))
    monkeypatch.setattr("detection.HEALTHY", dict(list(HEALTHY.items())[:3]))


@pytest.fixture
def folder(tmp_path: Path, few: None) -> Path:
    """Recorded runs."""
    loop = LOOPS["same call same answer"].steps
    runs = [run("good", work(20), success=True), run("stuck", loop(), success=False), run("odd", loop(), success=True)]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs), encoding="utf-8")
    return tmp_path


def test_without_a_folder_the_made_up_runs_are_told(few: None, detection: Told) -> None:
    told = json.loads(detection("--json"))
    assert set(told) == {"made_up", "soon"}
    assert told["soon"]["word"] <= told["soon"]["stop"]
    assert told["made_up"]["loops"]["same call same answer"]["Gemini CLI"] == "S"


def test_all_made_up_runs_are_told_recorded_ones_are_counted_and_an_unread_one_is_named(
    folder: Path, detection: Told
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "--json", "--workers", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["made_up"]["loops"]["same call same answer"]["Gemini CLI"] == "S"
    assert set(told["made_up"]["look-alikes"]["paging by cursor"].values()) >= {".", "S"}
    assert {kind: set(shapes) for kind, shapes in told["made_up"].items()} == {
        "loops": {shape.name for shape in LOOPS.values()},
        "look-alikes": {shape.name for shape in HEALTHY.values()},
    }
    own = told["groups"]["all runs"][OWN]
    assert own["rates"]["ok stop"] == {"hits": 1, "of": 2, "interval": pytest.approx([0.095, 0.905], abs=0.001)}
    assert own["rates"]["failed stop"]["hits"] == 1
    assert 0 < own["shares"]["stop"]["value"] < own["shares"]["hard"]["value"] < 1
    assert [one["id"] for one in told["successful_runs_touched"]] == ["odd"]
    page = detection(str(folder), "--markdown")
    assert (
        "- odd, 12 turns: nudge at turn 4: repetition, 4 identical calls and answers of get_user; block at "
        "turn 8: repetition, 8 identical" in page
    )
    assert NOT_READ in page
    assert "| detector | ok stop | ok hard |" in page


def test_a_dropped_rule_shows_what_it_was_good_for(folder: Path, detection: Told) -> None:
    told = json.loads(detection(str(folder), "--json", "--without", "repetition"))["groups"]["all runs"]
    assert told[OWN]["rates"]["failed stop"]["hits"] == 1
    later = told[f"{OWN} without repetition"]["shares"]["hard"]["value"]
    assert later < told[OWN]["shares"]["hard"]["value"]


def test_the_curve_is_drawn(folder: Path) -> None:
    plot = ElementTree.fromstring(draw(lines(recorded(folder, settings([], curve=True), workers=1), draws=1)))
    hints = [title.text or "" for title in plot.iter("{http://www.w3.org/2000/svg}title")]
    assert any(hint.startswith(f"{OWN}, repetition 3/4/5: 1 successful runs touched") for hint in hints)
    assert any(hint.startswith("Gemini CLI: 1 successful runs touched") for hint in hints)


def test_a_folder_without_runs_is_told_in_one_line(tmp_path: Path, detection: Told) -> None:
    with pytest.raises(SystemExit, match=r"no \*.jsonl or \*.jsonl.gz with runs in it"):
        detection(str(tmp_path))


def judged(number: int, own: int | None, rival: int | None) -> Judged:
    verdicts = {OWN: Verdict(hard=own, stop=own), "rival": Verdict(hard=rival, stop=rival)}
    return Judged(str(number), "made up", False, False, [100] * 10, verdicts)


def test_shares_are_of_all_failed_tokens_and_differences_are_paired() -> None:
    found = lines([judged(n, 5, 7) for n in range(4)] + [judged(n, None, None) for n in range(4, 8)], draws=200)
    own, rival = found[OWN].shares["hard"], found["rival"].shares["hard"]
    assert (own.value, rival.value) == (0.25, 0.15)
    assert own.interval[0] < 0.25 < own.interval[1]
    # in every sample RunGuard saves at least as much, however wide both intervals are
    assert rival.own_minus_this[0] >= 0
    assert own.own_minus_this == (0, 0)
