"""Figures of spending: what one agent took from one model inside one tool, and their sums."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from runguard.core.money import to_usd

LINES_KEPT: Final = 256


class Summable:
    """A dataclass of counts that can be added up."""

    __slots__: tuple[str, ...] = ()

    def add(self, other: Self, sign: int = 1) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


@dataclass(slots=True)
class Entry(Summable):
    """What one agent took from one model inside one tool, and what the tool itself cost."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    thinking: int = 0
    nano: int = 0
    unpriced: int = 0  # calls without a known price: ``nano`` does not contain their cost
    estimated: int = 0  # calls whose usage or rate was estimated
    tool_calls: int = 0  # calls of tools that have a price
    tool_nano: int = 0  # of ``nano``, what those cost
    searches: int = 0  # on the model's side
    search_nano: int = 0  # of ``nano``, what those cost


Tally = dict[tuple[str, str, str], Entry]  # agent, model, tool


def add_tally(into: Tally, more: Mapping[tuple[str, str, str], Entry], sign: int = 1) -> None:
    for key, entry in list(more.items()):
        if key not in into and len(into) >= LINES_KEPT * 4:
            key = ("(others)", "(others)", "(others)")
        into.setdefault(key, Entry()).add(entry, sign)


def totals(entries: Iterable[Entry]) -> dict[str, Any]:
    total = Entry()
    for entry in entries:
        total.add(entry)
    return {
        "usd": to_usd(total.nano),
        "calls": total.calls,
        "tokens": total.input + total.output,
        "input_tokens": total.input,
        "output_tokens": total.output,
        "cached_tokens": total.cached,
        "thinking_tokens": total.thinking,
        "unpriced_calls": total.unpriced,
        "estimated_calls": total.estimated,
        "paid_tool_calls": total.tool_calls,
        "tools_usd": to_usd(total.tool_nano),
        "searches": total.searches,
        "searches_usd": to_usd(total.search_nano),
    }


def split_by(tally: Tally, position: int) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Entry]] = {}
    for key, entry in tally.items():
        if key[position]:
            groups.setdefault(key[position], []).append(entry)
    return {name: totals(entries) for name, entries in sorted(groups.items())}
