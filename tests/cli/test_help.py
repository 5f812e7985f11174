"""Help: fast, with examples, the same words everywhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from runguard.cli.main import COMMANDS, main
from tests.kit.commands import runguard, told
from tests.kit.examples import each_row

ABOUT = {str(each.name): str(each.help).partition("\n")[0] for group in COMMANDS.values() for each in group}
HEAVY = ("pydantic", "rich", "google", "starlette", "uvicorn", "asyncio", "genai_prices")


def command(name: str) -> click.Command:
    found: click.Command = main.commands[name]
    return found


def test_help_names_every_command() -> None:
    told = runguard("--help").output
    assert all(f"  {name} " in told and words in " ".join(told.split()) for name, words in ABOUT.items())


_LOADED = """
import sys
from runguard.cli.main import main
for arguments in {asked}:
    main(arguments, prog_name="runguard", standalone_mode=False)
    if found := {{name.split(".")[0] for name in sys.modules}} & set({heavy}):
        sys.exit(f"{{arguments}} loads {{sorted(found)}}")
"""


def test_help_loads_nothing_but_click() -> None:
    asked = [["--help"], ["--version"], *([name, "--help"] for name in ABOUT), ["trips", "show", "--help"]]
    ran = subprocess.run(
        [sys.executable, "-c", _LOADED.format(asked=asked, heavy=HEAVY)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("Usage: runguard") == len(asked) - 1


@each_row("name", ABOUT)
def test_every_command_has_examples_json_exit_codes_and_its_line(name: str) -> None:
    ran = runguard(name, "--help")
    assert ran.exit_code == 0
    examples = ran.output.partition("Examples:\n")[2]
    assert f"  runguard {name}" in examples
    assert "--json" in ran.output
    assert "xit code" in " ".join(ran.output.split())


@each_row("name", ABOUT)
def test_every_example_uses_options_that_exist(name: str) -> None:
    found = command(name)
    below = list(found.commands.values()) if isinstance(found, click.Group) else []
    known = {option for one in (found, *below) for parameter in one.params for option in parameter.opts}
    for line in found.examples.splitlines():  # type: ignore[attr-defined]
        words = shlex.split(line.partition(" > ")[0].partition(" -- ")[0])
        assert words[:2] == ["runguard", name]
        assert {word for word in words if word.startswith("-")} <= known, line


def test_a_command_that_is_not_there() -> None:
    ran = runguard("stat")
    assert ran.exit_code == 2
    assert "No such command 'stat'" in ran.stderr


# ---- docs/reference/commands.md names every command, with options that exist and the keys that ``--json`` prints


DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "operations.md", DOCS / "replay.md", DOCS / "reference" / "commands.md"]
TEXT, _, JSON = PAGES[-1].read_text(encoding="utf-8").partition("\n## JSON\n")
KEYS = dict(re.findall(r"^\| `([a-z ]+)` \| (`ok`.*) \|$", JSON, re.MULTILINE))


def keys_of(name: str) -> set[str]:
    """The top-level keys that the page promises: what stands in parentheses is below them."""
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", KEYS[name])))


def test_every_command_has_a_section() -> None:
    names = set(ABOUT)
    told_of = {name for heading in re.findall(r"^## ([a-z, ]+)$", TEXT, re.MULTILINE) for name in heading.split(", ")}
    assert told_of == names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_line_in_a_box_could_be_typed(page: Path) -> None:
    boxes = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [
        line.partition(" #")[0].partition(" > ")[0].partition(" -- ")[0]
        for box in boxes
        for line in box.splitlines()
        if line.startswith("runguard")
    ]
    assert len(lines) >= 5
    for line in lines:
        _, name, *words = shlex.split(line)
        command = main.get_command(click.Context(main), name)
        assert command is not None, line
        below = list(command.commands.values()) if isinstance(command, click.Group) else []
        known = {option for one in (command, *below) for parameter in one.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("init", [], 0),
        ("check", [], 0),
        ("prices", ["gemini-2.5-flash"], 0),
        ("status", ["--store", "STORE"], 0),
        ("trips", ["--store", "STORE"], 0),
        ("trips show", ["last", "--store", "STORE"], 0),
        ("stop", ["all", "--reason", "x", "--store", "STORE"], 0),
        ("resume", ["all", "--store", "STORE"], 1),
        ("extend", ["user:docs/alice", "--usd", "1", "--store", "STORE"], 0),
        ("store", ["--store", "STORE"], 0),
        ("store adopt", ["0123456789abcdef", "--store", "STORE"], 0),
        ("store repair", ["--store", "STORE"], 0),
        ("doctor", [], 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_promised_keys_are_there(file_store: str, name: str, arguments: list[Any], code: int) -> None:
    given = [file_store if word == "STORE" else word for word in arguments]
    assert set(told(*name.split(), *given, code=code)) == keys_of(name)


def test_the_keys_below(file_store: str) -> None:
    status, prices = told("status", "--store", file_store), told("prices", "acme-1", code=1)
    below = {
        name: set(re.findall(r"`(\w+)`", inside))
        for name, inside in re.findall(r"`(\w+)` \(([^)]*)\)", KEYS["status"] + KEYS["prices"])
    }
    assert set(status["budgets"][0]) == below["budgets"]
    assert set(status["spend"]) == below["spend"]
    assert set(prices["models"][0]) == below["models"]
