"""Plots as inline SVG, drawn by hand: lines, bars and points. Colours are CSS variables of the page, so light and dark are the page's business."""

from collections.abc import Sequence
from html import escape
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 44
_TICKS: Final = 4


def number(value: float) -> str:
    """A short label."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


class Plot:
    """One plot with its axes. ``x`` and ``y`` run from 0 to their largest value."""

    def __init__(self, title: str, x_label: str, y_label: str, x_max: float, y_max: float, *, y_prefix: str = "") -> None:
        self.title, self.x_label, self.y_label, self.y_prefix = title, x_label, y_label, y_prefix
        self.x_max, self.y_max = x_max or 1.0, y_max or 1.0
        self._parts: list[str] = []

    def x(self, value: float) -> float:
        return round(_LEFT + value / self.x_max * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - value / self.y_max * (HEIGHT - _TOP - _BOTTOM), 1)

    def line(self, points: Sequence[tuple[float, float]], style: str, hint: str = "") -> None:
        if not points:
            return
        path = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{style}" points="{path}">{_hint(hint)}</polyline>')

    def bar(self, start: float, end: float, height: float, style: str, hint: str = "") -> None:
        left, right, top = self.x(start), self.x(end), self.y(height)
        wide = max(right - left - 1, 1)
        self._parts.append(f'<rect class="{style}" x="{left}" y="{top}" width="{wide:.1f}" height="{max(self.y(0) - top, 0):.1f}">{_hint(hint)}</rect>')

    def point(self, x: float, y: float, style: str, hint: str = "", label: str = "") -> None:
        at_x, at_y = self.x(x), self.y(y)
        self._parts.append(f'<circle class="{style}" cx="{at_x}" cy="{at_y}" r="5">{_hint(hint)}</circle>')
        if label:
            side = ("end", -9) if at_x > WIDTH * 0.7 else ("start", 9)
            self._parts.append(f'<text class="label" x="{at_x + side[1]:.1f}" y="{at_y + 4:.1f}" text-anchor="{side[0]}">{escape(label)}</text>')

    def svg(self) -> str:
        base, right = self.y(0), WIDTH - _RIGHT
        marks = []
        for tick in range(_TICKS + 1):
            up, along = self.y_max * tick / _TICKS, self.x_max * tick / _TICKS
            marks.append(f'<line class="grid" x1="{_LEFT}" y1="{self.y(up)}" x2="{right}" y2="{self.y(up)}"/>')
            marks.append(f'<text class="tick" x="{_LEFT - 6}" y="{self.y(up) + 4:.1f}" text-anchor="end">{escape(self.y_prefix + number(up))}</text>')
            marks.append(f'<text class="tick" x="{self.x(along)}" y="{base + 16:.1f}" text-anchor="middle">{escape(number(along))}</text>')
        marks.append(f'<text class="axis" x="{(_LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_label)}</text>')
        marks.append(f'<text class="axis" x="12" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 12 {HEIGHT / 2})">{escape(self.y_label)}</text>')
        body = "".join(marks + self._parts)
        return (
            f'<figure><figcaption>{escape(self.title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{body}</svg></figure>'
        )


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
