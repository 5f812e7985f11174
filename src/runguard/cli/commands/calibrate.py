"""``runguard calibrate``: propose limits from recorded runs."""

from pathlib import Path
from typing import Any

import click

from runguard.cli.commands.command import Command, fail
from runguard.cli.commands.options import model_option, policy_option, unpacked_option, workers_option


class FalseStops(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number, or a share of the successful runs such as 0.5%."""

    name = "number or percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            number = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(int(text))
        except ValueError:
            self.fail(f"{text!r} is neither a whole number nor a percentage such as 0.5%", param, ctx)
        if not 0 <= number < (1 if text.endswith("%") else 1e9):
            self.fail(f"{text!r} is out of range", param, ctx)
        return number


@click.command(
    "calibrate",
    cls=Command,
    examples="""
    runguard calibrate sessions.db
    runguard calibrate runs.jsonl.gz --write runguard.toml
    runguard calibrate costs.jsonl
    runguard calibrate runs/ --policy now.toml --max-false-stops 0.5%
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
@click.option(
    "--max-false-stops",
    type=FalseStops(),
    default="0",
    show_default=True,
    help="Successful runs that a rule's rungs may stop: a number, or 0.5%.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@model_option
@workers_option
@unpacked_option
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    policy_file: Path | None,
    target: Path | None,
    force: bool,
    max_false_stops: float,
    as_json: bool,
    model: str,
    workers: int | None,
    max_unpacked: int,
) -> None:
    """Propose limits from recorded runs.

    SOURCE is any source of 'runguard replay', or a log with one JSON object per run: usd, tokens or calls, and
    optionally id and ok. Limits are 2.5 times the 95th percentile of the successful runs, with its confidence interval.
    Rungs change only if the recordings show that this saves tokens and stops no more successful runs. Exit code 0 with
    a proposal, 1 if there is nothing to propose, 2 if the source or a file cannot be used.
    """
    from runguard.calibrate.printing import run
    from runguard.cli.commands.policies import load_policy
    from runguard.core.decision import printable
    from runguard.policy.settings import find_policy_file
    from runguard.replay.sources import open_sources
    from runguard.replay.steps import UnreadableError

    if target is not None and target.exists() and not force:
        fail(ctx, f"{target} already exists; pass --force to replace it")
    policy = load_policy(policy_file or find_policy_file())
    try:
        sources = open_sources(source, max_unpacked)
        has_advice = run(
            sources,
            policy,
            target=target,
            as_json=as_json,
            max_false_stops=max_false_stops,
            workers=workers,
            model=model,
        )
    except UnreadableError as error:
        fail(ctx, printable(str(error)))
    if not has_advice:
        ctx.exit(1)
