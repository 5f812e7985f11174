"""``runguard calibrate`` on a plain log: one JSON object per run with its totals, and no steps."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runguard.calibrate import calibrate
from runguard.cli.main import main
from tests.kit.recordings import sized, write


def command(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def log(path: Path, runs: int = 100, *more: Any, **fields: Any) -> Path:
    """Runs of 1 to 100 cents, hundreds of tokens and calls, all of them fine."""
    made = [
        {"id": f"run-{n}", "usd": n / 100, "tokens": 100 * n, "calls": n, "ok": True, **fields}
        for n in range(1, runs + 1)
    ]
    return write(path, *({key: value for key, value in run.items() if value is not None} for run in made), *more)


def test_each_total_gives_its_limit(tmp_path: Path) -> None:
    proposal = calibrate(log(tmp_path / "costs.jsonl"))
    # 2.5 times the 95th of 100, to three digits
    assert proposal.changes == {"max_usd": 2.38, "max_tokens": 23_800, "max_model_calls": 238}
    assert not proposal.faults.count
    assert proposal.estimated == 0
    assert "max_usd = " in proposal.to_toml()


@pytest.mark.parametrize(
    ("untold", "settings"),
    [
        ({"tokens": None, "calls": None}, {"max_usd"}),
        ({"usd": None, "calls": None}, {"max_tokens"}),
        ({"usd": None, "tokens": None}, {"max_model_calls"}),
        ({"calls": None}, {"max_usd", "max_tokens"}),
    ],
    ids=["usd", "tokens", "calls", "usd and tokens"],
)
def test_what_a_log_does_not_tell_is_not_zero(tmp_path: Path, untold: dict[str, Any], settings: set[str]) -> None:
    proposal = calibrate(log(tmp_path / "costs.jsonl", **untold))
    assert set(proposal.changes) == settings
    for limit in proposal.limits:
        if limit.setting not in settings:
            assert limit.recordings == 0
            assert "72 are needed" in limit.why_not


def test_runs_that_tell_no_dollars_are_not_cut_by_a_dollar_limit(tmp_path: Path) -> None:
    silent = [{"id": f"silent-{n}", "tokens": 100, "ok": True} for n in range(40)]
    proposal = calibrate(log(tmp_path / "costs.jsonl", 100, *silent, tokens=None, calls=None))
    assert proposal.changes == {"max_usd": 2.38}
    assert not proposal.cuts["max_usd"].successes
    assert proposal.proposed["success"].stopped == proposal.now["success"].stopped == 0
    assert not proposal.missing.unpriced


def test_a_failed_run_raises_no_limit_and_is_cut(tmp_path: Path) -> None:
    away = {"id": "away", "usd": 900, "tokens": 10**9, "calls": 5_000, "ok": False}
    proposal = calibrate(log(tmp_path / "costs.jsonl", 100, away))
    assert proposal.changes == {"max_usd": 2.38, "max_tokens": 23_800, "max_model_calls": 238}
    for setting in proposal.changes:
        assert proposal.cuts[setting].by_label == {"success": 0, "failure": 1, "unlabelled": 0}


def test_neither_id_nor_label_is_needed(tmp_path: Path) -> None:
    proposal = calibrate(write(tmp_path / "costs.jsonl", *({"usd": f"{n}.50"} for n in range(100))))
    assert proposal.basis.kind == "unlabelled"
    assert proposal.changes == {"max_usd": 237.0}


def test_dollars_of_a_model_step_count(tmp_path: Path) -> None:
    runs = []
    for n in range(1, 101):
        run = sized(f"run-{n}", prompt=10, model="no-price-for-this")
        for step in run["steps"]:
            if step["kind"] == "model":
                step["usd"] = n / 100
        runs.append(run)
    proposal = calibrate(write(tmp_path / "runs.jsonl", *runs))
    made = sum(step["kind"] == "model" for step in runs[0]["steps"])
    assert proposal.changes["max_usd"] == pytest.approx(2.5 * 0.95 * made, rel=0.01)
    assert not proposal.missing.unpriced
    replayed = json.loads(command("replay", tmp_path / "runs.jsonl", "--json").stdout)["totals"]
    assert float(replayed["usd"]) == pytest.approx(sum(n / 100 for n in range(1, 101)) * made)


BAD = [
    ({"usd": -1}, "usd = -1: expected dollars from 0 to 1,000,000,000"),
    ({"usd": "a lot"}, "usd = 'a lot': expected dollars from 0 to 1,000,000,000"),
    ({"usd": True}, "usd = True: expected dollars from 0 to 1,000,000,000"),
    ({"usd": 1e10}, "usd = 10000000000.0: expected dollars from 0 to 1,000,000,000"),
    ({"usd": [1]}, "usd = a list: expected dollars from 0 to 1,000,000,000"),
    ({"tokens": 1.5}, "tokens = 1.5: expected a whole number from 0 to 1,000,000,000,000,000"),
    ({"tokens": "900"}, "tokens = '900': expected a whole number"),
    ({"calls": -3}, "calls = -3: expected a whole number from 0 to 100,000"),
    ({"calls": 10**6}, "calls = 1000000: expected a whole number from 0 to 100,000"),
    ({"usd": 1, "ok": "yes"}, "ok = 'yes': expected true or false; leave it out where it is not known"),
    ({"id": "run"}, "no run: expected an object with a list of steps, or with usd, tokens or calls"),
    ({"usd": None}, "no run: expected an object with a list of steps, or with usd, tokens or calls"),
    ([1, 2], "no run: expected an object with a list of steps, or with usd, tokens or calls"),
    ('{"usd": NaN}', "usd = nan: expected dollars from 0 to 1,000,000,000"),
    ('{"tokens": Infinity}', "tokens = inf: expected a whole number"),
    ("{broken", "not valid JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_a_bad_line_is_named_and_skipped(tmp_path: Path, line: Any, message: str) -> None:
    path = log(tmp_path / "costs.jsonl", 72, line, tokens=None, calls=None)  # as few as give a limit
    done = command("calibrate", path)
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert "1 records could not be read and were skipped" in told
    begins = path.read_bytes().rstrip().rfind(b"\n") + 1
    assert f"costs.jsonl at byte {begins}: {message}" in told


def test_replay_says_who_reads_it(tmp_path: Path) -> None:
    done = command("replay", log(tmp_path / "costs.jsonl", 3))
    assert done.exit_code == 2
    assert "no run could be read, 3 records skipped" in done.output
    assert "a run without steps cannot be replayed; 'runguard calibrate' reads it" in done.output
