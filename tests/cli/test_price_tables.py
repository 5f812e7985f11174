"""The price list: its date and age, and ``runguard prices --update``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import genai_prices
import pytest

from runguard.pricing import book as genai_source
from runguard.pricing.book import PACKAGED, PriceTable, current_table, packaged_table
from tests.kit.commands import runguard, told


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "data" / "prices.jsonl"
    monkeypatch.setenv("RUNGUARD_PRICES", str(path))
    current_table.cache_clear()
    yield path
    current_table.cache_clear()


def installed(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genai_source, "release", lambda: release)


def line(*arguments: str) -> dict[str, str]:
    found: dict[str, str]
    (found,) = [check for check in told("doctor", *arguments)["checks"] if check["check"] == "price list"]
    return found


def test_an_update_is_written_and_used(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("99.1", monkeypatch)
    ran = told("prices", "--update", "gemini-2.5-flash")
    assert ran["updated"] == {"written": True, "file": str(own_place), "why": None}
    assert ran["list"]["source"].startswith("genai-prices 99.1, table of ")
    assert ran["models"][0]["source"] == ran["list"]["source"]
    assert PriceTable(own_place.read_text(encoding="utf-8")).release == "99.1"
    assert [path.name for path in own_place.parent.iterdir()] == ["prices.jsonl"]
    again = " ".join(runguard("prices", "--update").stdout.split())
    assert "the installed genai-prices 99.1 is not newer than genai-prices 99.1, table of " in again
    assert ": pip install -U genai-prices price list: " in again


@pytest.mark.parametrize("release", [genai_prices.__version__, "0.0.7"])
def test_nothing_is_written_when_the_package_is_not_newer(
    release: str, own_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(release, monkeypatch)
    assert told("prices", "--update")["updated"]["written"] is False
    assert not own_place.exists()
    assert current_table() is packaged_table()


def test_a_table_from_another_machine_is_taken_from_its_file(own_place: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "prices of the other machine.jsonl"
    head, _, body = PACKAGED.read_text(encoding="utf-8").partition("\n")
    theirs.write_text(f"{head.replace(packaged_table().release, '98.7')}\n{body}", encoding="utf-8")
    ran = told("prices", "--update", "--from", theirs, "gemini-2.5-flash")
    assert ran["updated"] == {"written": True, "file": str(own_place), "why": None}
    assert ran["models"][0]["source"].startswith("genai-prices 98.7, table of ")
    theirs.write_text(PACKAGED.read_text(encoding="utf-8"), encoding="utf-8")
    older = told("prices", "--update", "--from", theirs)["updated"]
    assert older["written"] is False
    assert "is not newer than genai-prices 98.7" in older["why"]


def test_a_file_that_is_no_price_table_changes_nothing(own_place: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other.json").write_text("[]\n")
    ran = runguard("prices", "--update", "--from", other)
    assert ran.exit_code == 2
    assert "not a price table" in ran.stderr
    assert "name a file that `runguard prices --update` wrote" in ran.stderr
    assert not own_place.exists()
    assert "--from FILE needs --update" in runguard("prices", "--from", other).stderr


def test_without_the_package_the_command_says_how_to_install_it(
    own_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    ran = runguard("prices", "--update")
    assert ran.exit_code == 2
    assert ran.stderr.strip().endswith("genai-prices is not installed: pip install genai-prices")
    assert not own_place.exists()


def test_a_place_that_cannot_be_written(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("99.1", monkeypatch)
    own_place.parent.write_text("a file")
    ran = runguard("prices", "--update")
    assert ran.exit_code == 2
    assert "the price table cannot be written" in ran.stderr
    assert "RUNGUARD_PRICES" in ran.stderr


def test_a_policy_that_asks_for_the_package_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runguard.toml").write_text('prices_source = "genai-prices"\n')
    source = told("prices", "gemini-2.5-flash")["models"][0]["source"]
    assert source.startswith(f"genai-prices {genai_prices.__version__}, installed ")
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    ran = runguard("prices", "gemini-2.5-flash")
    assert ran.exit_code == 2
    assert "prices_source = 'genai-prices': genai-prices is not installed: pip install" in ran.stderr


PER_TOKEN = """max_usd = 2
[prices."gpt-5-own"]
input = 0.00000125
output = 0.00001
[prices."free-model"]
input = 0
output = 0
"""


@pytest.mark.parametrize("command", ["check", "prices", "doctor"])
def test_a_price_per_token_is_a_warning_that_names_the_unit(command: str) -> None:
    Path("runguard.toml").write_text(PER_TOKEN)
    shown = " ".join(runguard(command).stdout.split())
    assert "prices.gpt-5-own: input = 0.00000125 is less than a thousandth of" in shown
    assert "USD per million tokens, not per token; did you mean 1.25" in shown
    assert "did you mean 10" in shown
    assert "prices.free-model" not in shown


# ---- doctor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("days", "state"), [(0, "ok"), (1, "ok"), (90, "ok"), (91, "warning")])
def test_doctor_shows_the_date_and_warns_after_90_days(days: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = packaged_table().date
    now = (made.toordinal() - 719_163 + days) * 86_400 + 3600.0  # days between year 1 and 1970
    monkeypatch.setattr("runguard.cli.policy_commands.time.time", lambda: now)
    found = line()
    age = f"table of {made}, {days} {'day' if days == 1 else 'days'} old"
    assert (found["state"], age in found["found"]) == (state, True)
    assert found["do"] == ("pip install -U genai-prices" if days > 90 else "")


def test_doctor_reports_a_damaged_table(own_place: Path) -> None:
    own_place.parent.mkdir()
    own_place.write_text(PACKAGED.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    found = line()
    assert found["state"] == "warning"
    assert found["found"].startswith(f"the price table {own_place} cannot be used: ")
