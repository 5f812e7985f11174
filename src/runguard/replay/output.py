"""The result as one self-contained page: tables and plots, no script, no request to anywhere, light and dark."""

from html import escape
from typing import Final

from runguard.replay.formatting import cost, count, money
from runguard.replay.results import RunResult
from runguard.replay.steps import Faults
from runguard.replay.svg import Plot, key_of
from runguard.replay.table import MEASURES, Rows, group_cells
from runguard.replay.totals import BINS, Totals

_NANO: Final = 1e9
_STYLES: Final = ("first", "second")
_WORDS: Final = ("policy", "would have been", "would have been, second policy")  # columns of words, not of numbers
_CSS: Final = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c2024; --dim: #60646c; --rule: #d9d9e0;
  --first: #0a6cc9; --second: #b4530a; --bad: #c62a2f; --many: #8b8d98; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #111113; --fg: #edeef0; --dim: #b0b4ba; --rule: #363a3f; --first: #70b8ff; --second: #ffa057;
  --bad: #ff9592; --many: #696e77; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 1400px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h1, h2, p, li { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top;
white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
td.id, td.text, td.story { white-space: normal; overflow-wrap: anywhere; } td.id { min-width: 7rem; max-width: 22rem; }
td.text { min-width: 7rem; } td.story { min-width: 14rem; text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1.5rem;
margin-top: 2rem; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto;
min-width: 32rem; }
.key { color: var(--dim); font-size: 13px; margin: 0; }
.key span { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .35em 0 .6em; }
.key span:first-child { margin-left: 0; }
.key .first { background: var(--first); } .key .second { background: var(--second); }
.key .many { background: var(--many); }
.key .stop { background: var(--bad); }
.grid { stroke: var(--rule); } .tick, .axis, .label { fill: var(--dim); font-size: 12px; } .label { fill: var(--fg); }
polyline { fill: none; stroke-width: 2; } polyline.first { stroke: var(--first); }
polyline.second { stroke: var(--second); stroke-dasharray: 5 3; }
polyline.many { stroke: var(--many); stroke-width: 1; opacity: .6; }
rect.first, circle.first { fill: var(--first); opacity: .8; } rect.second, circle.second { fill: var(--second);
opacity: .8; } circle.stop { fill: var(--bad); }
.dim { color: var(--dim); } .bad { color: var(--bad); }
"""


def page_of(sources: list[str], totals: list[Totals], rows: Rows, faults: Faults) -> str:
    policy = totals[0].name if len(totals) < 2 else f"{totals[0].name} against {totals[1].name}"
    parts = [
        "<!doctype html>",
        (
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
            'initial-scale=1">'
        ),
        f"<title>RunGuard replay</title><style>{_CSS}</style></head><body>",
        "<h1>What RunGuard would have done</h1>",
        (
            f"<p>{escape(', '.join(sources[:10]))}{' and others' if len(sources) > 10 else ''}, under "
            f"{escape(policy)}.</p>"
        ),
        *(_summary(each, len(totals) > 1) for each in totals),
        _notes(totals[0]),
        '<div class="plots">',
        _curves(totals[0], "Cost per turn", "USD", totals[0].cost_sums, column=1, scale=_NANO, prefix="$"),
        _curves(totals[0], "Prompt growth", "prompt tokens", totals[0].prompt_sums, column=0),
        _where_plot(totals),
        _saved_plot(totals),
        "</div>",
        _rules(totals),
        _runs(rows),
        _false_stops(totals),
        _skipped(faults),
        "</body></html>\n",
    ]
    return "\n".join(parts)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(
        f'<th class="text">{escape(name)}</th>' if name in _WORDS else f"<th>{escape(name)}</th>" for name in head
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _summary(totals: Totals, several: bool) -> str:
    title = f"<h2>{escape(totals.name)}</h2>" if several else ""
    rows = [[_cell(text) for text in (name, *group_cells(group))] for name, group in totals.groups.items()]
    return title + _table(["", *MEASURES], rows)


def _notes(totals: Totals) -> str:
    """What the figures do not know."""
    notes = []
    if totals.unpriced:
        notes.append(
            f"{totals.unpriced} of {totals.all.model_calls} model calls have no price and count as $0: give "
            "one under prices in the policy, or --model."
        )
    if totals.estimated:
        notes.append(
            f"Tokens of {totals.estimated} of {totals.all.model_calls} model calls are estimated from the "
            "length of the texts."
        )
    return f'<p class="dim">{escape(" ".join(notes))}</p>' if notes else ""


def _rules(totals: list[Totals]) -> str:
    rows = [
        [
            _cell(name),
            _cell(each.name, "text"),
            *(_cell(str(n)) for n in (rule.nudge, rule.block, rule.stop, rule.false_stops)),
            _cell(money(rule.saved.nano)),
        ]
        for each in totals
        for name, rule in sorted(each.rules.items())
    ]
    head = [
        "rule",
        "policy",
        "nudged first",
        "blocked first",
        "stopped",
        "of those labelled a success",
        "money after its stops",
    ]
    return f"<h2>Rules</h2>{_table(head, rows)}" if rows else ""


def _runs(rows: Rows) -> str:
    shown = [
        [
            _cell(run.id, "id"),
            *map(_story, results),
            *(_cell(text) for text in (count(run.model_calls), count(run.tool_calls), count(run.tokens), cost(run))),
        ]
        for results in rows.shown
        for run in results[:1]
    ]
    several = bool(rows.shown) and len(rows.shown[0]) > 1
    head = [
        "run",
        "would have been",
        *(["would have been, second policy"] if several else []),
        "model calls",
        "tool calls",
        "tokens",
        "cost",
    ]
    more = f'<p class="dim">and {rows.hidden} more that would have been touched</p>' if rows.hidden else ""
    return f"<h2>Runs</h2>{_table(head, shown)}{more}"


def _story(run: RunResult) -> str:
    verdicts = [verdict for action in ("nudge", "block", "stop") if (verdict := run.first(action)) is not None]
    lines = []
    for verdict in verdicts:
        spent = f"{count(verdict.after.tokens)} tokens" + (
            f", {money(verdict.after.nano)}" if run.usd is not None else ""
        )
        lines.append(escape(f"after call {verdict.turn}: {verdict}; then {spent}"))
    return f'<td class="story">{"<br>".join(lines) or "left alone"}</td>'


def _false_stops(totals: list[Totals]) -> str:
    parts = []
    for each in totals:
        if each.false_stop_count:
            names = "".join(f"<li>{escape(name)}</li>" for name in each.false_stops)
            parts.append(
                f'<h2 class="bad">Stopped although labelled a success, under {escape(each.name)}: '
                f"{each.false_stop_count}</h2><ul>{names}</ul>"
            )
    return "".join(parts)


def _skipped(faults: Faults) -> str:
    if not faults.count:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in faults.first)
    return f"<h2>Records that could not be read: {faults.count}</h2><ul>{lines}</ul>"


# ---- plots ----------------------------------------------------------------------------------------------------------


def _turns(totals: Totals) -> int:
    """How many turns are worth drawing: as many as one run in a hundred has."""
    enough = max(totals.turn_counts[0] // 100, 1)
    return max(sum(1 for seen in totals.turn_counts if seen >= enough), 2)


def _curves(
    totals: Totals, title: str, unit: str, sums: list[int], *, column: int, scale: float = 1.0, prefix: str = ""
) -> str:
    """The mean of all runs, and the most expensive runs. ``column``: of their curves, prompt tokens or cost."""
    turns = _turns(totals)
    counted = zip(sums, totals.turn_counts[:turns], strict=False)
    means: list[tuple[float, float]] = [
        (turn, total / runs / scale) for turn, (total, runs) in enumerate(counted, 1) if runs
    ]
    lines: list[tuple[str, list[tuple[float, float]], int | None]] = [
        (name, [(turn, values[column] / scale) for turn, values in enumerate(curve[:turns], 1)], stop)
        for _, name, curve, stop in totals.lines
    ]
    top = max((value for points in (means, *(line[1] for line in lines)) for _, value in points), default=1.0)
    stops = (
        [("stop", "would have been stopped")]
        if any(stop is not None and 0 < stop <= len(points) for _, points, stop in lines)
        else []
    )
    key = key_of(("first", "mean of all runs"), ("many", "the most expensive runs"), *stops)
    plot = Plot(title, "model call of the run", unit, turns, top, y_prefix=prefix, whole="x", key=key)
    for name, points, stop in lines:
        plot.line(points, "many", name)
        if stop is not None and 0 < stop <= len(points):
            plot.point(*points[stop - 1], "stop", f"{name}: would have been stopped after call {stop}")
    plot.line(means, "first", "mean of all runs")
    return plot.svg()


def _where_plot(totals: list[Totals]) -> str:
    top = max((height for each in totals for height in each.stop_shares), default=1)
    plot = Plot(
        "Where stops fall",
        "% of the run's model calls made by then",
        "runs stopped",
        100,
        top,
        whole="y",
        key=_policies(totals),
    )
    width = 100 / BINS / len(totals)
    for number, each in enumerate(totals):
        for position, height in enumerate(each.stop_shares):
            if height:
                start = position * 100 / BINS + number * width
                plot.bar(
                    start,
                    start + width,
                    height,
                    _STYLES[number],
                    f"{each.name}: {height} runs stopped at {position * 100 // BINS} % or later",
                )
    return plot.svg()


def _saved_plot(totals: list[Totals]) -> str:
    points = [
        (name, rule, number) for number, each in enumerate(totals) for name, rule in each.rules.items() if rule.stop
    ]
    by_money = any(rule.saved.nano for _, rule, _ in points)
    saved = [
        (name, rule.false_stops, rule.saved.nano / _NANO if by_money else rule.saved.tokens, number)
        for name, rule, number in points
    ]
    right, top = (
        max((false for _, false, _, _ in saved), default=1),
        max((value for _, _, value, _ in saved), default=1.0),
    )
    title = "Saved against false stops, by rule"
    y = "USD after the stops" if by_money else "tokens after the stops"
    prefix = "$" if by_money else ""
    plot = Plot(
        title,
        "stops of runs labelled a success",
        y,
        max(right, 1),
        top or 1.0,
        y_prefix=prefix,
        whole="x",
        key=_policies(totals),
        inset=True,
    )
    for name, false, value, number in saved:
        plot.point(false, value, _STYLES[number], f"{totals[number].name}: {name}, {false} false stops", name)
    return plot.svg()


def _policies(totals: list[Totals]) -> str:
    return (
        key_of(*((style, each.name) for style, each in zip(_STYLES, totals, strict=False))) if len(totals) > 1 else ""
    )
