"""Other rungs than the defaults, and the plot of what they save against what they touch."""

from typing import Any

from detection_figures import OWN, Line
from plot import Plot

REPETITION = ((3, 4, 5), (3, 5, 6), (4, 6, 7), (4, 7, 8), (4, 8, 9), (5, 10, 11), (6, 12, 13))
STALL = ((3, 4, 5), (3, 5, 6), (4, 6, 7), (4, 8, 9))
_MOST_TOUCHED = 8  # successful runs; rivals beyond are off the plot
_STYLE = """<style>
text { font: 12px sans-serif; fill: #555 } .label { fill: #222 } .grid { stroke: #ddd } .own { fill: #0b57d0;
stroke: #0b57d0 }
polyline.own { fill: none; stroke-width: 2 } .rival { fill: #b3261e } .now { fill: #fff; stroke: #0b57d0;
stroke-width: 3 }
@media (prefers-color-scheme: dark) { text { fill: #aaa } .label { fill: #eee } .grid { stroke: #444 }
.now { fill: #111 } }
</style>"""


def _settings(rule: str, ladders: tuple[tuple[int, int, int], ...]) -> dict[str, dict[str, Any]]:
    names = ("nudge", "block", "stop")
    return {
        f"{OWN}, {rule} {'/'.join(map(str, rungs))}": {"rules": {rule: dict(zip(names, rungs, strict=True))}}
        for rungs in ladders
    }


_DRAWN = _settings("repetition", REPETITION)
SETTINGS = _DRAWN | _settings("stall", STALL)


def draw(found: dict[str, Line]) -> str:
    """Tokens saved after the first hard action against successful runs touched: repetition's rungs as a line, rivals as
    points.
    """
    places = {name: (line.rates["ok hard"].hits, 100 * line.shares["hard"].value) for name, line in found.items()}
    shown = {name: place for name, place in places.items() if place[0] <= _MOST_TOUCHED and place[1]}
    plot = Plot(
        "Failed-run tokens saved against successful runs touched",
        "successful runs with a refused call or a stop",
        "failed-run tokens saved, %",
        _MOST_TOUCHED,
        max(saved for _, saved in shown.values()),
    )
    plot.line([places[name] for name in _DRAWN], "own")
    labelled: set[tuple[int, int]] = set()
    for name, (touched, saved) in sorted(shown.items(), key=lambda item: item[0] == OWN):  # the defaults on top
        hint = f"{name}: {touched} successful runs touched, {saved:.2f} % saved"
        if name == OWN or name in _DRAWN:
            plot.point(touched, saved, "now" if name == OWN else "own", hint)
        elif not name.startswith(OWN):
            where = touched, round(10 * saved)
            plot.point(touched, saved, "rival", hint, "" if where in labelled else name.split(",")[0])
            labelled.add(where)
    figure = plot.svg()
    svg = figure[figure.index("<svg") : figure.index("</svg>")] + "</svg>"
    return svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace(">", f">{_STYLE}", 1) + "\n"
