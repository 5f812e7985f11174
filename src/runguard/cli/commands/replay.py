"""``runguard replay``: feed recorded runs to the guard."""

from pathlib import Path

import click

from runguard.cli.commands.command import Command, fail
from runguard.cli.commands.options import model_option, policy_option, unpacked_option, workers_option


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
@click.pass_context
def command(
    ctx: click.Context,
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
    from runguard.cli.commands.policies import load_policy
    from runguard.core.decision import printable
    from runguard.policy.settings import find_policy_file
    from runguard.replay import output
    from runguard.replay.sources import open_sources
    from runguard.replay.steps import UnreadableError

    path = policy_file or find_policy_file()
    policies = [(str(path.name) if path else "the defaults", load_policy(path))]
    if against is not None:
        policies.append((against.name if against.name != policies[0][0] else str(against), load_policy(against)))
    try:
        sources = open_sources(source, max_unpacked)
        if explain is None:
            output.run(sources, policies, as_json=as_json, page=page, every=every, workers=workers, model=model)
        else:
            output.run_explanation(sources, explain, policies[0][1], as_json=as_json, model=model)
    except UnreadableError as error:
        fail(ctx, printable(str(error)))
