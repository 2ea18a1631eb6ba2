"""Line charts as plain SVG for the report page: no drawing library, the page's own colours, values on hover.

Matplotlib draws the figures of the documents (`figures.py`); the page does without it, so that an installation which
only reports has a hundred megabytes less to carry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Okabe & Ito, told apart by the colour-blind; the page's ink first, so that one curve alone is plain
COLOURS = ("currentColor", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C00")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
WIDE, HIGH = 380, 260  # of a panel, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 24, 40  # around the plot
DOTS = 12  # at most so many of a curve's points can be asked for their value

Line = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Panel:
    """One plot: lines {name: (x, y)} with their axes; `zero` draws the line y = 0."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Line]
    log_x: bool = False
    log_y: bool = False
    zero: bool = False


@dataclass(frozen=True)
class Scale:
    """Values low ... high laid over places begin ... end."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    def place(self, value: float) -> float:
        """Where a value stands.

        >>> Scale(1, 100, 0, 10, log=True).place(10)
        5.0
        """
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.begin + (self.end - self.begin) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values within the axis: 1, 2 or 5 times a power of ten.

        >>> Scale(0, 48, 0, 1, log=False).ticks()
        [0.0, 10.0, 20.0, 30.0, 40.0]
        >>> Scale(1, 1500, 0, 1, log=True).ticks()
        [1.0, 10.0, 100.0, 1000.0]
        """
        if self.log:
            low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if high - low <= 2 else (1,)
            every = 1 if high - low <= 8 else 3
            found = [step * 10.0**power for power in range(low, high + 1, every) for step in steps]
        else:
            rough = (self.high - self.low) / 5
            ten = 10.0 ** math.floor(math.log10(rough))
            step = next(s * ten for s in (1, 2, 5, 10) if s * ten >= rough * 0.999)
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            found = [round(k * step, 12) for k in range(first, last + 1)]
        return [tick for tick in found if self.low * 0.999999 <= tick <= self.high * 1.000001 or tick == 0]


def chart(panels: Sequence[Panel], names: Sequence[str] = ()) -> str:
    """The panels side by side, and one legend below: a piece of HTML that wraps on narrow screens.

    names: all lines of the page in order, so that one name has one colour in all of its charts.

    >>> chart([Panel("by round", "round", "HR", {"fedmf": ([1, 2], [10.0, 12.0])})]).count("<polyline")
    1
    """
    shown = dict.fromkeys(name for panel in panels for name in panel.lines)
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*names, *shown]))}
    drawn = "".join(_panel(panel, numbers) for panel in panels)
    keys = "".join(f"<span>{_key(numbers[name])} {escape(name)}</span>" for name in shown)
    return f'<div class="panels">{drawn}</div><div class="legend">{keys}</div>'


def _pen(number: int) -> str:
    turned = number + number // len(COLOURS)  # when the colours begin again, the dashes go on by one
    dash = DASHES[turned % len(DASHES)]
    return f'stroke="{COLOURS[number % len(COLOURS)]}" fill="none" stroke-width="1.6"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _key(number: int) -> str:
    return f'<svg viewBox="0 0 26 8" width="26" height="8"><line x1="0" y1="4" x2="26" y2="4" {_pen(number)}/></svg>'


def _clean(line: Line, panel: Panel) -> list[tuple[float, float]]:
    """Points that can be drawn: finite, and above zero where an axis is logarithmic."""
    points = [(float(x), float(y)) for x, y in zip(*line, strict=True)]
    return [
        (x, y)
        for x, y in points
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not panel.log_x) and (y > 0 or not panel.log_y)
    ]


def _axis(values: Sequence[float], begin: float, end: float, log: bool) -> Scale:
    low, high = (min(values), max(values)) if values else (1.0, 2.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return Scale(low, high, begin, end, log)


def _panel(panel: Panel, numbers: Mapping[str, int]) -> str:
    lines = {name: _clean(line, panel) for name, line in panel.lines.items()}
    points = [point for line in lines.values() for point in line]
    across = _axis([x for x, _ in points], LEFT, WIDE - RIGHT, panel.log_x)
    heights = [y for _, y in points] + ([0.0] if panel.zero and not panel.log_y else [])
    up = _axis(heights, HIGH - BOTTOM, TOP, panel.log_y)
    parts = [
        f'<svg viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" role="img" '
        f'aria-label="{escape(panel.title)}" font-size="11" fill="currentColor">',
        f'<text x="{(LEFT + WIDE) / 2}" y="14" text-anchor="middle" font-weight="600">{escape(panel.title)}</text>',
    ]
    for tick in across.ticks():
        x = across.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HIGH - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HIGH - BOTTOM + 14}" text-anchor="middle">{_short(tick)}</text>')
    for tick in up.ticks():
        y = up.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDE - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    if panel.zero:
        y = up.place(0)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDE - RIGHT}" y2="{y:.1f}" stroke="currentColor"/>')
    middle = (TOP + HIGH - BOTTOM) / 2
    parts.append(f'<text x="{(LEFT + WIDE) / 2}" y="{HIGH - 6}" text-anchor="middle">{escape(panel.x)}</text>')
    parts.append(f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(panel.y)}</text>')
    for name, line in lines.items():
        number = numbers[name]
        at = [(across.place(x), up.place(y)) for x, y in line]
        parts.append(f'<polyline {_pen(number)} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>')
        every = max(1, -(-len(line) // DOTS))
        for (x, y), (px, py) in list(zip(line, at, strict=True))[::every]:
            words = escape(f"{name}: {panel.x} {x:.4g}, {panel.y} {y:.4g}")
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{colour}"><title>{words}</title></circle>')
    return "".join(parts) + "</svg>"


def _short(value: float) -> str:
    """A tick's label.

    >>> [_short(v) for v in (0.0, 0.001, 2.5, 20000.0)]
    ['0', '0.001', '2.5', '20,000']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
