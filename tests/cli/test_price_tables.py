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
    assert ran["updated"] == {"written": True, "file": str(own_place)}
    assert ran["list"]["source"].startswith("genai-prices 99.1, table of ")
    assert ran["models"][0]["source"] == ran["list"]["source"]
    assert PriceTable(own_place.read_text(encoding="utf-8")).release == "99.1"
    assert [path.name for path in own_place.parent.iterdir()] == ["prices.jsonl"]
    again = runguard("prices", "--update").stdout
    assert "the installed genai-prices is not newer than the table in use: pip install -U genai-prices" in again


@pytest.mark.parametrize("release", [genai_prices.__version__, "0.0.7"])
def test_nothing_is_written_when_the_package_is_not_newer(
    release: str, own_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(release, monkeypatch)
    assert told("prices", "--update")["updated"] == {"written": False, "file": None}
    assert not own_place.exists()
    assert current_table() is packaged_table()


def test_without_the_package_the_command_says_how_to_install_it(
    own_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    ran = runguard("prices", "--update")
    assert ran.exit_code == 2
    assert ran.stderr.strip().endswith("genai-prices is not installed: pip install 'runguard-agents[prices]'")
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
    assert told("prices", "gemini-2.5-flash")["models"][0]["source"] == f"genai-prices {genai_prices.__version__}"
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    ran = runguard("prices", "gemini-2.5-flash")
    assert ran.exit_code == 2
    assert "prices_source = 'genai-prices': genai-prices is not installed: pip install" in ran.stderr


# ---- doctor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("days", "state"), [(0, "ok"), (1, "ok"), (90, "ok"), (91, "warning")])
def test_doctor_shows_the_date_and_warns_after_90_days(days: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = packaged_table().date
    now = (made.toordinal() - 719_163 + days) * 86_400 + 3600.0  # days between year 1 and 1970
    monkeypatch.setattr("runguard.cli.screens.time.time", lambda: now)
    found = line()
    age = f"table of {made}, {days} {'day' if days == 1 else 'days'} old"
    assert (found["state"], age in found["found"]) == (state, True)
    assert found["do"] == ("pip install -U 'runguard-agents[prices]' && runguard prices --update" if days > 90 else "")


def test_doctor_reports_a_damaged_table(own_place: Path) -> None:
    own_place.parent.mkdir()
    own_place.write_text(PACKAGED.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    found = line()
    assert found["state"] == "warning"
    assert found["found"].startswith(f"the price table {own_place} cannot be used: ")
