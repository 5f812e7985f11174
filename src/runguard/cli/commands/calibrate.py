"""``runguard calibrate``: limits from the user's own recorded runs."""

from pathlib import Path
from typing import Any

import click

from runguard.cli.commands.command import Command, fail
from runguard.cli.commands.sizes import unpacked_option


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
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path),
    help="What to start from. Without it, the file that a run started here would use.",
)
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
@click.option("--model", default="", help="The model of recordings that do not name theirs, for prices and windows.")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes; one per core without it.")
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

    SOURCE is whatever 'runguard replay' takes, or a log with one JSON object per run: usd, tokens or calls, and id and
    ok where known. Limits are 2.5 times the 95th percentile of the runs that went well, with its confidence interval;
    rungs are changed only where the recordings show that it saves and harms nobody. Exit code 0 with a proposal, 1 when
    nothing could be advised, 2 when the source or a file cannot be used.
    """
    from runguard.calibrate.program import run
    from runguard.cli.commands.policies import load_policy
    from runguard.core.printable import printable
    from runguard.policy.settings import find_policy_file
    from runguard.replay.sources import open_sources
    from runguard.replay.steps import UnreadableError

    if target is not None and target.exists() and not force:
        fail(ctx, f"{target} exists; --force replaces it")
    policy = load_policy(policy_file or find_policy_file())
    try:
        sources = open_sources(source, max_unpacked)
        is_advised = run(
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
    if not is_advised:
        ctx.exit(1)
