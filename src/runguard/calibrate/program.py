"""``runguard calibrate``: a source in, a table with the file it makes, or JSON, out."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from runguard.calibrate.proposal import calibrate
from runguard.calibrate.told import print_proposal
from runguard.console.screen import console
from runguard.core.printable import printable
from runguard.policy.settings import Policy
from runguard.replay.processes import Worked
from runguard.replay.program import check_place, with_progress, write_file
from runguard.replay.sources import Source


def run(
    sources: list[Source],
    policy: Policy,
    *,
    target: Path | None = None,
    as_json: bool = False,
    max_false_stops: float = 0,
    workers: int | None = None,
    model: str = "",
) -> bool:
    """Whether anything could be advised; only then a file is written."""
    if target is not None:
        check_place(target)

    def watch(_: str, found: Iterator[Worked]) -> Iterator[Worked]:
        return with_progress(sources, found, lambda worked: len(worked.found))

    made = calibrate(
        sources,
        policy,
        max_false_stops=max_false_stops,
        workers=workers or os.cpu_count() or 1,
        model=model,
        watch=watch,
    )
    is_advised = bool(made.changes)
    if as_json:
        sys.stdout.write(json.dumps(made.to_dict(), indent=2) + "\n")
    else:
        print_proposal(console(), printable(made))
    if is_advised and target is not None:
        write_file(target, made.to_toml())
    elif is_advised and not as_json:
        sys.stdout.write("\n" + made.to_toml())
    return is_advised
