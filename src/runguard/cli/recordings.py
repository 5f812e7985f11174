"""Commands on recorded runs: replay, calibrate and gate; and the page of ``replay --html``.

``main`` declares them.
"""

import json
import os
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

import click

from runguard.calibrate import proposal
from runguard.cli.main import CommandError, print_json
from runguard.cli.policy_commands import load
from runguard.console import console
from runguard.gate import checks
from runguard.policy.settings import find_policy_file
from runguard.replay import output
from runguard.replay.output import check_place, write_file
from runguard.replay.sources import open_sources


def replay(
    source: str,
    policy_file: Path | None,
    against: Path | None,
    page: Path | None,
    explain: str | None,
    every: bool,
    as_json: bool,
    max_unpacked: int,
    **options: Any,
) -> None:
    """``options``: the model of recordings that do not name one, and the number of processes."""
    if explain is not None and (page is not None or against is not None):
        other = "--html" if page is not None else "--against"
        raise click.UsageError(
            f"--explain shows one run under one policy, on the screen or as JSON; {other} is for all runs: "
            "use only one of them"
        )
    path = policy_file or find_policy_file()
    policies = [(str(path.name) if path else "the defaults", load(path))]
    if against is not None:
        policies.append((against.name if against.name != policies[0][0] else str(against), load(against)))
    sources = open_sources(source, max_unpacked)
    if explain is not None:
        output.run_explanation(sources, explain, policies[0][1], as_json=as_json, model=options["model"])
        return
    if page is not None:
        check_place(page)
    report = output.run(sources, policies, as_json=as_json, every=every, **options)
    if page is not None:
        write_file(page, _page(report.page_data()))


_MODULES: Final = ("words.js", "dom.js", "chart.js", "report.js")


def _page(data: dict[str, Any]) -> str:
    """Return one file that shows ``data`` with the dashboard's scripts and style, and loads nothing.

    Its policy allows only the two scripts in it.
    """
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


def calibrate(
    source: str,
    policy_file: Path | None,
    target: Path | None,
    force: bool,
    as_json: bool,
    max_unpacked: int,
    **options: Any,
) -> int:
    """``options``: as for ``replay``."""
    if target is not None and target.exists() and not force:
        raise CommandError(f"{target} already exists; pass --force to replace it")
    policy, sources = load(policy_file or find_policy_file()), open_sources(source, max_unpacked)
    return int(not proposal.run(sources, policy, target=target, as_json=as_json, **options))


def gate(
    source: str,
    policy_file: Path | None,
    baseline: Path | None,
    update_baseline: bool,
    max_rise: float,
    junit: Path | None,
    markdown: Path | None,
    workers: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """``options``: those of ``runguard.gate.gate`` that it takes as they are."""
    if update_baseline and baseline is None:
        raise click.UsageError("--update-baseline writes the file of --baseline: pass both")
    for place in (junit, markdown, baseline if update_baseline else None):
        if place is not None:
            check_place(place)
    report = checks.gate(
        source,
        load(policy_file or find_policy_file()),
        baseline=checks.Baseline.read(baseline) if baseline is not None and not update_baseline else None,
        max_rise=max_rise / 100,
        workers=workers or os.cpu_count() or 1,
        **options,
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
    return int(not report.ok)
