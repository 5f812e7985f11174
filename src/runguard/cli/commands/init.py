"""``runguard init``: a commented ``runguard.toml`` to start from."""

from pathlib import Path
from string import Template
from typing import Any, Final

import click

from runguard.cli.commands.command import Command, CommandError, json_option, print_json

_TEXT: Final = Template("""\
# The policy of RunGuard for agents started in this folder or below; written by: runguard init --preset $preset
# Check it with `runguard check`. Keywords in code have the same names and win over this file.

# enforce acts; shadow decides and records everything and changes nothing. RUNGUARD_MODE=shadow does that from outside:
# $shadow
mode = "enforce"

# Dollars of one run: one user turn with all its sub-agents, tools and branches.
# $why_usd
# Once you have recorded runs, `runguard calibrate` proposes the number: 2.5 times what 95 of 100 runs stay below.
max_usd = $max_usd

# A call is refused when it does not fit, before it is made. Tokens, calls and time can be limited as well:
# max_tokens = 500_000
# max_model_calls = 60      # of the whole tree; without it ADK's own 500
# max_seconds = 300

# Where accounts, breakers, stops and trips are kept. $why_store
$store

# What the end user reads after a stop, instead of the built-in sentence:
# stop_text = "I could not finish this. Please ask again, or ask somebody from the team."

# Keep room for the answer in models with a window of a million tokens:
# context_headroom = 100_000

# RunGuard refuses a model of unknown price while dollars are limited. `runguard prices MODEL` shows known prices.
# Give your own in dollars per million tokens:
# [prices."my-model"]
# input = 0.30
# output = 2.50

# Budgets beyond one run: per session, user, app, agent, model, tool or label; 1h, 1d, 1w or month.
$budgets

# Who is told of stops, thresholds and outages. Secrets are named, never written here: env:NAME.
$alerts

# What only you can know about your tools: names, or globs.
# [tools.check_job]
# polling = true            # judged by time without change, not by count
# [tools."send_*"]
# writes = true
# once = true               # not done twice with the same arguments in one session

# The loop rules stand at measured defaults; `runguard check` names the default beside what a file changes. They are
# $rules.
# Rungs are counts, false switches a rule off:
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
        "shadow": "for a first look at a policy.",
        "why_usd": (
            "Half a dollar ends a runaway on your desk early; a hundred calls of 5,000 tokens to a small model "
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
        "shadow": "so the first days of a rollout show what would have been stopped; `runguard trips` lists it.",
        "why_usd": "Five dollars suit agents whose single run has a bounded scope.",
        "max_usd": "5.00",
        "why_store": "A file serves all processes of one machine; several machines share Redis, Valkey or Postgres.",
        "store": 'store = "sqlite:///guard.db"  # beside this file; or "redis://host:6379/0", "postgresql://user@host/database"',
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
    "--preset", type=click.Choice(list(PRESETS)), default="development", show_default=True, help="What the file is for."
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
def command(file: Path, preset: str, force: bool, as_json: bool) -> None:
    """Write a commented runguard.toml.

    FILE is ./runguard.toml unless you name another. The development preset caps a run at $0.50 and keeps everything in
    memory; the production preset caps it at $5, keeps accounts in a file and logs what happens. Exit code 0 when the
    file was written, 2 when it was not: a file that is there is only replaced with --force.
    """
    if file.exists() and not force:
        raise CommandError(
            f"{file} is there already and was left alone; --force replaces it, another FILE writes beside it"
        )
    if file.name == "pyproject.toml":
        raise CommandError(
            f"{file}: a policy in pyproject.toml stands under [tool.runguard]; this command writes files of "
            "its own, such as runguard.toml"
        )
    from runguard.policy.settings import RULES

    text = _TEXT.substitute(PRESETS[preset], preset=preset, rules=", ".join(RULES))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        do = f"; create the folder {file.parent} first" if not file.parent.exists() else ""
        raise CommandError(f"{file}: cannot be written: {error.strerror or error}{do}") from None
    notes = _notes(file)
    if as_json:
        told: dict[str, Any] = {"ok": True, "file": str(file), "preset": preset, "notes": notes}
        print_json(told)
        return
    click.echo(f"written: {file} ({preset})")
    for note in notes:
        click.echo(f"  note: {note}")
    click.echo("  next: read it, then `runguard check` and `runguard doctor`")


def _notes(file: Path) -> list[str]:
    """What keeps runs started here from using the new file."""
    from runguard.policy.settings import FILE_NAME, find_policy_file

    if file.name != FILE_NAME:
        return [f"only files named {FILE_NAME} are found by themselves; name this one with RUNGUARD_POLICY={file}"]
    used = find_policy_file()
    if used is None or used.resolve() != file.resolve():
        return [
            (
                f"runs started in {file.resolve().parent} or below find it; those started "
                f"here use {used or 'no policy file'}"
            )
        ]
    return []
