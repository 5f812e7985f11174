"""Output of commands for people: colour and wrapping on a terminal, whole lines in a pipe."""

import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from io import TextIOWrapper
from typing import Any, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_PIPED_WIDTH: Final = 10_000  # a pipe has no width: do not wrap or shorten
_NARROW: Final = 60
_FOLDED: Final = 8  # width that a wrapped cell needs to be readable
_SENTENCE: Final = 30
_UNITS: Final = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def console() -> Console:
    """Return the console for results. Names of agents and tools are text, never markup."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # do not fail if the terminal cannot encode an arrow
    made = Console(highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPED_WIDTH
    return made


def table(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = (), sentences: Sequence[str] = ()) -> Table:
    """Return a plain table; columns in ``whole`` are never wrapped, columns in ``sentences`` only between words."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        least = _SENTENCE if name in sentences else None
        made.add_column(
            name, justify="right" if name in right else "left", overflow="fold", no_wrap=name in whole, min_width=least
        )
    return made


def print_table(out: Console, shown: Table) -> None:
    """Print a table; on a terminal too narrow for its whole columns, print one line per cell."""
    if out.width >= max(_NARROW, _least(shown)):
        out.print(shown)
        return
    names = [" ".join(str(column.header).split()) for column in shown.columns]
    for cells in zip(*(column.cells for column in shown.columns), strict=True):
        for position, (name, cell) in enumerate(
            (name, cell) for name, cell in zip(names, cells, strict=True) if str(cell)
        ):
            for number, line in enumerate(
                Text.assemble((f"{name}: " if name else "", "dim"), cell).wrap(out, max(out.width - 4, _FOLDED))
            ):
                out.print(Text.assemble("  " * bool(position) + "  " * bool(number), line))


def _least(shown: Table) -> int:
    """Return the width that the table needs: whole columns in full, wrapped ones at their narrowest."""
    return sum(_width(column) + 1 for column in shown.columns)


def _width(column: Column) -> int:
    widest = max(
        (cell_len(line) for cell in (column.header, *column.cells) for line in str(cell).splitlines()), default=0
    )
    return max(widest if column.no_wrap else min(widest, _FOLDED), column.min_width or 0)


def heading(words: str) -> Text:
    return Text(words, "bold")


def usd(value: Decimal | str | float | None) -> str:
    """Format dollars with their significant digits; small amounts do not become zero."""
    if value is None:
        return "unknown"
    amount = Decimal(str(value))
    if amount == 0:
        return "$0"
    digits = 2 if abs(amount) >= 1 else 4 if abs(amount) >= Decimal("0.01") else 6
    whole, _, cents = f"{amount:,.{digits}f}".partition(".")
    return f"${whole}.{cents.rstrip('0').ljust(2, '0')}"


def amount(unit: str, value: Any) -> str:
    return usd(value) if unit == "usd" else f"{int(value):,}"


def moment(at: float | None) -> str:
    """Format a time in local time, to the second."""
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def span(seconds: float) -> str:
    """Format a duration by its two largest units: 2h 5m."""
    left, parts = max(int(seconds), 0), []
    for name, size in _UNITS:
        if left >= size:
            parts.append(f"{left // size}{name}")
            left %= size
    return " ".join(parts[:2]) or "0s"
