"""The demo tells the truth: its numbers are those of real runs, and its exit code depends on them."""

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import runguard.cli.demo
from runguard.cli import demo as show
from runguard.cli import stories as play
from runguard.cli.main import main
from runguard.cli.stories import LOOK_ALIKES, STORIES, DemoStory
from runguard.core.money import to_usd

BY_KEY = {story.key: story for story in (*STORIES, *LOOK_ALIKES)}


@pytest.mark.timeout(180)
def test_the_whole_demo_as_a_user_calls_it() -> None:
    """Played once: it is by far the longest thing here."""
    ran = CliRunner().invoke(main, ["demo", "--json"])
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == ""
    result = json.loads(ran.stdout)
    everything_went_well(result)
    the_stalled_loop_is_stopped_after_a_few_failures(result)
    the_hand_off_cycle_runs_up_to_the_limit_of_adk_or_is_stopped(result)
    the_growing_history_is_warned_of_and_stopped_for_bringing_no_news(result)
    the_over_spawn_is_refused_before_the_first_branch_is_paid(result)
    the_look_alikes_are_as_long_as_they_claim(result)
    the_front_page_shows_these_figures(result)


def the_front_page_shows_these_figures(result: dict[str, Any]) -> None:
    """On older releases ADK's own instructions have other lengths: there, only the calls are as shown."""
    kept = slice(None) if result["google_adk"].startswith("2.13.") else slice(2)
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([\d,]+) → ([\d,]+) \| ([\d,]+) → ([\d,]+) \|", text, re.MULTILINE)
    shown = [tuple(int(figure.replace(",", "")) for figure in row) for row in rows]
    assert [row[kept] for row in shown] == [
        tuple(entry[how][what] for what in ("model_calls", "tokens") for how in ("without", "with"))[kept]
        for entry in result["stories"]
    ]


def told(result: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {entry["story"]: entry for entry in result[kind]}


def everything_went_well(result: dict[str, Any]) -> None:
    assert result["ok"] is True
    assert [entry["story"] for entry in result["stories"]] == [story.key for story in STORIES]
    assert [entry["story"] for entry in result["look_alikes"]] == [story.key for story in LOOK_ALIKES]
    for entry in result["stories"]:
        assert entry["stopped"], entry
        assert entry["with"]["error"] is None
        assert entry["calls_answered"]
        assert entry["with"]["tokens"] < entry["without"]["tokens"] / 5
        assert entry["saved_percent"] == pytest.approx(
            100 * (1 - entry["with"]["tokens"] / entry["without"]["tokens"]), abs=0.06
        )
        assert f"stopped by {entry['stopped_by']}" in entry["message"]
    for entry in result["look_alikes"]:
        assert entry["untouched"], entry
        assert entry["interventions"] == 0
        assert entry["same_events"]
        assert entry["stopped_by"] is None
        for number in ("model_calls", "tool_calls", "tokens", "events", "error"):
            assert entry["with"][number] == entry["without"][number], (entry["story"], number)


def the_stalled_loop_is_stopped_after_a_few_failures(result: dict[str, Any]) -> None:
    story = told(result, "stories")["stalled_loop"]
    assert (story["without"]["model_calls"], story["without"]["tool_calls"]) == (256, 120)
    assert story["stopped_by"] == "stall"
    assert story["with"]["model_calls"] <= 12
    assert story["with"]["tool_calls"] <= 5
    assert [(d["action"], d["rule"]) for d in story["decisions"]] == [
        ("nudge", "stall"),
        ("block", "stall"),
        ("stop", "stall"),
    ]


def the_hand_off_cycle_runs_up_to_the_limit_of_adk_or_is_stopped(result: dict[str, Any]) -> None:
    story = told(result, "stories")["handoff_cycle"]
    assert story["without"]["model_calls"] == 500
    assert story["without"]["error"] == "LlmCallsLimitExceededError"
    assert story["stopped_by"] == "handoff"
    assert story["with"]["model_calls"] <= 12


def the_growing_history_is_warned_of_and_stopped_for_bringing_no_news(result: dict[str, Any]) -> None:
    story = told(result, "stories")["growing_history"]
    assert (story["without"]["model_calls"], story["without"]["tool_calls"]) == (60, 59)
    assert story["without"]["largest_prompt_tokens"] > 100 * story["without"]["first_prompt_tokens"]
    assert story["stopped_by"] == "no_news"
    assert story["with"]["model_calls"] == 13
    assert "growth" in [d["rule"] for d in story["decisions"] if d["action"] == "warn"]


def the_over_spawn_is_refused_before_the_first_branch_is_paid(result: dict[str, Any]) -> None:
    story = told(result, "stories")["over_spawn"]
    assert story["without"]["model_calls"] == 402
    assert story["without"]["max_in_flight"] == 400
    assert story["stopped_by"] == "fan_out"
    assert story["with"]["model_calls"] == 2


def the_look_alikes_are_as_long_as_they_claim(result: dict[str, Any]) -> None:
    healthy = told(result, "look_alikes")
    assert healthy["polling"]["with"]["tool_calls"] == 12
    assert healthy["paging"]["with"]["tool_calls"] == 15
    assert healthy["batch"]["with"]["tool_calls"] == 30
    assert healthy["edit_test_edit"]["with"]["tool_calls"] == 16
    assert healthy["return_to_parent"]["with"]["model_calls"] == 4
    assert healthy["fan_out"]["with"]["model_calls"] == 30


# ---- one story at a time --------------------------------------------------------------------------------------------


async def test_the_policy_of_the_place_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runguard.toml").write_text('mode = "off"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNGUARD_MODE", "off")
    monkeypatch.delenv("RUNGUARD_POLICY", raising=False)
    pair = await play.play_pair(play.Pair(BY_KEY["growing_history"]))
    assert pair.stopped
    assert os.environ["RUNGUARD_MODE"] == "off"
    assert "RUNGUARD_POLICY" not in os.environ


