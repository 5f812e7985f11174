"""The detection benchmark: its figures, and what it tells of runs made here."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from detection import main, recorded, settings
from detection_curve import draw
from detection_figures import OWN, Judged, lines
from detection_page import FIGURES, NOTES, PAGE, updated
from detection_report import NOT_READ
from made_up import HEALTHY, LOOPS
from replays import Verdict, by_rival, by_runguard
from rivals import RIVALS
from runguard.policy import Policy
from runguard.replay.player import Judge
from shapes import Shape, turn, user, work
from tests.kit.examples import each_row

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


# ---- The figures on the page about detection are those of the benchmark


figures = json.loads(FIGURES.read_text(encoding="utf-8"))
page, notes = PAGE.read_text(encoding="utf-8"), NOTES.read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_made_from_the_stored_figures() -> None:
    assert updated(page, figures) == page
    assert updated(notes, figures) == notes
    assert (page.count("<!-- figures: "), notes.count("<!-- figures: ")) == (1, 2)
    assert len(page.splitlines()) <= 55


def test_changed_figures_change_the_page() -> None:
    changed = json.loads(FIGURES.read_text(encoding="utf-8"))
    changed["groups"]["all runs"][OWN]["saved"][0] += 1
    assert updated(page, changed) != page
    assert updated(notes, changed) != notes


@pytest.mark.parametrize(("kind", "shapes"), [("loops", LOOPS), ("look-alikes", HEALTHY)])
def test_the_stored_figures_of_the_made_up_runs_are_todays(kind: str, shapes: dict[str, object]) -> None:
    letters = "".join(
        by_runguard(Judge(Policy.validated({"tools": shape.tools}, "")), shape.run()).letter
        for shape in (LOOPS if kind == "loops" else HEALTHY).values()
    )
    assert figures["made_up"][kind][OWN] == letters
    assert len(letters) == len(shapes)


def test_there_are_as_many_made_up_runs_as_promised() -> None:
    assert len(LOOPS) >= 110
    assert len(HEALTHY) >= 170


# ---- The promise of the defaults, on made-up runs: healthy work goes on untouched by anything but words, loops
# are ended


PROMISED = {
    "polling with progress",
    "polling without visible progress",
    "polling beyond, declared",
    "paging",
    "batches",
    "edit-test-edit",
    "fan-out of equal calls",
    "lookup sweeps",
    "constant ok",
    "todo updates",
    "re-reads after compaction",
    "flaky-test re-runs",
    "retry with back-off",
}
# The first cannot be told from a lookup sweep, the others not from a batch or from work between tests.
ONLY_TOLD = {
    # What a model was asked is in no recording, so equal words may answer new questions. Live they are stopped.
    "same sentence without a call",
    "two agents with the same phrases",
    "rephrased search finds nothing",
    "two calls in turn with a counter in their arguments",
    "one long answer whatever is asked",
    "undeclared arguments around one question",
    "same long test run with other reads between",
    "plans rewritten without action",
    "one file written again with another line",
    "one query with another condition each time",
    "busy service with a fifth of good answers",
    "edits that change nothing",
    "parser that repeats its question while the search brings news",
}


def verdict(shape: Shape) -> Verdict:
    return by_runguard(Judge(Policy.validated({"tools": shape.tools}, "")), shape.run())


@each_row("shape", HEALTHY.values())
def test_a_look_alike_is_neither_stopped_nor_refused_a_call(shape: Shape) -> None:
    found = verdict(shape)
    assert found.letter in ".n", found.story


@each_row("shape", LOOPS.values())
def test_a_loop_is_ended(shape: Shape) -> None:
    found = verdict(shape)
    expected = "n" if shape.name in ONLY_TOLD else "S"
    assert found.letter == expected, found.story


def test_every_promised_look_alike_is_there() -> None:
    assert {shape.kind for shape in HEALTHY.values()} >= PROMISED


@pytest.mark.parametrize("name", ["fifty unchanged polls in eight minutes", "forty scrolls with a bare ack"])
def test_what_only_a_declaration_holds_is_stopped_without_it(name: str) -> None:
    shape = HEALTHY[name]
    assert verdict(Shape(shape.name, shape.kind, shape.steps)).letter == "S"


# ---- Every rival acts where its product says it does, and one step earlier it does not


Steps = Iterator[dict[str, Any]]
CALL = ("look", {"at": "it"}, "seen")


def equal(times: int, *, answers: bool = True, text: str = "") -> Steps:
    """The same call; with ``answers`` the same answer too, else a new one each time."""
    for n in range(times):
        yield from turn(("look", {"at": "it"}, "seen" if answers else f"seen {n}"), text=text)


def raised(times: int) -> Steps:
    for n in range(times):
        yield from turn(("look", {"at": n}, "broken"), raised=True)


def in_turn(rounds: int, length: int = 2) -> Steps:
    for n in range(rounds * length):
        yield from turn(("look", {"at": n % length}, f"seen {n % length}"))


def said(*words: str) -> Steps:
    for text in words:
        yield from turn(text=text)


def letter(name: str, steps: Steps) -> str:
    return by_rival(RIVALS[name](), {"steps": list(steps)}).letter


# rival, what makes it act, what it does, and the same one step short of it
CASES: list[tuple[str, Callable[[], Steps], str, Callable[[], Steps]]] = [
    ("Gemini CLI", lambda: equal(5), "n", lambda: equal(4)),
    ("Gemini CLI", lambda: equal(6), "S", lambda: equal(5)),
    ("Gemini CLI", lambda: in_turn(5, 5), "n", lambda: in_turn(4, 5)),
    (
        "Gemini CLI",
        lambda: said("I am still working on the very same thing as before. " * 20),
        "n",
        lambda: said("I am still working on this. " * 5),
    ),
    ("Gemini CLI before 2026-07", lambda: equal(6), "S", lambda: in_turn(9)),
    (
        "Gemini CLI, patterns repaired",
        lambda: equal(6),
        "S",
        lambda: said("- the same item in a list that goes on and on\n" * 20),
    ),
    ("OpenHands SDK", lambda: equal(4), "S", lambda: equal(4, answers=False)),
    ("OpenHands SDK", lambda: in_turn(3), "S", lambda: in_turn(2)),
    ("OpenHands SDK", lambda: said("a", "b", "c", ""), "S", lambda: said("a", "b", "")),
    ("OpenHands SDK, thoughts aside", lambda: equal(4, text="hm"), "S", lambda: equal(3)),
    ("OpenHands V0, headless", lambda: equal(4), "S", lambda: equal(3)),
    ("OpenHands V0, headless", lambda: said("a", "a", "a", "b"), "S", lambda: said("a", "b", "c", "d")),
    ("OpenHands V0, interactive", lambda: equal(4), "S", lambda: iter([*equal(3), user("go on"), *equal(3)])),
    ("goose, limit 3", lambda: equal(4), "b", lambda: equal(3)),
    ("goose, limit 5", lambda: equal(6, answers=False), "b", lambda: equal(5)),
    ("Roo Code", lambda: raised(4), "S", lambda: raised(3)),
    ("Roo Code", lambda: said("a", "b", "c", "d", "e"), "S", lambda: said("a", "b", "c", "d")),
    ("Roo Code, repetition only", lambda: equal(4), "S", lambda: iter([*equal(3), *raised(9)])),
    ("opencode, as shipped", lambda: turn(CALL, CALL, CALL), "S", lambda: equal(9)),
    ("opencode, as documented", lambda: equal(3), "S", lambda: iter([*equal(2), user("go on"), *equal(2)])),
    ("Cline", lambda: equal(3), "n", lambda: equal(2)),
    ("Cline", lambda: equal(5, answers=False), "S", lambda: raised(6)),
    ("Cline CLI", lambda: iter([*raised(3), *work(1)]), "S", lambda: raised(3)),
    ("Cline, change 12543", lambda: equal(20, answers=False), "S", lambda: equal(2)),
    ("Crush", lambda: iter([*equal(10), *said("")]), "S", lambda: iter([*equal(9), *said("")])),
    ("Crush", lambda: iter([*work(4), *equal(6), *said("")]), "S", lambda: iter([*work(5), *equal(5), *said("")])),
    ("OpenClaw, enabled", lambda: equal(11), "n", lambda: equal(10)),
    ("OpenClaw, enabled", lambda: in_turn(10), "b", lambda: in_turn(4)),
    ("OpenClaw, enabled", lambda: equal(31), "S", lambda: in_turn(4)),
    ("Qwen Code", lambda: equal(5), "S", lambda: in_turn(40)),
    ("Qwen Code", lambda: in_turn(51), "S", lambda: in_turn(50)),
    ("Qwen Code, heuristics on", lambda: work(8), "S", lambda: work(7)),
    ("stella", lambda: equal(3), "n", lambda: equal(9, answers=False)),
    ("stella", lambda: equal(4), "S", lambda: equal(2)),
    ("crewAI", lambda: equal(2), "b", lambda: in_turn(3)),
    ("crewAI", lambda: work(26), "S", lambda: work(25)),
    ("crewAI, no step cap", lambda: equal(2), "b", lambda: work(99)),
    ("browser-use", lambda: equal(5), "n", lambda: equal(4)),
    (
        "browser-use, actions only",
        lambda: in_turn(5),
        "n",
        lambda: (step for n in range(9) for step in turn(("look", {"at": n}, "seen"))),
    ),
]


@each_row(
    ("name", "acts", "does", "short_of_it"),
    CASES,
)
def test_a_rival_acts_at_its_threshold_and_not_before(
    name: str, acts: Callable[[], Steps], does: str, short_of_it: Callable[[], Steps]
) -> None:
    assert letter(name, acts()) == does
    assert letter(name, short_of_it()) not in ("S", "b", does)


@pytest.mark.parametrize("name", ["goose, as shipped", "OpenClaw, as shipped"])
def test_a_rival_that_ships_without_its_guard_does_nothing(name: str) -> None:
    assert letter(name, equal(99)) == "."


def test_no_rival_minds_work_that_brings_news() -> None:
    seven = {name: letter(name, work(7)) for name in RIVALS}
    assert set(seven.values()) == {"."}, seven
