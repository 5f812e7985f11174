"""``runguard init``: write a commented ``runguard.toml`` to start from."""

from pathlib import Path
from string import Template
from typing import Final

import click

from runguard.cli.commands.command import Command, CommandError, print_json
from runguard.cli.commands.options import json_option

_TEXT: Final = Template("""\
# RunGuard's policy for agents started in this folder or below; written by: runguard init --preset $preset
# Check it with `runguard check`. Keywords in code have the same names and override this file.

# enforce acts; shadow decides and records everything but changes nothing. RUNGUARD_MODE=shadow overrides this line,
# $shadow
mode = "enforce"

# Dollars per run: one user turn with all its sub-agents, tools and branches.
# $why_usd
# Once you have recorded runs, `runguard calibrate` proposes the number: 2.5 times the 95th percentile.
max_usd = $max_usd

# RunGuard refuses a call that does not fit, before it is made. You can also limit tokens, calls and time:
# max_tokens = 500_000
# max_model_calls = 60      # for the whole tree; without it ADK's own 500
# max_seconds = 300

# Where accounts, breakers, stops and trips are kept. $why_store
$store

# The text for the end user after a stop, instead of the built-in sentence:
# stop_text = "I could not finish this. Please ask again, or ask our team."

# Keep room for the answer in models with a window of a million tokens:
# context_headroom = 100_000

# RunGuard refuses a model of unknown price while dollars are limited. `runguard prices MODEL` shows known prices.
# Set your own in dollars per million tokens:
# [prices."my-model"]
# input = 0.30
# output = 2.50

# Budgets beyond one run: per session, user, app, agent, model, tool or label; 1h, 1d, 1w or month.
$budgets

# Receivers of alerts about stops, thresholds and outages. Never write secrets here; use env:NAME.
$alerts

# Describe your tools, by name or glob.
# [tools.check_job]
# polling = true            # judged by time without change, not by count
# [tools."send_*"]
# writes = true
# once = true               # runs only once per session with the same arguments

# The loop rules have measured defaults; `runguard check` shows the default of each changed setting. The rules are
# $rules.
# Rungs are counts; false switches a rule off:
# [rules]
# repetition = { stop = 6 }
# growth = false
""")
_BUDGETS: Final = """\
# [[budgets]]
# usd = 5
# per = "user"
# window = "1d\""""
_ALERTS: Final = """\
# slack_webhook = "env:SLACK_URL"
# pagerduty_key = "env:PAGERDUTY_KEY\""""
PRESETS: Final[dict[str, dict[str, str]]] = {
    "development": {
        "shadow": "for example to try a policy first.",
        "why_usd": (
            "Half a dollar ends a runaway early during development; a hundred calls of 5,000 tokens to a small model "
            "cost less than a tenth of it."
        ),
        "max_usd": "0.50",
        "why_store": "In memory they end with the process.",
        "store": (
            'store = "memory"              # or "sqlite:///guard.db", to see them with `runguard status` and '
            "`runguard dashboard`"
        ),
        "budgets": _BUDGETS,
        "alerts": f"# [alerts]\n{_ALERTS}",
    },
    "production": {
        "shadow": "for the first days of a rollout; `runguard trips` then lists what would have been stopped.",
        "why_usd": "Five dollars fit agents whose runs have a limited scope.",
        "max_usd": "5.00",
        "why_store": "A file works for all processes of one machine; several machines need Redis, Valkey or Postgres.",
        "store": 'store = "sqlite:///guard.db"  # next to this file; or "redis://host:6379/0", "postgresql://user@host/database"',
        "budgets": _BUDGETS,
        "alerts": f'[alerts]\nlog = "warning"\n{_ALERTS}',
    },
}


@click.command(
    "init",
    cls=Command,
    examples="""
    runguard init
    runguard init --preset production
    runguard init --preset production deploy/runguard.toml --force
    """,
)
@click.argument("file", default="runguard.toml", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="development",
    show_default=True,
    help="The purpose of the file.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def command(file: Path, preset: str, force: bool, as_json: bool) -> None:
    """Write a commented runguard.toml.

    FILE defaults to ./runguard.toml. The development preset caps a run at $0.50 and keeps everything in memory; the
    production preset caps it at $5, keeps accounts in a file and logs alerts. Exit code 0 if the file was written, 2 if
    not. Only --force replaces an existing file.
    """
    if file.exists() and not force:
        raise CommandError(
            f"{file} already exists and was not changed; pass --force to replace it, or name another FILE"
        )
    if file.name == "pyproject.toml":
        raise CommandError(
            f"{file}: this command writes separate files such as runguard.toml; a policy in pyproject.toml "
            "belongs under [tool.runguard]"
        )
    from runguard.policy.settings import RULES

    text = _TEXT.substitute(PRESETS[preset], preset=preset, rules=", ".join(RULES))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        do = f"; create the folder {file.parent} first" if not file.parent.exists() else ""
        raise CommandError(f"{file}: cannot write the file: {error.strerror or error}{do}") from None
    notes = _notes(file)
    if as_json:
        print_json({"ok": True, "file": str(file), "preset": preset, "notes": notes})
        return
    click.echo(f"written: {file} ({preset})")
    for note in notes:
        click.echo(f"  note: {note}")
    click.echo("  next: read it, then `runguard check` and `runguard doctor`")


def _notes(file: Path) -> list[str]:
    """Return why runs started here would not use the new file."""
    from runguard.policy.settings import FILE_NAME, find_policy_file

    if file.name != FILE_NAME:
        return [
            f"RunGuard finds only files named {FILE_NAME} automatically; set RUNGUARD_POLICY={file} to use this one"
        ]
    used = find_policy_file()
    if used is None or used.resolve() != file.resolve():
        return [
            (
                f"runs started in {file.resolve().parent} or below use it; runs started "
                f"here use {used or 'no policy file'}"
            )
        ]
    return []
