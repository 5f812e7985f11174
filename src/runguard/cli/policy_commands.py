"""Commands around a policy: init, check, demo, doctor, replay, calibrate, gate and prices.

``main`` imports this module for any of them, also for its help: everything heavy is imported inside of the commands.
"""

import json
import os
import sys
import tomllib
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

import click

from runguard.cli.main import (
    Command,
    CommandError,
    fail,
    json_option,
    model_option,
    policy_option,
    print_json,
    print_notes,
    store_option,
    unpacked_option,
    workers_option,
)

if TYPE_CHECKING:
    from runguard.cli.doctor import CheckResult
    from runguard.policy.settings import Policy


# ---- ``runguard init``: write a commented ``runguard.toml`` to start from

_TEMPLATE: Final = Template("""\
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
def init_command(file: Path, preset: str, force: bool, as_json: bool) -> None:
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

    text = _TEMPLATE.substitute(PRESETS[preset], preset=preset, rules=", ".join(RULES))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        do = f"; create the folder {file.parent} first" if not file.parent.exists() else ""
        raise CommandError(f"{file}: cannot write the file: {error.strerror or error}{do}") from None
    notes = _why_unused(file)
    if as_json:
        print_json({"ok": True, "file": str(file), "preset": preset, "notes": notes})
        return
    click.echo(f"written: {file} ({preset})")
    print_notes(notes)
    click.echo("  next: read it, then `runguard check` and `runguard doctor`")


def _why_unused(file: Path) -> list[str]:
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


# ---- ``runguard check``: validate a policy and show what it changes


def _load(path: Path | None) -> "Policy":
    """Return the policy of a file without the environment, or the defaults if there is no file."""
    from runguard.policy.settings import Policy, load_policy_file

    return Policy.validated({} if path is None else load_policy_file(path), str(path or ""))


@click.command(
    "check",
    cls=Command,
    examples="""
    runguard check
    runguard check deploy/runguard.toml
    runguard check --schema > runguard.schema.json
    """,
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
@click.option("--schema", is_flag=True, help="Print the JSON Schema of runguard.toml and do nothing else.")
@click.pass_context
def check_command(ctx: click.Context, file: Path | None, as_json: bool, schema: bool) -> None:
    """Validate a policy file and show what it changes.

    FILE is a runguard.toml, or a pyproject.toml with [tool.runguard]. Default: the file that a run started here would
    use. Exit code 0 if the policy is valid, 1 if FILE is a pyproject.toml without a [tool.runguard] table, 2 if the
    policy, RUNGUARD_MODE or RUNGUARD_STORE is not valid.
    """
    from runguard.core.errors import PolicyError
    from runguard.policy.settings import Policy, find_policy_file, policy_schema
    from runguard.pricing.book import prices_per_token

    if schema:
        click.echo(json.dumps(policy_schema(), indent=2))
        return
    path = file
    try:
        path = path or find_policy_file()
        policy = _load(path)
        for name in ("mode", "store"):  # the environment overrides every file
            if value := os.environ.get(f"RUNGUARD_{name.upper()}"):
                Policy.validated({name: value}, f"RUNGUARD_{name.upper()}")
    except PolicyError as error:
        fail(ctx, str(error), file=str(path) if path else None)
    changed = _changed(policy)
    notes = _overrides() + prices_per_token(policy.prices, policy.prices_source)
    sets_nothing = path is not None and not _has_table(path)
    if as_json:
        settings = {name: {"value": value, "default": default} for name, (value, default) in changed.items()}
        facts = {"ok": not sets_nothing, "file": str(path) if path else None}
        print_json({**facts, "settings": settings, "policy": policy.digest, "notes": notes})
    else:
        _print_policy(path, sets_nothing, changed, notes)
    sys.exit(1 if sets_nothing else 0)


def _print_policy(path: Path | None, sets_nothing: bool, changed: dict[str, tuple[Any, Any]], notes: list[str]) -> None:
    if sets_nothing:
        click.echo(f"{path}: no [tool.runguard] table, so this file sets nothing")
    else:
        click.echo(f"ok: {path}" if path else "ok: no policy file in this folder or its parents")
    width = max((len(name) for name in changed), default=0)
    for name, (value, default) in changed.items():
        click.echo(
            f"  {name:<{width}}  {_shown(value)}"
            + ("" if name.startswith("tools.") else f"  (default {_shown(default)})")
        )
    if not changed:
        click.echo("  every setting at its default")
    print_notes(notes)


def _has_table(path: Path) -> bool:
    """Return whether the file can set anything: a pyproject.toml needs a [tool.runguard] table."""
    if path.name != "pyproject.toml":
        return True
    tool = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("tool", {})
    return isinstance(tool, dict) and "runguard" in tool


def _overrides() -> list[str]:
    """Return the environment variables that override the file."""
    notes = []
    if mode := os.environ.get("RUNGUARD_MODE"):
        notes.append(f"RUNGUARD_MODE={mode} overrides the mode of every run started here")
    if os.environ.get("RUNGUARD_STORE"):
        notes.append("RUNGUARD_STORE overrides the store of every run started here")
    return notes


def _changed(policy: "Policy") -> dict[str, tuple[Any, Any]]:
    """Return settings that differ from the defaults: name -> (value, default). Rules appear as their final rungs."""
    from runguard.ledger.memory import store_name
    from runguard.policy.settings import RULES, Policy, PolicyFile

    changed: dict[str, tuple[Any, Any]] = {}
    current, defaults = (_plain(each) for each in (policy, Policy.validated({}, "")))
    for name in PolicyFile.model_fields:
        if name not in ("rules", "tools") and current.get(name) != defaults.get(name):
            changed[name] = (current.get(name), defaults.get(name))
    if "store" in changed:
        changed["store"] = (store_name(policy.store), "memory")  # a URL may hold a password
    if "alerts" in changed:
        changed["alerts"] = ([receiver.name for receiver in policy.alerts.receivers], [])
    for rule, (default, _) in RULES.items():
        rungs = policy.rungs(rule)
        if rungs != default:
            changed[f"rules.{rule}"] = (_rungs(rungs) if rungs is not None else False, _rungs(default))
    for pattern, tool in policy.tools.items():
        changed[f"tools.{pattern}"] = (tool.model_dump(mode="json", exclude_defaults=True), {})
    return changed


def _plain(policy: "Policy") -> dict[str, Any]:
    """Return the settings of a policy as plain data."""
    from runguard.policy.settings import PolicyFile

    return policy.model_dump(
        mode="json", include=set(PolicyFile.model_fields), exclude_none=True, exclude={"tools", "rules"}
    )


def _rungs(rungs: Any) -> dict[str, float]:
    numbers = {name: getattr(rungs, name) for name in ("warn", "nudge", "withhold", "block", "stop")}
    return {
        name: int(number) if number == int(number) else number for name, number in numbers.items() if number is not None
    }


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if value is False:
        return "off"
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(entry)}" for name, entry in value.items()) or "nothing"
    return _word(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- ``runguard demo``: stop runaways and leave healthy runs alone, on real ADK


@click.command("demo", cls=Command, examples="runguard demo\nrunguard demo --json")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
def demo_command(as_json: bool) -> None:
    """Show runaway agents being stopped and healthy ones left alone.

    Runs four runaways and six healthy look-alikes, each without and with the guard on its defaults, on real Google ADK
    with scripted models: no network, no key. Exit code 0 if every runaway was stopped and no healthy run was touched, 1
    otherwise, 2 without google-adk.
    """
    from runguard.cli.demo import run

    sys.exit(run(as_json=as_json))


# ---- ``runguard doctor``: check the installation and prove that a stop works


@click.command(
    "doctor",
    cls=Command,
    examples="""
    runguard doctor
    runguard doctor --app agents/docs
    runguard doctor --app my_service.main:app --model gemini-2.5-flash
    """,
)
@click.option(
    "--app",
    "target",
    metavar="APP",
    help="Your app: an agent folder as for adk web, or module:attribute (App, Runner, or an agent of any framework). "
    "Its code runs.",
)
@click.option("--model", "models", multiple=True, help="A model in use, to look up its price. May be repeated.")
@store_option
@json_option
def doctor_command(target: str | None, models: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Check the installation and prove that a stop works.

    Checks Python, google-adk and its features, other frameworks, other packages of the same name, the policy, the order
    of plugins, agents without a guard, the store and the prices of the models in use. A live test then stops agents on
    real ADK with a scripted model, without network. Exit code 0 without a problem (warnings are allowed), 1 with one, 2
    if APP does not exist.
    """
    from runguard.cli.doctor import examine

    lines = examine(target, models, store)
    ok = all(line.state != "problem" for line in lines)
    if as_json:
        print_json({"ok": ok, "checks": lines})
    else:
        _print_checks(lines)
    sys.exit(0 if ok else 1)


def _print_checks(lines: "list[CheckResult]") -> None:
    from rich.text import Text

    from runguard.console import console
    from runguard.core.decision import printable

    out, colours = console(), {"ok": "green", "warning": "yellow", "problem": "bold red"}
    for line in lines:
        # indent an error of several lines below its heading
        found = f"\n{'':20}".join(printable(line.found.split("\n")))
        out.print(
            Text.assemble((f"{line.state:<8}", colours[line.state]), (f"{line.check:<12}", "bold"), found),
            soft_wrap=True,
        )
        if line.do:
            out.print(f"{'':20}→ {printable(line.do)}", soft_wrap=True)
    problems, warnings = (sum(line.state == state for line in lines) for state in ("problem", "warning"))
    out.print(
        f"{problems or 'no'} problem{'' if problems == 1 else 's'}, {warnings or 'no'} "
        f"warning{'' if warnings == 1 else 's'}",
        style="dim",
    )


# ---- ``runguard replay``: show what a policy would have done to recorded runs


@click.command(
    "replay",
    cls=Command,
    examples="""
    runguard replay sessions.db
    runguard replay sessions.db --policy strict.toml --against runguard.toml
    runguard replay runs.jsonl.gz --html report.html
    runguard replay sessions.db --explain e-1b7f
    """,
)
@click.argument("source")
@policy_option
@click.option("--against", type=click.Path(path_type=Path), help="A second policy, shown side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: every run, then the totals.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one self-contained page with plots to this file.",
)
@click.option(
    "--explain",
    metavar="RUN",
    help="Show why this run stopped or not, and the highest count of each rule. A unique prefix of an id is enough.",
)
@click.option("--all", "every", is_flag=True, help="Also show runs that the policy would not have touched.")
@model_option
@workers_option
@unpacked_option
def replay_command(
    source: str,
    policy_file: Path | None,
    against: Path | None,
    as_json: bool,
    page: Path | None,
    explain: str | None,
    every: bool,
    model: str,
    workers: int | None,
    max_unpacked: int,
) -> None:
    """Show what a policy would have done to recorded runs.

    SOURCE is an ADK session database (a SQLite file, or postgresql://...), ADK's JSON (a session export, an eval set),
    a RunGuard store (SQLite, postgresql://... or redis://...), JSONL of runs (plain or .gz), or a folder of those.
    Replay writes nothing to it, enforces nothing and sends no alert. It skips and counts records that cannot be read.
    Exit code 2 if the source or a policy cannot be used, no run can be read, or the run to explain does not exist.
    """
    if explain is not None and (page is not None or against is not None):
        other = "--html" if page is not None else "--against"
        raise click.UsageError(
            f"--explain shows one run under one policy, on the screen or as JSON; {other} is for all runs: "
            "use only one of them"
        )
    from runguard.policy.settings import find_policy_file
    from runguard.replay import output
    from runguard.replay.sources import open_sources

    path = policy_file or find_policy_file()
    policies = [(str(path.name) if path else "the defaults", _load(path))]
    if against is not None:
        policies.append((against.name if against.name != policies[0][0] else str(against), _load(against)))
    sources = open_sources(source, max_unpacked)
    if explain is not None:
        output.run_explanation(sources, explain, policies[0][1], as_json=as_json, model=model)
        return
    if page is not None:
        output.check_place(page)
    report = output.run(sources, policies, as_json=as_json, every=every, workers=workers, model=model)
    if page is not None:
        output.write_file(page, _page(report.page_data()))


_MODULES: Final = ("words.js", "dom.js", "chart.js", "report.js")


def _page(data: dict[str, Any]) -> str:
    """Return one file that shows ``data`` with the dashboard's scripts and style, and loads nothing.

    Its policy allows only the two scripts in it.
    """
    import re
    from base64 import b64encode
    from hashlib import sha256
    from importlib.resources import files

    folder = files("runguard.cli.dashboard") / "static"
    text = {path: (folder / path).read_text(encoding="utf-8") for path in ("report.html", "page.css", *_MODULES)}
    library, style = ((folder / "vendor" / f"uPlot.{kind}").read_text("utf-8") for kind in ("iife.min.js", "min.css"))
    program = "".join(re.sub(r"(?m)^import .*\n|^export ", "", text[name]) for name in _MODULES)
    allowed = (b64encode(sha256(script.encode()).digest()).decode() for script in (library, program))
    return Template(text["report.html"]).substitute(
        allowed=" ".join(f"'sha256-{digest}'" for digest in allowed),
        style=style + text["page.css"],
        data=json.dumps(data).replace("<", "\\u003c"),  # no name can end the script that holds it
        library=library,
        program=program,
    )


# ---- ``runguard calibrate``: propose limits from recorded runs


@click.command(
    "calibrate",
    cls=Command,
    examples="""
    runguard calibrate sessions.db
    runguard calibrate runs.jsonl.gz --write runguard.toml
    runguard calibrate costs.jsonl
    runguard calibrate runs/ --policy now.toml
    """,
)
@click.argument("source")
@policy_option
@click.option(
    "--write",
    "target",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the proposal as a commented runguard.toml.",
)
@click.option("--force", is_flag=True, help="Let --write replace a file.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@model_option
@workers_option
@unpacked_option
def calibrate_command(
    source: str,
    policy_file: Path | None,
    target: Path | None,
    force: bool,
    as_json: bool,
    model: str,
    workers: int | None,
    max_unpacked: int,
) -> None:
    """Propose limits from recorded runs.

    SOURCE is any source of 'runguard replay', or a log with one JSON object per run: usd, tokens or calls, and
    optionally id and ok. Limits are 2.5 times the 95th percentile of the successful runs, with its confidence interval.
    Exit code 0 with a proposal, 1 if there is nothing to propose, 2 if the source or a file cannot be used.
    """
    from runguard.calibrate.proposal import run
    from runguard.policy.settings import find_policy_file
    from runguard.replay.sources import open_sources

    if target is not None and target.exists() and not force:
        raise CommandError(f"{target} already exists; pass --force to replace it")
    policy, sources = _load(policy_file or find_policy_file()), open_sources(source, max_unpacked)
    has_advice = run(sources, policy, target=target, as_json=as_json, workers=workers, model=model)
    sys.exit(0 if has_advice else 1)


# ---- ``runguard gate``: fail a build that would stop good runs, cost more per success, or miss a known loop

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(
    "gate",
    cls=Command,
    examples="""
    runguard gate recorded/ --assume-success
    runguard gate recorded/ --loops loops.jsonl --baseline gate.json
    runguard gate recorded/ --baseline gate.json --update-baseline
    runguard gate recorded/ --loops loops.jsonl --junit gate.xml --markdown gate.md
    """,
)
@click.argument("source")
@policy_option
@click.option(
    "--loops", multiple=True, metavar="SOURCE", help="Recorded loops, each of which must be stopped. Repeatable."
)
@click.option("--baseline", type=_FILE, help="The figures to compare the cost per success with.")
@click.option("--update-baseline", is_flag=True, help="Write the file of --baseline instead of comparing with it.")
@click.option(
    "--max-rise",
    type=click.FloatRange(0, 1000),
    default=0.0,
    metavar="PERCENT",
    help="By how much the cost per success may rise. Default: by what chance explains.",
)
@click.option(
    "--assume-success", is_flag=True, help="Treat unlabelled recordings as successful, unless RunGuard stopped them."
)
@click.option("--junit", type=_FILE, help="Write the result as JUnit XML to this file.")
@click.option("--markdown", type=_FILE, help="Write the result as Markdown to this file, for a pull request.")
@json_option
@model_option
@workers_option
@unpacked_option
def gate_command(
    source: str,
    policy_file: Path | None,
    loops: tuple[str, ...],
    baseline: Path | None,
    update_baseline: bool,
    max_rise: float,
    assume_success: bool,
    junit: Path | None,
    markdown: Path | None,
    as_json: bool,
    model: str,
    workers: int | None,
    max_unpacked: int,
) -> None:
    """Fail a build that stops good runs, costs more or misses a loop.

    SOURCE is any source of 'runguard replay': recorded runs that must keep working. The gate fails if the policy would
    stop a successful run or refuse one of its calls, if the cost per success rises beyond its interval, if a run of
    --loops is not stopped, or if a record cannot be read. It runs no agent and changes no source. Exit code 0 if every
    check passes, 1 if one fails, 2 if a source, policy or file cannot be used.
    """
    if update_baseline and baseline is None:
        raise click.UsageError("--update-baseline writes the file of --baseline: pass both")
    from runguard.console import console
    from runguard.gate import checks
    from runguard.policy.settings import find_policy_file
    from runguard.replay.output import check_place, write_file

    for place in (junit, markdown, baseline if update_baseline else None):
        if place is not None:
            check_place(place)
    report = checks.gate(
        source,
        _load(policy_file or find_policy_file()),
        loops=loops,
        baseline=checks.Baseline.read(baseline) if baseline is not None and not update_baseline else None,
        max_rise=max_rise / 100,
        assume_success=assume_success,
        model=model,
        workers=workers or os.cpu_count() or 1,
        max_unpacked=max_unpacked,
    )
    if as_json:
        print_json(report.to_dict())
    else:
        checks.print_report(console(), report)
    if junit is not None:
        write_file(junit, checks.junit(report))
    if markdown is not None:
        write_file(markdown, checks.markdown(report))
    if update_baseline and baseline is not None and report.ok:
        write_file(baseline, report.figures.to_json())
    sys.exit(0 if report.ok else 1)


# ---- ``runguard prices``: show what a model costs, the source of the price, and what an unknown price means


@click.command(
    "prices",
    cls=Command,
    examples="""
    runguard prices gemini-2.5-flash
    runguard prices 'claude-sonnet-*' openai/gpt-5-mini
    runguard prices
    runguard prices --update
    runguard prices --update --from prices.jsonl
    """,
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--update", is_flag=True, help="First write the prices of the installed genai-prices, for all later runs."
)
@click.option(
    "--from",
    "table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --update: take the price table FILE, which `runguard prices --update` wrote elsewhere.",
)
@store_option
@json_option
def prices_command(models: tuple[str, ...], update: bool, table: Path | None, store: str | None, as_json: bool) -> None:
    """Show what models cost and where the price comes from.

    Prices are in dollars per million tokens, under the policy in force here. MODEL is an id as your agents use it, or a
    glob over the known models. Default: the models that the policy names, and those seen in its store. Exit code 0 if
    every model has a price, 1 if one has none, 2 if the policy or the store cannot be used.

    Runs use the newest of the built-in table, the installed genai-prices and the table that --update wrote. --update
    writes a table from the installed genai-prices or from FILE, if that is newer than the table there is. It does not
    use the network. Exit code 2 if genai-prices is not installed, FILE is not a price table or the table cannot be
    written.
    """
    from runguard.cli.screens import (
        asked_models,
        limits_usd,
        list_in_use,
        policy_here,
        price_of,
        print_prices,
        update_table,
    )
    from runguard.pricing.book import prices_per_token

    if table is not None and not update:
        raise click.UsageError("--from FILE needs --update")
    updated = update_table(table) if update else None
    policy = policy_here(store)
    names, notes = asked_models(policy, models) if models or not update else ([], [])
    notes += prices_per_token(policy.prices, policy.prices_source)
    found = [price_of(policy, name) for name in names]
    ok = all(line["source"] is not None for line in found) and not (models and not found)
    result = {
        "ok": ok,
        "models": found,
        "on_unpriced": policy.model_dump(mode="json", include={"on_unpriced"}, exclude_none=True)["on_unpriced"],
        "limits_usd": limits_usd(policy),
        "list": list_in_use(policy.prices_source),
        "updated": updated,
        "notes": notes,
    }
    if as_json:
        print_json(result)
    else:
        print_prices(result)
    sys.exit(0 if ok else 1)
