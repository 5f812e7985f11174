"""``runguard prices``: the price, its source, and what to do about one that nobody knows."""

import tomllib
from pathlib import Path
from typing import Any

from runguard.policy import Policy
from tests.kit.commands import runguard, told


def only(*arguments: Any, code: int = 0) -> Any:
    (line,) = told("prices", *arguments, code=code)["models"]
    return line


def test_a_known_model_with_its_tiers() -> None:
    line = only("gemini-2.5-pro")
    assert line["usd_per_million"] == {"input": "1.25", "output": "10", "cached": "0.125"}
    assert line["tiers"] == [{"above": 200_000, "usd_per_million": {"input": "2.5", "output": "15", "cached": "0.25"}}]
    assert (line["context_window"], line["max_output_tokens"], line["unpriced"]) == (1_048_576, 65_536, None)
    assert line["source"].startswith("genai-prices ")
    shown = runguard("prices", "gemini-2.5-pro").stdout
    assert all(
        word in shown for word in ("$1.25", "$10.00", "above 200,000 input", "$15.00", "1,048,576", "genai-prices")
    )


def test_the_policy_overrides_the_list() -> None:
    Path("runguard.toml").write_text('[prices."gemini-2.5-*"]\ninput = 7\noutput = 8.5\n')
    line = only("vertex_ai/gemini-2.5-pro")
    assert (line["usd_per_million"], line["source"]) == ({"input": "7", "output": "8.5"}, "this policy, prices")
    assert [line["model"] for line in told("prices")["models"]] == ["gemini-2.5-*"]


def test_an_unknown_model_and_the_lines_to_add() -> None:
    Path("runguard.toml").write_text("max_usd = 2\n")
    line = only("acme-1", code=1)
    assert line["source"] is None
    added = tomllib.loads(line["add"].replace("…", "1.5"))
    assert Policy.validated(added, "").prices["acme-1"].input == 1.5  # type: ignore[union-attr]
    shown = runguard("prices", "acme-1")
    assert shown.exit_code == 1
    assert "its calls are refused, because the policy limits dollars" in shown.stdout
    assert '[prices."acme-1"]' in shown.stdout


def test_what_an_unknown_model_does_depends_on_the_policy() -> None:
    assert "because no limit in dollars is set; their cost is unknown" in runguard("prices", "acme-1").stdout
    Path("runguard.toml").write_text('max_usd = 2\non_unpriced = "tokens"\n')
    assert "limits in dollars ignore them" in runguard("prices", "acme-1").stdout
    Path("runguard.toml").write_text("max_usd = 2\non_unpriced = {input = 3, output = 15}\n")
    line = only("acme-1")
    assert (line["source"], line["estimated"], line["usd_per_million"]["output"]) == (
        "this policy, on_unpriced",
        True,
        "15",
    )


def test_a_misspelt_model_and_globs() -> None:
    assert "did you mean 'gemini-2.5-flash'" in only("gemini-2.5-falsh", code=1)["unpriced"]
    names = [line["model"] for line in told("prices", "claude-opus-4-*")["models"]]
    assert "claude-opus-4-5" in names
    assert all(name.startswith("claude-opus-4-") for name in names)
    assert told("prices", "nothing-*", code=1)["notes"] == ["no known model matches 'nothing-*'"]


def test_without_a_model_it_shows_those_of_the_store(file_store: str) -> None:
    ran = told("prices", "--store", file_store)
    assert [line["model"] for line in ran["models"]] == ["gemini-2.5-flash"]
    assert "pass one: runguard prices gemini-2.5-flash" in runguard("prices").stdout


def test_a_dead_store_hides_no_price() -> None:
    ran = told("prices", "--store", "redis://127.0.0.1:1/0", "gemini-2.5-flash")
    assert ran["ok"]
    (note,) = told("prices", "--store", "redis://127.0.0.1:1/0")["notes"][:1]
    assert note.startswith("cannot read the models seen in the store: redis://127.0.0.1:1")
