"""``runguard gate``: planted regressions fail the build, noise does not."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from math import inf
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest
from google.adk.agents import LlmAgent
from hypothesis import given
from hypothesis import strategies as st

from runguard import Policy
from runguard.adk import RunGuardPlugin
from runguard.gate import Baseline, assert_within_budget, gate
from runguard.gate.checks import BaselineError, Cost, Sums, change, interval, pairs_of
from runguard.replay import UnreadableError
from runguard.testing import Recording, ScriptedModel, call, run, text
from tests.kit.commands import runguard, told
from tests.kit.recordings import looping, sized, working, write

EARLY = "[rules]\nrepetition = { nudge = 3, block = 4, stop = 5 }\n"


def policy_file(text: str) -> None:
    Path("runguard.toml").write_text(text)


def noisy(path: Path, seed: int, times: float = 1.0, runs: int = 60) -> Path:
    """Runs of different sizes, some of which fail."""
    random = Random(seed)
    return write(
        path,
        *(
            sized(f"run-{seed}-{n}", int(2_000 * times * random.lognormvariate(0, 0.5)), success=random.random() < 0.8)
            for n in range(runs)
        ),
    )


def states(report: Any) -> dict[str, str]:
    checks = report["checks"] if isinstance(report, dict) else [check.to_dict() for check in report.checks]
    return {check["check"]: check["state"] for check in checks}


# ---- successful runs and loops --------------------------------------------------------------------------------------


def test_healthy_runs_and_caught_loops_pass(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", working("one"), working("two"), looping("failed", 3))
    loops = write(tmp_path / "loops.jsonl", looping("stuck", 20), looping("stuck-2", 20))
    ran = runguard("gate", good, "--loops", loops)
    assert ran.exit_code == 0, ran.output
    assert "passed  successful runs: the policy leaves all 2 successful runs alone" in ran.output
    assert "passed  loops: the policy stops all 2 loops" in ran.output


def test_a_tightened_limit_that_stops_a_good_run_fails(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", working("short", 3), working("long", 8))
    policy_file("max_model_calls = 5\n")
    found = told("gate", good, code=1)
    (check, _) = found["checks"]
    assert (check["state"], [finding["run"] for finding in check["findings"]]) == ("failed", ["long"])
    assert "would be stopped by model_calls" in check["findings"][0]["message"]


def test_a_refused_call_of_a_good_run_fails_too(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", looping("repeats-a-little", 4, success=True))
    assert told("gate", good)["ok"]
    policy_file(EARLY)
    found = told("gate", good, code=1)
    assert "would be refused by repetition" in found["checks"][0]["findings"][0]["message"]


def test_a_loosened_rule_that_misses_a_loop_fails(tmp_path: Path) -> None:
    good, loops = write(tmp_path / "good.jsonl", working()), write(tmp_path / "loops.jsonl", looping("stuck", 20))
    assert told("gate", good, "--loops", loops)["ok"]
    policy_file("[rules]\nrepetition = false\nno_news = false\nsame_call = false\nstall = false\n")
    found = told("gate", good, "--loops", loops, code=1)
    assert states(found)["loops"] == "failed"
    assert found["checks"][1]["findings"] == [
        {"run": "stuck", "source": "test", "message": "not stopped in 20 model calls"}
    ]


def test_a_policy_in_shadow_mode_stops_no_loop(tmp_path: Path) -> None:
    good, loops = write(tmp_path / "good.jsonl", working()), write(tmp_path / "loops.jsonl", looping("stuck", 20))
    policy_file('mode = "shadow"\n')
    found = told("gate", good, "--loops", loops, code=1)
    assert "the policy's mode is 'shadow'" in found["checks"][1]["findings"][0]["message"]


def test_unlabelled_recordings_need_the_flag(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", working("one", success=None))
    ran = runguard("gate", good)
    assert ran.exit_code == 2
    assert "--assume-success" in ran.stderr
    assert told("gate", good, "--assume-success")["ok"]


def look() -> dict[str, int]:
    return {"seen": 1}


async def played(folder: Path, limit: int, **settings: Any) -> None:
    """Sessions of real runs that want four model calls, as ADK exports them."""
    folder.mkdir()  # noqa: ASYNC240 - nothing else runs on this loop
    for name in ("one", "two"):
        model = ScriptedModel([call("look"), call("look"), call("look"), text("done")])
        guards = [RunGuardPlugin(max_model_calls=limit if name == "one" else 9, **settings)]
        found = await run(LlmAgent(name="a", model=model, tools=[look]), plugins=guards, session_id=name)
        (folder / f"{name}.json").write_text(found.session.model_dump_json())


@pytest.mark.parametrize("source", ["sessions", "store"])
async def test_a_run_that_runguard_stopped_is_not_assumed_to_be_a_success(tmp_path: Path, source: str) -> None:
    store = f"sqlite:///{tmp_path / 'guard.db'}"
    await played(tmp_path / "sessions", 2, store=store)
    report = gate(str(tmp_path / "sessions") if source == "sessions" else store, Policy.build(), assume_success=True)
    assert report.ok
    assert report.checks[0].summary == (
        "the policy leaves the only successful run alone; not assumed successful, because RunGuard stopped them: 1"
    )
    assert report.to_dict()["cost"]["successes"] == 1


async def test_recordings_that_runguard_stopped_are_nothing_to_protect(tmp_path: Path) -> None:
    await played(tmp_path / "sessions", 2)
    (tmp_path / "sessions" / "two.json").unlink()
    with pytest.raises(UnreadableError, match="RunGuard stopped 1 of the 1 runs, so there is nothing to protect"):
        gate(str(tmp_path / "sessions"), Policy.build(), assume_success=True)


async def test_a_run_that_would_have_been_stopped_in_shadow_mode_is_assumed_to_be_a_success(tmp_path: Path) -> None:
    await played(tmp_path / "sessions", 2, mode="shadow")
    report = gate(str(tmp_path / "sessions"), Policy.build(), assume_success=True)
    assert report.checks[0].summary == "the policy leaves all 2 successful runs alone"


@pytest.mark.parametrize("damaged", ["good", "loops"])
def test_a_damaged_record_fails(tmp_path: Path, damaged: str) -> None:
    parts = {"good": [working()], "loops": [looping("stuck", 20)]}
    files = {
        name: write(tmp_path / f"{name}.jsonl", *runs, *(["{broken"] if name == damaged else []))
        for name, runs in parts.items()
    }
    found = told("gate", files["good"], "--loops", files["loops"], code=1)
    assert states(found) == {"successful runs": "passed", "loops": "passed", "recordings": "failed"}


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    good = write(tmp_path / "good.jsonl", working())
    for arguments in (
        (tmp_path / "missing",),
        (tmp_path / "empty.jsonl",),
        (good, "--loops", tmp_path / "empty.jsonl"),
    ):
        assert runguard("gate", *arguments).exit_code == 2


# ---- the cost per success -------------------------------------------------------------------------------------------


def test_an_expensive_agent_fails_and_a_noisy_one_passes(tmp_path: Path) -> None:
    base = tmp_path / "gate.json"
    done = runguard("gate", noisy(tmp_path / "base.jsonl", 1), "--baseline", base, "--update-baseline")
    assert done.exit_code == 0
    assert "gate.json written" in done.stderr
    for seed in range(2, 8):
        assert told("gate", noisy(tmp_path / "same.jsonl", seed), "--baseline", base)["ok"], seed
    for seed in range(2, 8):
        found = told("gate", noisy(tmp_path / "twice.jsonl", seed, 2.0), "--baseline", base, code=1)
        assert states(found)["cost per success"] == "failed"
        assert found["cost"]["change"]["interval"][0] > 1
        assert not found["cost"]["change"]["paired"]


def test_a_higher_price_fails_on_the_same_recordings(tmp_path: Path) -> None:
    """The runs are the same, so a rise of a tenth is no noise."""
    base, runs = tmp_path / "gate.json", noisy(tmp_path / "base.jsonl", 1, runs=20)
    policy_file('[prices."gpt-4o"]\ninput = 2.0\noutput = 10.0\n')
    assert runguard("gate", runs, "--baseline", base, "--update-baseline").exit_code == 0
    assert told("gate", runs, "--baseline", base)["ok"]
    policy_file('[prices."gpt-4o"]\ninput = 2.2\noutput = 11.0\n')
    found = told("gate", runs, "--baseline", base, code=1)
    assert found["cost"]["change"] == {
        "ratio": 1.1,
        "interval": [pytest.approx(1.1), pytest.approx(1.1)],
        "paired": True,
    }
    assert told("gate", runs, "--baseline", base, "--max-rise", "15")["ok"]


def test_a_loosened_policy_that_lets_loops_run_raises_the_cost(tmp_path: Path) -> None:
    """A failed run counts with what it spends until the policy stops it."""
    runs = [working(f"good-{n}", 2) for n in range(10)] + [looping(f"stuck-{n}", 60) for n in range(10)]
    recorded, base = write(tmp_path / "runs.jsonl", *runs), tmp_path / "gate.json"
    policy_file(EARLY)
    assert runguard("gate", recorded, "--baseline", base, "--update-baseline").exit_code == 0
    policy_file("[rules]\nrepetition = false\nno_news = false\nsame_call = false\nstall = false\n")
    assert states(told("gate", recorded, "--baseline", base, code=1))["cost per success"] == "failed"


def test_an_unknown_price_is_not_zero(tmp_path: Path) -> None:
    base = tmp_path / "gate.json"
    assert runguard("gate", noisy(tmp_path / "a.jsonl", 1), "--baseline", base, "--update-baseline").exit_code == 0
    unpriced = write(tmp_path / "b.jsonl", *(working(f"r{n}", 2, model="house-llm") for n in range(30)))
    found = told("gate", unpriced, "--baseline", base, code=1)
    assert "60 model calls have no price" in found["checks"][1]["summary"]


def test_without_prices_tokens_are_compared(tmp_path: Path) -> None:
    def runs(name: str, prompt: int) -> Path:
        return write(tmp_path / name, *(sized(f"r{n}", prompt + n, model="house-llm", success=True) for n in range(10)))

    base = tmp_path / "gate.json"
    assert runguard("gate", runs("a.jsonl", 1_000), "--baseline", base, "--update-baseline").exit_code == 0
    found = told("gate", runs("b.jsonl", 1_500), "--baseline", base, code=1)
    assert found["cost"]["unit"] == "tokens"
    assert found["cost"]["change"]["ratio"] == pytest.approx(1.49, abs=0.01)


def test_too_few_runs_are_not_compared(tmp_path: Path) -> None:
    base = tmp_path / "gate.json"
    few, more = noisy(tmp_path / "a.jsonl", 1, runs=4), noisy(tmp_path / "b.jsonl", 2, 5.0, runs=4)
    assert runguard("gate", few, "--baseline", base, "--update-baseline").exit_code == 0
    found = told("gate", more, "--baseline", base)
    assert found["checks"][1]["state"] == "skipped"
    assert "20 are needed" in found["checks"][1]["summary"]


def test_a_failed_gate_does_not_write_a_baseline(tmp_path: Path) -> None:
    policy_file("max_model_calls = 2\n")
    good, base = write(tmp_path / "good.jsonl", working()), tmp_path / "gate.json"
    assert runguard("gate", good, "--baseline", base, "--update-baseline").exit_code == 1
    assert not base.exists()


# ---- the baseline's file --------------------------------------------------------------------------------------------


def test_a_baseline_survives_its_file(tmp_path: Path) -> None:
    report = gate(str(noisy(tmp_path / "a.jsonl", 3)), Policy.build())
    (tmp_path / "gate.json").write_text(report.figures.to_json())
    assert Baseline.read(tmp_path / "gate.json") == report.figures


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"runguard_gate": 99}', '{"runguard_gate": 1, "sums": {}, "listed": null}', "\x00", '"x"'],
)
def test_a_file_that_is_no_baseline_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "gate.json").write_text(content)
    with pytest.raises(BaselineError, match=r"update-baseline|cannot be read"):
        Baseline.read(tmp_path / "gate.json")
    good = write(tmp_path / "good.jsonl", working())
    assert runguard("gate", good, "--baseline", tmp_path / "gate.json").exit_code == 2


def test_negative_figures_are_rejected(tmp_path: Path) -> None:
    data = gate(str(noisy(tmp_path / "a.jsonl", 3)), Policy.build()).figures.to_dict()
    data["sums"]["usd"]["cost"] = -1
    (tmp_path / "gate.json").write_text(json.dumps(data))
    with pytest.raises(BaselineError, match="not a baseline"):
        Baseline.read(tmp_path / "gate.json")


def test_ids_that_name_several_runs_are_compared_by_their_sums(tmp_path: Path) -> None:
    runs = write(tmp_path / "a.jsonl", *(working("the-same", 2) for _ in range(25)))
    report = gate(str(runs), Policy.build())
    assert report.figures.listed is None
    again = gate(str(runs), Policy.build(), baseline=report.figures)
    assert again.ok
    assert again.change is not None
    assert not again.change.paired


def test_the_baseline_must_be_there_or_be_made(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", working())
    ran = runguard("gate", good, "--baseline", tmp_path / "missing.json")
    assert (ran.exit_code, "--update-baseline" in ran.stderr) == (2, True)
    assert runguard("gate", good, "--update-baseline").exit_code == 2


def test_in_code_nothing_to_protect_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="labelled a success"):
        gate(str(write(tmp_path / "a.jsonl", looping())))


# ---- The files that a gate writes for a CI server and a pull request


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


# ---- ``assert_within_budget`` in code and as a fixture of the pytest plugin


PRICES = Policy.build(prices={"scripted-1": {"input": 10, "output": 40}})
# An environment that was set up before the entry point existed does not load the plugin by itself.
LOAD = (
    ()
    if any(found.name == "runguard" for found in entry_points(group="pytest11"))
    else (
        "-p",
        "runguard.gate.pytest_plugin",
    )
)


def look_within_budget(page: int) -> dict[str, int]:
    """Look at a page."""
    return {"page": page}


@pytest.fixture
async def recording() -> Recording:
    """Three model calls of two cents each, two tool calls."""
    agent = LlmAgent(
        name="clerk",
        model=ScriptedModel([call("look", page=1), call("look", page=2), text("done")]),
        tools=[look_within_budget],
    )
    return await run(agent)


def test_a_run_within_its_limits(recording: Recording) -> None:
    result = assert_within_budget(
        recording, usd="0.06", tokens=3_750, model_calls=3, tool_calls=2, policy=PRICES, model="scripted-1"
    )
    assert (str(result.usd), result.tokens, result.model_calls, result.tool_calls) == ("0.06", 3_750, 3, 2)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"usd": "0.0599"}, r"\$0\.06\d*, limit \$0\.0599"),
        ({"tokens": 3_749}, "3,750 tokens, limit 3,749"),
        ({"model_calls": 2}, "3 model calls, limit 2"),
        ({"tool_calls": 1}, "2 tool calls, limit 1"),
    ],
)
def test_a_run_over_a_limit(recording: Recording, limit: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(recording.session, policy=PRICES, model="scripted-1", **limit)


def test_an_unknown_price_is_over_every_dollar_limit(recording: Recording) -> None:
    with pytest.raises(AssertionError, match="cost unknown: 3 of 3 model calls have no price"):
        assert_within_budget(recording, usd=1_000, model="house-llm")


def test_every_run_of_a_file_counts(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs.jsonl", sized("small", 10), sized("large", 90_000))
    assert assert_within_budget(runs, tokens=100_000).id == "large"
    with pytest.raises(AssertionError, match="large: 90,010 tokens, limit 50,000"):
        assert_within_budget(runs, tokens=50_000)


def test_a_damaged_file_is_not_within_a_budget(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be read"):
        assert_within_budget(write(tmp_path / "runs.jsonl", working(), "{broken"), tokens=10**9)


def test_a_budget_needs_a_limit_and_a_run(recording: Recording) -> None:
    with pytest.raises(ValueError, match="at least one of usd"):
        assert_within_budget(recording)
    with pytest.raises(TypeError, match="not dict"):
        assert_within_budget({}, tokens=1)


TEST_FILE = """
def test_cheap(assert_within_budget):
    assert assert_within_budget("runs.jsonl", tokens=100_000).id == "one"

