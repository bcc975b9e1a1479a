"""Small charts as inline SVG, which print, scale to a phone and need no script.

They contain their own colours, so that they also work as images in markdown.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = {
    "base": "#7a8594",
    "sft": "#0b6e4f",
    "rl": "#8338ec",
    "teacher": "#c8553d",
    "train": "#0b6e4f",
    "val": "#c8553d",
    "parsed": "#0b6e4f",
    "solved": "#8338ec",
}
INK, FAINT = "#2a2f36", "#d9dde3"


def as_image(svg: str, alt: str) -> str:
    """Return an SVG as a markdown image with a data URI, for pages that strip inline SVG."""
    return f"![{alt}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _frame(width: int, height: int, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}" '
        f'style="width:100%;max-width:{width}px;height:auto">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, width: float = 1, dash: str = "") -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{style}/>'


def _legend(names: Sequence[str], x: float, y: float, colours: Mapping[str, str] = COLOURS) -> list[str]:
    parts = []
    for name in names:
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{colours.get(name, INK)}"/>')
        parts.append(_text(x + 9, y, name))
        x += 22 + 7 * len(name)
    return parts


def interval_plot(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, float, float, float]]]],
    thresholds: dict[str, float] | None = None,
) -> str:
    """Plot rates with their intervals on a 0-1 axis.

    Args:
        title: for screen readers.
        rows: (label, [(series, value, low, high), ...]) from top to bottom.
        thresholds: label -> a threshold, drawn as a dashed line.
    """
    left = max(150, 20 + 7 * max((len(label) for label, _ in rows), default=0))  # 7 pixels a character
    right, width, top = 20, 640, 30
    scale = width - left - right
    series = list(dict.fromkeys(name for _, marks in rows for name, *_ in marks))
    body, y = _legend(series, left, 16), float(top)
    start = y
    for label, marks in rows:
        height = max(1, len(marks)) * 14 + 10
        body.append(_text(left - 10, y + height / 2 + 4, label, "end"))
        if thresholds and label in thresholds:
            x = left + thresholds[label] * scale
            body.append(_line(x, y + 2, x, y + height - 2, INK, 1, "3 2"))
        for i, (name, value, low, high) in enumerate(marks):
            row, colour = y + 12 + i * 14, COLOURS.get(name, INK)
            body.append(_line(left + low * scale, row, left + high * scale, row, colour, 2))
            body.append(f'<circle cx="{left + value * scale:.1f}" cy="{row:.1f}" r="4" fill="{colour}"/>')
        y += height
    axis = [_line(left + t * scale, start, left + t * scale, y) for t in (0, 0.25, 0.5, 0.75, 1)]
    ticks = [_text(left + t * scale, y + 16, f"{t:g}", "middle", 11) for t in (0, 0.25, 0.5, 0.75, 1)]
    return _frame(width, int(y + 24), title, axis + body + ticks)


def line_chart(
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    x_label: str,
    log_y: bool = False,
    colours: Mapping[str, str] = COLOURS,
) -> str:
    """Plot curves over a shared axis.

    Args:
        series: (name, [(x, y), ...]) of each curve.
        log_y: logarithmic y axis; only positive y are drawn.
        colours: of the curves, by name.
    """
    left, right, top, width, height = 52, 16, 28, 640, 260
    transform = math.log10 if log_y else float
    curves = [(n, [(x, transform(y)) for x, y in pts if not log_y or y > 0]) for n, pts in series]
    xs, ys = [x for _, pts in curves for x, _ in pts], [y for _, pts in curves for _, y in pts]
    if not xs:
        return _frame(width, 40, title, [_text(left, 24, "nothing recorded")])
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x0) / (x1 - x0) * (width - left - right),
            height - 34 - (y - y0) / (y1 - y0) * (height - 34 - top),
        )

    body = _legend(list(dict.fromkeys(name for name, _ in curves)), left, 16, colours)
    digits = max(0, 2 - math.floor(math.log10(y1 - y0)))
    for i in range(5):
        y = y0 + (y1 - y0) * i / 4
        _, py = place(x0, y)
        shown = 10**y if log_y else (0.0 if abs(y) < (y1 - y0) / 1000 else y)
        text = f"{shown:.1e}" if log_y or digits > 4 else f"{shown:,.{digits}f}"
        body += [_line(left, py, width - right, py), _text(left - 6, py + 4, text, "end", 11)]
        x = x0 + (x1 - x0) * i / 4
        x = round(x) if x1 - x0 >= 8 else x  # whole steps
        px, _ = place(x, y0)
        body.append(_text(px, height - 18, f"{x:.4g}", "middle", 11))
    body.append(_text((left + width) / 2, height - 4, x_label, "middle", 11))
    for name, points in curves:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(x, y) for x, y in points))
        body.append(f'<polyline points="{path}" fill="none" stroke="{colours.get(name, INK)}" stroke-width="1.8"/>')
    return _frame(width, height, title, body)


CURVES = ("#0b6e4f", "#c8553d", "#8338ec", "#3a6ea5", "#7a8594")
"""Colours of curves without a role."""


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
        return _frame(width, 40, title, [_text(left, 24, "nothing measured yet")])
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
        _line(left, at_y(0), width - right, at_y(0), INK),
        _text(left, 14, f"{y_label}; grey: under {least:g}, too small to matter", size=11),
        _text((left + width - right) / 2, height - 6, x_label, "middle"),
    ]
    for tick in _ticks(y0, y1):
        body.append(_text(left - 6, at_y(tick) + 4, f"{tick:+.1f}" if tick else "0", "end", 11))
        body.append(_line(left - 3, at_y(tick), left, at_y(tick), INK))
    last = -math.inf  # labels that would overlap are left out
    for x, text in sorted({(p[0], p[1]) for p in points}):
        if at_x(x) - last >= 7 * len(text) + 6:
            body.append(_text(at_x(x), height - bottom + 18, text, "middle", 11))
            last = at_x(x)
    body += _curve_legend([name for name, _ in curves], left, 32)
    for number, (_, pts) in enumerate(curves):
        colour, aside = CURVES[number % len(CURVES)], 5 * (number - (len(curves) - 1) / 2)
        spots = [(at_x(x) + aside, at_y(y)) for x, _, y, _, _ in pts]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1" opacity="0.5"/>')
        for (px, py), (_, _, _, low, high) in zip(spots, pts, strict=True):
            body.append(_line(px, at_y(low), px, at_y(high), colour, 2))
            body.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"/>')
    return _frame(width, height, title, body)


def _curve_legend(names: Sequence[str], x: float, y: float) -> list[str]:
    parts = []
    for number, name in enumerate(name for name in names if name):
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{CURVES[number % len(CURVES)]}"/>')
        parts.append(_text(x + 9, y, name))
        x += 26 + 7 * len(name)
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return multiples of 0.1, 0.2, 0.5 or 1 between two values, at most eight."""
    step = next(step for step in (0.1, 0.2, 0.5, 1.0, high - low) if (high - low) / step <= 8)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def bars(title: str, rows: Sequence[tuple[str, float]], unit: str = "") -> str:
    """Plot horizontal bars, (label, value) from top to bottom, each labelled with its value."""
    left, width, step = 170, 640, 22
    most = max((value for _, value in rows), default=0) or 1
    body = []
    for i, (label, value) in enumerate(rows):
        y = 6 + i * step
        length = value / most * (width - left - 90)
        body.append(_text(left - 8, y + 13, label, "end"))
        body.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="15" rx="2" fill="{COLOURS["sft"]}"/>')
        body.append(_text(left + length + 6, y + 13, _labelled(value, unit)))
    return _frame(width, 12 + step * max(1, len(rows)), title, body)


