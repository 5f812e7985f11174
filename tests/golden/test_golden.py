"""Names, settings, commands, keys, codes and stored data stay as they are.

A change that is meant: GOLDEN=write, and a line in the changelog.
"""

import json
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from runguard.cli.main import main
from tests.kit.commands import runguard, told

from . import snapshots

FILES = Path(__file__).parent / "files"
pytestmark = pytest.mark.skipif(find_spec("litellm") is None, reason="signatures are those of the newest google-adk")


def compare(name: str, lines: Iterable[str]) -> None:
    text, file = "\n".join(lines) + "\n", FILES / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()


def test_public_names() -> None:
    compare("names", snapshots.names())


def test_settings_and_their_defaults() -> None:
    compare("settings", snapshots.settings())


def test_commands_and_their_options() -> None:
    compare("commands", snapshots.commands(main))


def test_names_of_log_events() -> None:
    compare("log_events", snapshots.log_events())


def test_names_of_metrics_and_attributes() -> None:
    compare("telemetry", snapshots.telemetry())


def test_keys_of_json_output(filled_file: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{filled_file}"
    trip = told("trips", "--store", store)["trips"][0]["id"]
    policy = tmp_path / "runguard.toml"
    policy.write_text("max_usd = 1\n", encoding="utf-8")
    asked = {
        "status": ("status", "--store", store),
        "trips": ("trips", "--store", store),
        "trips ID": ("trips", trip, "--store", store),
        "store": ("store", "--store", store),
        "prices": ("prices", "gemini-2.5-flash"),
        "check": ("check", policy),
        "replay": ("replay", store),
        "calibrate": ("calibrate", store),
    }
    found = []
    for name, arguments in asked.items():
        ran = runguard(*arguments, "--json")
        found += [f"{name}: {path}" for path in sorted(snapshots.key_paths(json.loads(ran.stdout)))]
    compare("json_keys", found)


def test_exit_codes(filled_file: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{filled_file}"
    bad = tmp_path / "bad.toml"
    bad.write_text("max_usdd = 1\n", encoding="utf-8")
    lines = {
        "help": ("--help",),
        "an unknown command": ("stauts",),
        "an unknown option": ("status", "--stor", store),
        "status": ("status", "--store", store),
        "status of a store that is missing": ("status", "--store", f"sqlite:///{tmp_path}/none.db"),
        "trips of an unknown id": ("trips", "nope", "--store", store),
        "check of a bad policy": ("check", bad),
        "replay of a missing file": ("replay", tmp_path / "none.json"),
        "replay that would have stopped": ("replay", store),
        "replay that would have stopped, --check": ("replay", store, "--check"),
        "prices of an unknown model": ("prices", "no-such-model"),
        "stop without a scope": ("stop", "--store", store),
        "extend by a negative amount": ("extend", "user:alice", "--usd", "-1", "--store", store),
    }
    compare("exit_codes", (f"{name}: {runguard(*line).exit_code}" for name, line in lines.items()))


def test_keys_of_records(filled_file: Path) -> None:
    compare("records", snapshots.records(filled_file))


def test_schemas_of_stores(filled: str, request: pytest.FixtureRequest) -> None:
    url, query = urlsplit(filled), parse_qs(urlsplit(filled).query)
    plain = filled.partition("?")[0]
    match url.scheme:
        case "sqlite":
            lines = snapshots.sqlite_schema(Path(url.path))
        case "postgresql":
            lines = snapshots.postgres_schema(plain, query["schema"][0])
        case _:
            lines = snapshots.redis_keys(plain, query["namespace"][0])
    compare(f"schema_{request.node.callspec.params['filled']}", lines)
