"""The seed's table on a screen; see ``seed_table``."""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from runguard._version import __version__
from runguard.console import screen
from runguard.demo import load
from runguard.demo.show import fill_lines

if TYPE_CHECKING:
    from runguard.demo.play import Pair
    from runguard.demo.seed_table import SeedTable

_NAMES = {"seed_values": "seed's values", "defaults": "defaults"}


def show() -> int:
    out = screen.console()
    module = load("seed_table")
    out.print(Text.assemble(("RunGuard", "bold"), f" {__version__} on google-adk {module.adk_version}"))
    out.print(
        Text("The seed's four failure modes on real ADK with scripted models: no network, no key, no cost.", "dim"),
        soft_wrap=True,
    )
    out.print()
    table: SeedTable = module.play_table()
    screen.print_table(out, _table(table))
    out.print()
    out.print(_sentences(table, out.width), soft_wrap=True)
    words = (
        "every mode is stopped with the seed's values"
        if table.ok
        else "not every mode is stopped with the seed's values"
    )
    out.print(Text.assemble((words, "bold green" if table.ok else "bold red"), (f" ({table.seconds:.1f} s)", "dim")))
    return 0 if table.ok else 1


def _table(table: "SeedTable") -> Table:
    names, numbers = ("failure mode", "guard"), ("model calls", "tokens", "saved", "seed")
    made = screen.table(*names, *numbers, right=numbers, whole=(*names, *numbers))
    for row in table.rows:
        for position, (key, pair) in enumerate(row.pairs().items()):
            made.add_row(
                "" if position else row.claim.story.title,
                _NAMES[key],
                *_measured(pair),
                "" if position else f"{row.claim.saved}%",
            )
    return made


def _measured(pair: "Pair") -> tuple[str, str, str]:
    before, after = pair.without.counter, pair.guarded.counter
    return (
        f"{before.model_calls} → {after.model_calls:>3}",
        f"{before.tokens:,} → {after.tokens:>7,}",
        f"{pair.saved:.1f}%",
    )


def _sentences(table: "SeedTable", width: int) -> Text:
    words = Text()
    for row in table.rows:
        claim = row.claim
        words.append(
            fill_lines(
                f"{claim.story.title}: {claim.story.about} (seed: {claim.without}, with a breaker {claim.guarded})",
                width,
            ),
            "bold",
        )
        for key, pair in row.pairs().items():
            trip = pair.guarded.trip
            words.append(
                fill_lines(f"{_NAMES[key]}: {trip.message if trip is not None else _unstopped(pair)}", width, "  ")
            )
        words.append(fill_lines(claim.differs, width, "  ") + "\n", "dim")
    return words


def _unstopped(pair: "Pair") -> str:
    rules = sorted({decision.finding.rule for decision in pair.guarded.warnings if decision.finding is not None})
    return f"not stopped; warned of {', '.join(rules)}" if rules else "not stopped"
