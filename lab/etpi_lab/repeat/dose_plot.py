"""The chart of a sweep: differences with their intervals over the variable."""

from __future__ import annotations

import math
from collections.abc import Sequence

from etpi_resources.charts import CURVES, INK, frame, line_between, text_at


def dose_plot(
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, str, float, float, float]]]],
    x_label: str,
    y_label: str,
    least: float,
    log_x: bool = False,
) -> str:
    """Plot differences with their intervals over a variable, with the band of differences too small to matter.

    Args:
        series: (name, [(x, x as text, difference, low, high), ...]) of each curve, in order of x.
        least: the smallest difference that matters; the band is drawn from -least to least.
        log_x: logarithmic x axis; only positive x are drawn.
    """
    left, right, top, bottom, width, height = 58, 18, 46, 52, 640, 320
    place = math.log10 if log_x else float
    curves = [(name, [(place(p[0]), *p[1:]) for p in pts if not log_x or p[0] > 0]) for name, pts in series]
    points = [point for _, pts in curves for point in pts]
    if not points:
        return frame(width, 40, title, [text_at(left, 24, "nothing measured yet")])
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    margin = (x1 - x0) * 0.06 or 1.0
    x0, x1 = x0 - margin, x1 + margin
    y0, y1 = min(-1.5 * least, *(p[3] for p in points)), max(1.5 * least, *(p[4] for p in points))

    def at_x(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (width - left - right)

    def at_y(y: float) -> float:
        return top + (y1 - y) / (y1 - y0) * (height - top - bottom)

    body = [
        f'<rect x="{left}" y="{at_y(least):.1f}" width="{width - left - right}" '
        f'height="{at_y(-least) - at_y(least):.1f}" fill="#eef0f3"/>',
        line_between(left, at_y(0), width - right, at_y(0), INK),
        text_at(left, 14, f"{y_label}; grey: under {least:g}, too small to matter", size=11),
        text_at((left + width - right) / 2, height - 6, x_label, "middle"),
    ]
    for tick in _ticks(y0, y1):
        body.append(text_at(left - 6, at_y(tick) + 4, f"{tick:+.1f}" if tick else "0", "end", 11))
        body.append(line_between(left - 3, at_y(tick), left, at_y(tick), INK))
    last = -math.inf  # labels that would overlap are left out
    for x, text in sorted({(p[0], p[1]) for p in points}):
        if at_x(x) - last >= 7 * len(text) + 6:
            body.append(text_at(at_x(x), height - bottom + 18, text, "middle", 11))
            last = at_x(x)
    body += _curve_legend([name for name, _ in curves], left, 32)
    for number, (_, pts) in enumerate(curves):
        colour, aside = CURVES[number % len(CURVES)], 5 * (number - (len(curves) - 1) / 2)
        spots = [(at_x(x) + aside, at_y(y)) for x, _, y, _, _ in pts]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1" opacity="0.5"/>')
        for (px, py), (_, _, _, low, high) in zip(spots, pts, strict=True):
            body.append(line_between(px, at_y(low), px, at_y(high), colour, 2))
            body.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"/>')
    return frame(width, height, title, body)


def _curve_legend(names: Sequence[str], x: float, y: float) -> list[str]:
    parts = []
    for number, name in enumerate(name for name in names if name):
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{CURVES[number % len(CURVES)]}"/>')
        parts.append(text_at(x + 9, y, name))
        x += 26 + 7 * len(name)
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return multiples of 0.1, 0.2, 0.5 or 1 between two values, at most eight."""
    step = next(step for step in (0.1, 0.2, 0.5, 1.0, high - low) if (high - low) / step <= 8)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