def test_expensive(assert_within_budget):
    assert_within_budget("runs.jsonl", tokens=100)
"""


def pytest_run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_the_fixture_fails_a_test_and_reports_the_figures(tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", sized("one", 1_000))
    (tmp_path / "test_costs.py").write_text(TEST_FILE)
    ran = pytest_run(*LOAD, "--junitxml", "out.xml")
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "one: 1,010 tokens, limit 100" in ran.stdout
    assert '<property name="runguard.tokens" value="1010"' in (tmp_path / "out.xml").read_text()


def test_the_plugin_loads_nothing_at_the_start_of_pytest() -> None:
    script = (
        "import sys, pytest, runguard.gate.pytest_plugin; "
        "print(*(n for n in sys.modules if n.split('.')[0] in ('google', 'pydantic', 'rich', 'click') "
        "or n.startswith(('runguard.core', 'runguard.policy', 'runguard.replay'))))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "\n", "")


# ---- The interval of the cost per success: it finds planted rises, and equal samples seldom look like one


COSTS = st.lists(st.tuples(st.integers(1, 10**12), st.booleans()), min_size=2, max_size=60).filter(
    lambda costs: any(is_success for _, is_success in costs)
)


def sums_of(costs: "list[Cost]") -> Sums:
    sums = Sums()
    for cost, is_success in costs:
        sums.add(cost, is_success)
    return sums


def sample(random: Random, runs: int, times: float = 1.0, successes: float = 0.8, spread: float = 0.8) -> "list[Cost]":
    """Skewed costs, as agents have them."""
    return [(int(1e7 * times * random.lognormvariate(0, spread)), random.random() < successes) for _ in range(runs)]


def rises(trials: int, runs: int, seed: int, **planted: float) -> int:
    random = Random(seed)
    return sum(
        change(sums_of(sample(random, runs, **planted)), sums_of(sample(random, runs))).is_rise() for _ in range(trials)
    )


@pytest.mark.parametrize(("runs", "seed"), [(20, 1), (50, 2), (200, 3)])
def test_equal_samples_seldom_look_like_a_rise(runs: int, seed: int) -> None:
    assert rises(600, runs, seed) <= 600 * 0.02  # the level promises 0.5 %; chance adds a few


def test_a_planted_rise_is_found() -> None:
    assert rises(50, 200, 4, times=2.0) == 50


def test_fewer_successes_raise_the_cost_too() -> None:
    assert rises(50, 400, 5, successes=0.4) >= 48


def test_a_fall_is_no_rise() -> None:
    assert rises(50, 200, 6, times=0.5) == 0


def test_the_same_runs_need_fewer_of_them() -> None:
    random = Random(7)
    found = {True: 0, False: 0}
    for _ in range(50):
        before = sample(random, 30, spread=1.2)
        now = [(int(cost * 1.2 * random.uniform(0.95, 1.05)), ok) for cost, ok in before]
        named = [{str(n): cost for n, cost in enumerate(costs)} for costs in (now, before)]
        for paired in found:
            pairs = pairs_of(*named) if paired else None
            found[paired] += change(sums_of(now), sums_of(before), pairs).is_rise()
    assert found[True] == 50
    assert found[False] <= 5


def test_the_allowed_rise_is_allowed() -> None:
    before = [(100_000, True)] * 30
    now = [(109_000, True)] * 30
    found = change(sums_of(now), sums_of(before))
    assert found.is_rise()
    assert not found.is_rise(0.1)


def test_samples_of_other_runs_have_no_pairs() -> None:
    assert pairs_of({"a": (1, True)}, {"b": (1, True)}) is None
    assert pairs_of({}, {}) is None
    assert pairs_of({"a": (1, True)}, {"a": (2, False)}) == [((1, True), (2, False))]


@given(COSTS)
def test_a_sample_does_not_differ_from_itself(costs: "list[Cost]") -> None:
    sums, named = sums_of(costs), {str(n): cost for n, cost in enumerate(costs)}
    for pairs in (None, pairs_of(named, named)):
        found = change(sums, sums, pairs)
        assert found.ratio == 1
        assert not found.is_rise()
    low, high = interval(sums)
    assert low <= sums.per_success * (1 + 1e-9)
    assert high >= sums.per_success * (1 - 1e-9)


def test_without_success_the_cost_is_infinite() -> None:
    assert sums_of([(5, False)]).per_success == inf
