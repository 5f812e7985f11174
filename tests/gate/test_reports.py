"""The files that a gate writes for a CI server and a pull request."""

from pathlib import Path
from xml.etree import ElementTree

from tests.kit.commands import runguard
from tests.kit.recordings import looping, working, write


def test_junit_counts_checks_and_failed_runs(tmp_path: Path) -> None:
    Path("runguard.toml").write_text("max_model_calls = 5\n")
    good = write(tmp_path / "good.jsonl", working("short", 3), working("long", 8))
    loops = write(tmp_path / "loops.jsonl", looping("stuck", 20))
    ran = runguard("gate", good, "--loops", loops, "--junit", tmp_path / "gate.xml")
    assert ran.exit_code == 1
    (suite,) = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert suite.attrib == {"name": "runguard gate", "tests": "4", "failures": "2", "errors": "0", "skipped": "0"}
    failed = {case.attrib["name"] for case in suite if case.find("failure") is not None}
    assert failed == {"successful runs", "long"}


def test_names_cannot_break_the_files(tmp_path: Path) -> None:
    Path("runguard.toml").write_text("max_model_calls = 5\n")
    odd = "<x>&\"'|`[a](b)*\x1b[31m\x00\udc80\n| new | row |"
    good = write(tmp_path / "good.jsonl", working(odd, 8))
    ran = runguard("gate", good, "--junit", tmp_path / "gate.xml", "--markdown", tmp_path / "gate.md")
    assert ran.exit_code == 1
    assert "\x1b" not in ran.output
    (suite,) = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert len(suite) == 3
    page = (tmp_path / "gate.md").read_text()
    assert "\x1b" not in page
    assert len([line for line in page.splitlines() if line.startswith("|")]) == 4
    assert "<x>" not in page.replace("\\<x\\>", "")


def test_markdown_says_what_to_read(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", working("fine"))
    assert runguard("gate", good, "--markdown", tmp_path / "gate.md").exit_code == 0
    page = (tmp_path / "gate.md").read_text()
    assert page.startswith("### runguard gate: passed\n")
    assert "| successful runs | passed | the policy leaves the only successful run alone |" in page


def test_a_report_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", working("fine"))
    ran = runguard("gate", good, "--junit", tmp_path / "nowhere" / "gate.xml")
    assert ran.exit_code == 2
    assert "does not exist" in ran.stderr
