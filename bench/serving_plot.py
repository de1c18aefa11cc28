"""Throughput against latency as an SVG: a panel for the first token, one for the time between tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 260, 60, 36
_COLOURS = {"p50": "#2f7ed8", "p90": "#8a63d2", "p99": "#d9483b"}
_LEAST_S = 1e-6  # pieces that came together have no time between them
Points = Sequence[tuple[str, float, Sequence[float]]]


def plot(panels: dict[str, Points]) -> str:
    """The SVG of panels of points (name, tokens per second, percentiles 50, 90 and 99 in seconds)."""
    parts = [_panel(title, sorted(points, key=lambda one: one[1]), at * 510) for at, (title, points) in enumerate(panels.items())]  # fmt: skip
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {510 * len(parts)} {_HEIGHT + _TOP + 50}"'
    return f'{start} font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'


def _panel(title: str, points: Points, left: float) -> str:
    points = [(load, rate, [max(_LEAST_S, time) for time in times]) for load, rate, times in points]
    values = [1e3 * time for _, _, times in points for time in times] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.floor(math.log10(max(values))) + 1
    most = max((rate for _, rate, _ in points), default=1.0) * 1.1

    def x(rate: float) -> float:
        return left + _LEFT + rate / most * _WIDTH

    def y(ms: float) -> float:
        return _TOP + (high - math.log10(ms)) / (high - low) * _HEIGHT

    out = [_text(x(0), 20, f"{title}, ms", "start"), _text(x(most / 2), y(10**low) + 40, "tokens/s of all answers")]
    for power in range(low, high + 1):
        out.append(f'<path d="M{x(0):.1f} {y(10**power):.1f}H{x(most):.1f}" stroke="#ddd"/>')
        out.append(_text(x(0) - 6, y(10**power) + 4, f"{10.0**power:g}", "end"))
    out += [_text(x(most * part / 4), y(10**low) + 18, f"{most * part / 4:.3g}") for part in range(5)]
    for index, (name, colour) in enumerate(_COLOURS.items()):
        places = [(load, x(rate), y(1e3 * times[index])) for load, rate, times in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for _, a, b in places)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"><title>{escape(load)}</title></circle>' for load, a, b in places]  # fmt: skip
        out.append(_text(x(most) - 70 + 35 * index, 20, name, "start", colour))
    return "".join(out)


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
