"""What the calls of a store cost, grouped for a bill: by day, app, user, agent, model, tool or label."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from runguard.core.errors import PolicyError, nearest
from runguard.core.money import to_usd
from runguard.ledger.ledger import COUNTS, DaySums

NAMES: Final = ("app", "user", "agent", "model", "tool")
GROUPS: Final = ("day", *NAMES)


@dataclass(frozen=True, slots=True)
class BillRow:
    """The calls of one group. ``names`` are in the order that was asked for."""

    names: tuple[str, ...]
    calls: int  # of models
    tool_calls: int  # of tools that have a price
    input_tokens: int
    output_tokens: int
    usd: Decimal  # exact; without the calls that have no price
    unpriced: int  # calls without a price
    estimated: int  # calls whose usage or price is an estimate


def check_groups(by: Sequence[str]) -> tuple[str, ...]:
    """Return the groups, each once; raise ``PolicyError`` for an unknown one."""
    for name in by:
        if name not in GROUPS and not (name.startswith("label:") and name != "label:"):
            raise PolicyError(f"cannot group by {name!r}; {nearest(name, (*GROUPS, 'label:NAME'))}")
    return tuple(dict.fromkeys(by))


def bill_of(days: Mapping[str, DaySums], by: Sequence[str]) -> tuple[list[BillRow], BillRow]:
    """Return the rows of a bill, the most expensive first, and their total."""
    groups: dict[tuple[str, ...], list[int]] = {}
    total = [0] * len(COUNTS)
    for day, sums in days.items():
        for key, counts in sums.rows.items():
            facts = {"day": day, **dict(zip(NAMES, key, strict=False))}
            labels: dict[str, Any] = json.loads(key[-1]) if key[-1] else {}
            names = tuple(facts[name] if name in facts else str(labels.get(name[6:], "")) for name in by)
            row = groups.setdefault(names, [0] * len(COUNTS))
            for position, count in enumerate(counts):
                row[position] += count
                total[position] += count
    rows = [_row(names, counts) for names, counts in groups.items() if any(counts)]
    return sorted(rows, key=lambda row: (-row.usd, row.names)), _row(("",) * len(by), total)


def _row(names: tuple[str, ...], counts: Sequence[int]) -> BillRow:
    calls, tokens_in, tokens_out, nano, unpriced, estimated, tool_calls = counts
    return BillRow(names, calls, tool_calls, tokens_in, tokens_out, to_usd(nano), unpriced, estimated)
