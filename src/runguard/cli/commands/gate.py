"""``runguard gate``: fail a build that would stop good runs, cost more per success, or miss a known loop."""

import os
import sys
from pathlib import Path

import click

from runguard.cli.commands.command import Command, fail, print_json
from runguard.cli.commands.options import json_option, model_option, policy_option, unpacked_option, workers_option

_file = click.Path(path_type=Path, dir_okay=False)


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
@click.option("--baseline", type=_file, help="The figures to compare the cost per success with.")
@click.option("--update-baseline", is_flag=True, help="Write the file of --baseline instead of comparing with it.")
@click.option(
    "--max-rise",
    type=click.FloatRange(0, 1000),
    default=0.0,
    metavar="PERCENT",
    help="By how much the cost per success may rise. Default: by what chance explains.",
)
@click.option("--assume-success", is_flag=True, help="Treat recordings without a label as successful.")
@click.option("--junit", type=_file, help="Write the result as JUnit XML to this file.")
@click.option("--markdown", type=_file, help="Write the result as Markdown to this file, for a pull request.")
@json_option
@model_option
@workers_option
@unpacked_option
@click.pass_context
def command(
    ctx: click.Context,
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
    from runguard.cli.commands.policies import load_policy
    from runguard.console.screen import console
    from runguard.core.decision import printable
    from runguard.gate import reports
    from runguard.gate.baseline import Baseline
    from runguard.gate.checks import gate
    from runguard.policy.settings import find_policy_file
    from runguard.replay.output import check_place, write_file
    from runguard.replay.steps import UnreadableError

    try:
        for place in (junit, markdown, baseline if update_baseline else None):
            if place is not None:
                check_place(place)
        report = gate(
            source,
            load_policy(policy_file or find_policy_file()),
            loops=loops,
            baseline=Baseline.read(baseline) if baseline is not None and not update_baseline else None,
            max_rise=max_rise / 100,
            assume_success=assume_success,
            model=model,
            workers=workers or os.cpu_count() or 1,
            max_unpacked=max_unpacked,
        )
    except UnreadableError as error:
        fail(ctx, printable(str(error)))
    if as_json:
        print_json(report.to_dict())
    else:
        reports.print_report(console(), report)
    if junit is not None:
        write_file(junit, reports.junit(report))
    if markdown is not None:
        write_file(markdown, reports.markdown(report))
    if update_baseline and baseline is not None and report.ok:
        report.figures.write(baseline)
        sys.stderr.write(f"{baseline} written\n")
    ctx.exit(0 if report.ok else 1)
