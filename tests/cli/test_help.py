"""Help: fast, with examples, the same words everywhere."""

import shlex
import subprocess
import sys

import click

from runguard.cli.main import COMMANDS, LazyGroup, main
from tests.kit.commands import runguard
from tests.kit.examples import each_row

ABOUT = {name: words for group in COMMANDS.values() for name, words in group.items()}
HEAVY = ("pydantic", "rich", "google", "starlette", "uvicorn", "asyncio", "genai_prices")


def command(name: str) -> click.Command:
    assert isinstance(main, LazyGroup)
    found = main.get_command(click.Context(main), name)
    assert found is not None
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
    assert (command(name).help or "").partition("\n")[0] == ABOUT[name], "the list and the command say the same"


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