async def test_tokens_are_what_the_requests_weigh() -> None:
    """Four sources more in the history, four answers more in the prompt."""
    pair = await play.play_pair(play.Pair(BY_KEY["growing_history"]))
    (model,) = pair.guarded.counter.models
    weights = [
        len("".join(content.model_dump_json(exclude_none=True) for content in request.contents))
        for request in model.requests
    ]
    assert weights == sorted(weights)
    assert pair.guarded.counter.largest_prompt == pytest.approx(weights[-1] / 4, rel=0.1)
    assert pair.guarded.trip is not None
    assert pair.guarded.trip.tokens == pair.guarded.counter.tokens
    assert pair.guarded.trip.model_calls == pair.guarded.counter.model_calls


async def test_the_cost_is_the_list_price_and_the_guards_own_bill_agrees() -> None:
    pair = await play.play_pair(play.Pair(BY_KEY["growing_history"]))
    assert 0 < pair.guarded.counter.nano_usd < pair.without.counter.nano_usd
    assert pair.guarded.billed == to_usd(pair.guarded.counter.nano_usd)
    assert pair.guarded.trip is not None
    assert pair.guarded.trip.spent_usd == pair.guarded.billed
    assert not pair.guarded.trip.estimated


# ---- on the screen --------------------------------------------------------------------------------------------------


def shown(monkeypatch: pytest.MonkeyPatch, runaways: list[str], healthy: list[str], *options: str) -> Result:
    def some(stories: list[str]) -> list[DemoStory]:
        return [BY_KEY[key] for key in stories]

    report = play.new_report(some(runaways), some(healthy))
    monkeypatch.setattr(play, "new_report", lambda: report)
    return CliRunner().invoke(main, ["demo", *options], env={"COLUMNS": "80"})


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = shown(monkeypatch, ["growing_history"], ["polling"])
    assert ran.exit_code == 0, ran.output
    assert "\x1b" not in ran.stdout
    assert ran.stderr == ""
    assert "Cost: what gemini-2.5-flash would have billed at list price.\n" in ran.stdout, (
        "in a pipe no sentence is folded"
    )
    assert re.search(r"^Calls are counted at the models .* at list price\.$", ran.stdout, re.MULTILINE)
    assert "growing history: 60 model calls without, 13 with; stopped by no_news" in ran.stdout
    assert re.search(
        r"^growing history +60 → +13 +[\d,]+ → +[\d,]+ +\$0\.\d{4} → \$0\.\d{4} +\d\d\.\d%$", ran.stdout, re.MULTILINE
    )
    assert re.search(r"^polling that moves +13 → +13 +12 → +12 +25 → +25 +0$", ran.stdout, re.MULTILINE)
    assert "stopped by no_news of tool 'read_source': 10 answers without news" in ran.stdout
    assert "By default growth alone only warns" in ran.stdout
    assert "1 of 1 runaways stopped, 1 of 1 healthy runs untouched" in ran.stdout


@pytest.mark.parametrize(
    ("runaways", "healthy"), [(["polling"], []), ([], ["growing_history"])], ids=["not stopped", "touched"]
)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_the_exit_code_is_one_when_the_guard_fails(
    monkeypatch: pytest.MonkeyPatch, runaways: list[str], healthy: list[str], options: list[str]
) -> None:
    ran = shown(monkeypatch, runaways, healthy, *options)
    assert ran.exit_code == 1
    if options:
        assert json.loads(ran.stdout)["ok"] is False
    else:
        assert f"0 of {len(runaways)} runaways stopped, 0 of {len(healthy)} healthy runs untouched" in ran.stdout


def test_the_tables_fit_a_terminal_at_every_moment() -> None:
    report = play.new_report()
    console = Console(width=80, force_terminal=True, color_system="standard", legacy_windows=False)

    def lines() -> list[str]:
        with console.capture() as capture:
            console.print(show.tables(report))
        return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()

    waiting = lines()
    report.runaways[0].started = True
    report.runaways[0].without.counter.prompt_tokens = 1_234_567
    report.runaways[0].guarded.counter.prompt_tokens = 123_456
    running = lines()
    report.runaways[0].without.done = report.runaways[0].guarded.done = True
    done = lines()
    assert any("1,234,567 → 123,456" in line for line in running)
    assert any(line.rstrip().endswith("90.0%") for line in done)
    assert len(waiting) == len(running) == len(done) <= 20
    assert max(len(line) for line in (*waiting, *running, *done)) <= 80
    assert not any("…" in line for line in done if "stalled" in line)


def test_a_narrow_terminal_gets_a_line_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    report = play.new_report([BY_KEY["growing_history"]], [])
    monkeypatch.setattr(play, "new_report", lambda: report)
    shown = CliRunner().invoke(main, ["demo"], env={"COLUMNS": "40", "NO_COLOR": "1"}).stdout
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "runaway: growing history\n  model calls without → with: 60 →  13\n" in told
    assert re.search(r"^  saved: \d\d\.\d%$", told, re.MULTILINE)


def test_a_table_that_is_alive_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    report = play.new_report([BY_KEY["growing_history"]], [])
    monkeypatch.setattr(play, "new_report", lambda: report)
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        code = runguard.cli.demo.run()
    drawn = terminal.getvalue()
    assert code == 0
    assert "\x1b[1A" in drawn, "drawn over and over"
    assert drawn.endswith("\n")
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h"), "the cursor is given back"
    assert "1 of 1 runaways stopped" in drawn
