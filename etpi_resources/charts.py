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


def frame(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """Return the SVG of a size around these elements; the title is for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}" '
        f'style="width:100%;max-width:{width}px;height:auto">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


def text_at(x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = INK) -> str:
    """Return a text; `anchor` is the end of it that stands at x."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(words)}</text>'


def line_between(x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, width: float = 1) -> str:
    """Return a line between two points."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _legend(names: Sequence[str], x: float, y: float, colours: Mapping[str, str] = COLOURS) -> list[str]:
    parts = []
    for name in names:
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{colours.get(name, INK)}"/>')
        parts.append(text_at(x + 9, y, name))
        x += 22 + 7 * len(name)
    return parts


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
        return frame(width, 40, title, [text_at(left, 24, "nothing recorded")])
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
        text = f"{shown:.2g}" if log_y or digits > 4 else f"{shown:,.{digits}f}"
        body += [line_between(left, py, width - right, py), text_at(left - 6, py + 4, text, "end", 11)]
    for x in dict.fromkeys(round(x0 + (x1 - x0) * i / 4) for i in range(5)):  # whole steps
        px, _ = place(x, y0)
        body.append(text_at(px, height - 18, f"{x:,}", "middle", 11))
    body.append(text_at((left + width) / 2, height - 4, x_label, "middle", 11))
    for name, points in curves:
        colour, placed = colours.get(name, INK), [place(x, y) for x, y in points]
        if len(placed) == 1:  # a line of one point is not drawn
            body.append('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*placed[0], colour))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in placed)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return frame(width, height, title, body)


CURVES = ("#0b6e4f", "#c8553d", "#8338ec", "#3a6ea5", "#7a8594")
"""Colours of curves without a role."""


def bars(title: str, rows: Sequence[tuple[str, float]], unit: str = "") -> str:
    """Plot horizontal bars, (label, value) from top to bottom, each labelled with its value."""
    left, width, step = 170, 640, 22
    most = max((value for _, value in rows), default=0) or 1
    body = []
    for i, (label, value) in enumerate(rows):
        y = 6 + i * step
        length = value / most * (width - left - 90)
        body.append(text_at(left - 8, y + 13, label, "end"))
        body.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="15" rx="2" fill="{COLOURS["sft"]}"/>')
        body.append(text_at(left + length + 6, y + 13, _labelled(value, unit)))
    return frame(width, 12 + step * max(1, len(rows)), title, body)


def _labelled(value: float, unit: str) -> str:
    if unit == " %":
        return f"{value:.1f} %" if value >= 0.05 or not value else "under 0.1 %"
    return f"{value:,.3g}{unit}"
