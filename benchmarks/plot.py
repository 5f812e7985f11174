"""A plot as inline SVG: lines and points; the page around it defines the colours."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 16, 44
_TICKS: Final = 5  # at most, beside the zero


def number(value: float) -> str:
    """Format a number as a short label."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def step_of(largest: float) -> float:
    """Return the distance of ticks: 1, 2 or 5 times a power of ten."""
    rough = largest / _TICKS
    power = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


class Plot:
    """One plot with its axes; ``x`` and ``y`` run from 0 to their largest value."""

    def __init__(self, title: str, x_label: str, y_label: str, x_max: float, y_max: float) -> None:
        self.title, self.x_label, self.y_label = title, x_label, y_label
        self.x_step, self.y_step = step_of(x_max or 1.0), step_of(y_max or 1.0)
        self.x_max = x_max or 1.0
        self.y_max = ceil((y_max or 1.0) / self.y_step - 1e-9) * self.y_step
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

    def point(self, x: float, y: float, style: str, hint: str = "", label: str = "") -> None:
        at_x, at_y = self.x(x), self.y(y)
        self._parts.append(f'<circle class="{style}" cx="{at_x}" cy="{at_y}" r="5">{_hint(hint)}</circle>')
        if label:
            side = ("end", -9) if at_x > WIDTH * 0.6 else ("start", 9)
            self._parts.append(
                f'<text class="label" x="{at_x + side[1]:.1f}" y="{at_y + 4:.1f}" '
                f'text-anchor="{side[0]}">{escape(label)}</text>'
            )

    def svg(self) -> str:
        base, right = self.y(0), WIDTH - _RIGHT
        marks = []
        for tick in range(int(self.y_max / self.y_step + 1e-9) + 1):
            up = tick * self.y_step
            marks.append(f'<line class="grid" x1="{_LEFT}" y1="{self.y(up)}" x2="{right}" y2="{self.y(up)}"/>')
            marks.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{self.y(up) + 4:.1f}" '
                f'text-anchor="end">{escape(number(up))}</text>'
            )
        for tick in range(int(self.x_max / self.x_step + 1e-9) + 1):
            along = tick * self.x_step
            marks.append(
                f'<text class="tick" x="{self.x(along)}" y="{base + 16:.1f}" '
                f'text-anchor="middle">{escape(number(along))}</text>'
            )
        marks.append(
            f'<text class="axis" x="{(_LEFT + right) / 2}" y="{HEIGHT - 6}" '
            f'text-anchor="middle">{escape(self.x_label)}</text>'
        )
        marks.append(
            f'<text class="axis" x="12" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 12 '
            f'{HEIGHT / 2})">{escape(self.y_label)}</text>'
        )
        body = "".join(marks + self._parts)
        return (
            f'<figure><figcaption>{escape(self.title)}</figcaption><div class="wide"><svg '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{body}</svg></div></figure>'
        )


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
