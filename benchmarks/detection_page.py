"""The tables of docs/detection.md and benchmarks/detection.md, made from the figures of a benchmark run.

``detection.py RUNS --page`` writes the figures to ``detection.json`` and the tables into both pages.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detection_figures import OWN

PAGE = Path(__file__).parents[1] / "docs" / "detection.md"
NOTES = Path(__file__).with_name("detection.md")
FIGURES = Path(__file__).with_name("detection.json")
ALL, CAPPED = "all runs", "capped failures, without InterCode"
# Detectors that do nothing as shipped, and variants: the benchmark prints them all.
_LEFT_OUT = frozenset(
    {
        "OpenHands SDK",
        "OpenHands V0, interactive",
        "goose, limit 3",
        "Roo Code",
        "Cline, change 12543",
        "Qwen Code, heuristics on",
        "crewAI",
        "Gemini CLI before 2026-07",
        "Gemini CLI, patterns repaired",
        "OpenHands SDK, thoughts aside",
        "goose, as shipped",
        "opencode, as shipped",
        "Cline CLI",
        "OpenClaw, as shipped",
        "browser-use, actions only",
    }
)
_SECTION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Figures = dict[str, Any]


def figures_of(result: dict[str, Any]) -> Figures:
    """The part of a benchmark's result that the page shows."""
    return {
        "soon": result["soon"],
        "made_up": {kind: _letters(shapes) for kind, shapes in result["made_up"].items()},
        "groups": {
            title: {
                name: _line(line)
                for name, line in result["groups"][title].items()
                if name == OWN or not name.startswith(OWN)
            }
            for title in (ALL, CAPPED)
        },
        "touched": [
            {"id": run["id"], "verdict": (run["read"] or {}).get("verdict", "not read"), "story": run["story"][-1]}
            for run in result["successful_runs_touched"]
        ],
    }


def _letters(shapes: dict[str, dict[str, str]]) -> dict[str, str]:
    names = next(iter(shapes.values()))
    return {
        name: "".join(by[name] for by in shapes.values()) for name in names if name == OWN or not name.startswith(OWN)
    }


def _line(line: dict[str, Any]) -> dict[str, Any]:
    share = line["shares"]["hard"]
    return {
        "rates": {
            name: [rate["hits"], rate["of"], *_percents(rate["interval"])] for name, rate in line["rates"].items()
        },
        "saved": [*_percents([share["value"]], 2), *_percents(share["interval"])],
        "saved_by_stops": _percents([line["shares"]["stop"]["value"]], 2)[0],
        "own_minus_this": _percents(share["own_minus_this"]),
    }


def _percents(values: Iterable[float], digits: int = 1) -> list[float]:
    return [round(100 * value, digits) for value in values]


def updated(page: str, figures: Figures) -> str:
    """The page with its tables written anew."""
    tables = {
        "answers": _answers(figures),
        "rivals": _rivals(figures),
        "own": f"{_own(figures)} {_touched(figures)}\n",
    }
    return _SECTION.sub(lambda found: found[1] + tables[found[2]] + found[3], page)


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _answers(figures: Figures) -> str:
    """What an operator asks first."""
    loops, alike = figures["made_up"]["loops"][OWN], figures["made_up"]["look-alikes"][OWN]
    whole, capped = (figures["groups"][title][OWN] for title in (ALL, CAPPED))
    noticed, soon = len(loops) - loops.count("."), figures["soon"]
    ok = {what: whole["rates"][f"ok {what}"] for what in ("stop", "hard", "nudge")}
    touched, of = ok["hard"][:2]
    stalls = "; a person who read both found real stalls" if touched == _READ_AS_STALLS else ""
    word, stop = soon["word"], soon["stop"]
    share, in_capped = f"{whole['saved'][0]:.2f} %", f"{capped['saved'][0]:.0f} %"
    low, high = ok["nudge"][2:]
    answers = {
        "How many stuck runs are noticed?": f"{noticed} of {len(loops)} made-up loops; {loops.count('S')} are stopped",
        "How soon?": f"half of them get a notice by step {word}; half of those stopped end by step {stop}",
        "What does that save?": f"{share} of the tokens of failed public runs, {in_capped} in those that met a cap",
        "How many healthy runs are touched?": (
            f"{alike.count('S') + alike.count('b')} of {len(alike)} look-alikes; {touched} of {of:,} successful public "
            f"runs{stalls}"
        ),
        "How many get a notice?": f"{ok['nudge'][0]} of {of:,} successful public runs ({low:.1f} to {high:.1f} %)",
    }
    return _table(["question", "answer"], [[question, answer] for question, answer in answers.items()])


_READ_AS_STALLS = 2  # successful runs that are touched: verdicts.toml says what a reader saw


def _rivals(figures: Figures) -> str:
    loops, alike = figures["made_up"]["loops"], figures["made_up"]["look-alikes"]
    rows = []
    for name, line in figures["groups"][ALL].items():
        if name in _LEFT_OUT:
            continue
        capped = figures["groups"][CAPPED][name]["saved"][0]
        low, high = line["own_minus_this"]
        rows.append(
            [
                f"**{name}**" if name == OWN else name,
                _hits(line, "ok", ("stop", "hard", "nudge")),
                _hits(line, "failed", ("stop", "hard")),
                "{:.2f} [{:.1f} to {:.1f}]".format(*line["saved"]),
                f"{capped:.0f}",
                "" if name == OWN else f"{low:+.1f} to {high:+.1f}",
                _counts(loops[name], "Sbn"),
                _counts(alike[name], "Sb"),
            ]
        )
    of = {kind: figures["groups"][ALL][OWN]["rates"][f"{kind} hard"][1] for kind in ("ok", "failed")}
    heads = [
        "detector",
        f"ok: stopped / touched / nudged, of {of['ok']:,}",
        f"failed: stopped / touched, of {of['failed']:,}",
        "% of failed tokens saved",
        "% saved in runaways",
        "RunGuard minus it",
        f"loops: stopped / refused / nudged, of {len(loops[OWN])}",
        f"look-alikes: stopped / refused, of {len(alike[OWN])}",
    ]
    return _table(heads, rows)


def _touched(figures: Figures) -> str:
    runs = (f"`{run['id']}` ({run['story']}; reader: {run['verdict']})" for run in figures["touched"])
    return f"Successful runs that RunGuard touches: {', '.join(runs) or 'none'}."


def _own(figures: Figures) -> str:
    rates = figures["groups"][ALL][OWN]["rates"]
    told = (
        ("successful runs stopped", "ok stop"),
        ("stopped or refused a call", "ok hard"),
        ("nudged", "ok nudge"),
        ("failed runs stopped or refused a call", "failed hard"),
    )
    parts = [
        f"{what} {hits} of {of:,} ({low:.1f} to {high:.1f} %)"
        for what, name in told
        for hits, of, low, high in [rates[name]]
    ]
    return f"95 % intervals: {', '.join(parts)}."


def _hits(line: dict[str, Any], group: str, whats: Iterable[str]) -> str:
    return " / ".join(str(line["rates"][f"{group} {what}"][0]) for what in whats)


def _counts(letters: str, which: str) -> str:
    return " / ".join(str(letters.count(letter)) for letter in which)


def write(result: dict[str, Any]) -> None:
    figures = figures_of(result)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    for page in (PAGE, NOTES):
        page.write_text(updated(page.read_text(encoding="utf-8"), figures), encoding="utf-8")
