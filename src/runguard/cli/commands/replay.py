"""``runguard replay``: recorded runs through the same guard."""

from pathlib import Path

import click

from runguard.cli.commands.command import Command, fail
from runguard.cli.commands.sizes import unpacked_option


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
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path),
    help="A runguard.toml. Without it, the file that a run started here would use.",
)
@click.option("--against", type=click.Path(path_type=Path), help="A second policy, side by side.")
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
    help="Why did this run not stop (or why did it)? How near each rule came. The beginning of an id will do.",
)
@click.option("--all", "every", is_flag=True, help="Show runs in the table that nothing would have touched, too.")
@click.option("--model", default="", help="The model of recordings that do not name theirs, for prices and windows.")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes; one per core without it.")
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

    SOURCE is a session database of ADK's (a SQLite file, or postgresql://...), ADK's JSON (a session export, an eval
    set), a store of RunGuard's (SQLite, postgresql://... or redis://...), JSONL of runs (plain or .gz), or a folder of
    those. Nothing is written to it, and nothing is enforced or told to anybody. Records that cannot be read are skipped
    and counted. Exit code 2 when the source or a policy cannot be used, no run can be read, or the run to explain is
    not there.
    """
    if explain is not None and (page is not None or against is not None):
        other = "--html" if page is not None else "--against"
        raise click.UsageError(
            f"--explain tells one run under one policy, on the screen or as JSON; {other} is for all runs: "
            "give one of the two"
        )
    from runguard.cli.commands.policies import load_policy
    from runguard.core.printable import printable
    from runguard.policy.settings import find_policy_file
    from runguard.replay import program
    from runguard.replay.sources import open_sources
    from runguard.replay.steps import UnreadableError

    path = policy_file or find_policy_file()
    policies = [(str(path.name) if path else "the defaults", load_policy(path))]
    if against is not None:
        policies.append((against.name if against.name != policies[0][0] else str(against), load_policy(against)))
    try:
        sources = open_sources(source, max_unpacked)
        if explain is None:
            program.run(sources, policies, as_json=as_json, page=page, every=every, workers=workers, model=model)
        else:
            program.run_explanation(sources, explain, policies[0][1], as_json=as_json, model=model)
    except UnreadableError as error:
        fail(ctx, printable(str(error)))
