"""``runguard calibrate``: a source in, a table with the file it makes, or JSON, out."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from runguard.calibrate.proposal import calibrate
from runguard.calibrate.told import print_proposal
from runguard.policy import Policy
from runguard.printable import printable
from runguard.replay.processes import Worked
from runguard.replay.program import console_of_stdout, with_progress
from runguard.replay.sources import open_sources
from runguard.replay.steps import UnreadableError


def run(
    source: str,
    policy: Policy,
    *,
    target: Path | None = None,
    as_json: bool = False,
    max_false_stops: float = 0,
    workers: int | None = None,
    model: str = "",
) -> bool:
    """Whether anything could be advised; only then a file is written."""
    sources = open_sources(source)

    def watch(_: str, found: Iterator[Worked]) -> Iterator[Worked]:
        return with_progress(sources, found, lambda worked: len(worked.found))

    made = calibrate(sources, policy, max_false_stops=max_false_stops, workers=workers or os.cpu_count() or 1, model=model, watch=watch)
    is_advised = bool(made.changes)
    if is_advised and target is not None:
        try:
            target.write_text(made.to_toml(), encoding="utf-8")
        except OSError as error:
            raise UnreadableError(f"{target}: cannot be written: {error}") from None
        print(f"{target} written", file=sys.stderr)  # noqa: T201 - beside the table or the JSON on stdout
    if as_json:
        sys.stdout.write(json.dumps(made.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return is_advised
    print_proposal(console_of_stdout(), printable(made))
    if is_advised and target is None:
        sys.stdout.write("\n" + made.to_toml())
    return is_advised