def _labelled(value: float, unit: str) -> str:
    if unit == " %":
        return f"{value:.1f} %" if value >= 0.05 or not value else "under 0.1 %"
    return f"{value:,.3g}{unit}"


def teacher_plot(title: str, points: Sequence[tuple[str, str, float, float, float, float]]) -> str:
    """Plot students against their teachers, with the diagonal.

    Args:
        points: (label, student's role, teacher's rate, student's rate, low and high end of its interval).
    """
    size, left, bottom, top = 420, 48, 40, 26
    scale = size - left - bottom

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x * scale, top + (1 - y) * scale

    (x0, y0), (x1, y1) = place(0, 0), place(1, 1)
    body = [_line(x0, y0, x1, y1, FAINT, 1.5, "4 3"), _line(x0, y0, x1, y0, INK), _line(x0, y0, x0, y1, INK)]
    for tick in (0, 0.5, 1):
        px, py = place(tick, tick)
        body += [_text(px, y0 + 16, f"{tick:g}", "middle", 11), _text(x0 - 6, py + 4, f"{tick:g}", "end", 11)]
    body += [_text((x0 + x1) / 2, y0 + 32, "teacher", "middle"), _text(x0 - 6, 10, "student", "end", 11)]
    free = top + 4.0  # the lowest free height of the labels, which are a column beside the axes
    for label, role, teacher, student, low, high in sorted(points, key=lambda point: -point[3]):
        x, y = place(teacher, student)
        body.append(_line(x, place(0, low)[1], x, place(0, high)[1], COLOURS[role], 2))
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[role]}"/>')
        beside = max(y, free)
        free = beside + 14
        body += [_line(x + 6, y, x1 + 20, beside), _text(x1 + 24, beside + 4, label, "start", 11)]
    widest = max((len(label) for label, *_ in points), default=0)
    return _frame(int(x1 + 34 + 7 * widest), max(size, int(free)), title, body)
