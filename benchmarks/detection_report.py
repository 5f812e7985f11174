"""The figures of the detection benchmark as text: aligned for a terminal, or in Markdown for a page."""

from collections.abc import Sequence
from typing import Any

from detection_figures import OWN, Judged, Line, Rate, Share, better_rivals
from replays import Verdict

NOT_READ = "NOT READ YET: read it, then add it to verdicts.toml"
_RATES = ("ok stop", "ok hard", "ok nudge", "failed stop", "failed hard")


class Report:
    def __init__(self, *, markdown: bool = False) -> None:
        self.markdown = markdown
        self._parts: list[str] = []

    def text(self) -> str:
        return "\n".join(self._parts)

    # ---- what is told
    # -------------------------------------------------------------------------------------------------

    def made_up(self, found: dict[str, dict[str, dict[str, Verdict]]]) -> None:
        for kind, shapes in found.items():
            self._title(f"Made-up {kind}: what RunGuard does ({Verdict.letter.__doc__})")
            for number, (name, verdicts) in enumerate(shapes.items(), 1):
                own = verdicts[OWN]
                self._item(f"{number:2} {own.letter} {name}{': ' if own.story else ''}{'; '.join(own.story)}")
        self._title("Made-up runs, one letter each in the order above")
        rows = []
        for name in next(iter(found["loops"].values())):
            cells = [name]
            for shapes in found.values():
                letters = "".join(verdicts[name].letter for verdicts in shapes.values())
                cells += [
                    f"`{letters}`" if self.markdown else letters,
                    " / ".join(str(letters.count(letter)) for letter in "Sbn"),
                ]
            rows.append(cells)
        self._table(["detector", *(head for kind in found for head in (kind, "S / b / n"))], rows)

    def group(self, title: str, runs: Sequence[Judged], found: dict[str, Line]) -> None:
        ok, failed = (sum(run.success is kind for run in runs) for kind in (True, False))
        spent = sum(sum(run.tokens) for run in runs if run.success is False)
        self._title(f"{title}: {len(runs):,} runs, {ok:,} ok, {failed:,} failed with {spent / 1e6:.1f} M tokens")
        columns = [column for column in _RATES if ok or not column.startswith("ok")]
        rows = [
            [
                name,
                *(_rate(line.rates[column]) for column in columns),
                _share(line.shares["hard"]),
                _share(line.shares["stop"]),
                "" if name == OWN else _span(line.shares["hard"].own_minus_this),
            ]
            for name, line in found.items()
        ]
        self._table(["detector", *columns, "saved after hard", "saved after stop", f"{OWN} minus it, hard"], rows)
        if ok:
            for what in ("stop", "hard"):
                self._item(_compared(better_rivals(found, what), what))

    def touched(self, runs: Sequence[Judged], read: dict[str, Any]) -> None:
        self._title("Successful runs that RunGuard would stop or refuse a call of, each with what its reader says")
        for run in runs:
            verdict = read.get(run.id)
            said = f"{verdict['verdict']}: {verdict['reason']}" if verdict else NOT_READ
            self._item(f"{run.id}, {len(run.tokens)} turns: {'; '.join(run.verdicts[OWN].story)}. {said}")
        if not runs:
            self._item("none")

    def by_hand(self, labels: dict[str, dict[str, list[int]]]) -> None:
        if not labels:
            return
        self._title("Runs labelled by hand: touched by a hard action (by any action)")
        names = next(iter(labels.values()))
        heads = [f"{label} ({next(iter(cells.values()))[0]})" for label, cells in labels.items()]
        self._table(
            ["detector", *heads],
            [[name, *(f"{cells[name][1]} ({cells[name][2]})" for cells in labels.values())] for name in names],
        )

    # ---- how
    # ----------------------------------------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        self._parts.append(f"\n## {text}\n")

    def _item(self, text: str) -> None:
        self._parts.append(f"- {text}")

    def _table(self, heads: list[str], rows: list[list[str]]) -> None:
        if self.markdown:
            lines = [heads, ["---"] * len(heads), *rows]
            self._parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n")
            return
        widths = [max(len(cells[at]) for cells in [heads, *rows]) for at in range(len(heads))]
        self._parts.append(
            "\n".join(
                "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
                for cells in [heads, *rows]
            )
        )


def _rate(rate: Rate) -> str:
    if not rate.of:
        return "-"
    low, high = rate.interval
    return f"{rate.hits} = {100 * rate.hits / rate.of:.1f} % [{100 * low:.1f}-{100 * high:.1f}]"


def _share(share: Share) -> str:
    low, high = share.interval
    return f"{100 * share.value:.2f} % [{100 * low:.1f}-{100 * high:.1f}]"


def _span(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:+.1f} .. {100 * interval[1]:+.1f}"


def _compared(found: dict[str, list[str]], what: str) -> str:
    touch = {"stop": "stop", "hard": "touch"}[what]
    careful, more = ("; ".join(found[which]) or "none" for which in ("as careful", "save more"))
    return f"Rivals that {touch} no more successful runs than {OWN}: {careful}. Of these save more after that: {more}."
