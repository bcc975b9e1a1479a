"""The loss over a run, for an asset's page.

Belongs here: drawing a training log. Does not belong here: charts of reports (`reports.svg`).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 48, 26
SMALLEST = 1e-6
TRAIN, VALIDATION, INK = "#0b6e4f", "#c8553d", "#2a2f36"


def loss_plot(log: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `training_log` as a markdown image: training and validation loss over steps, one line a seed, the
    vertical axis logarithmic. An SVG in a data URI, a few kilobytes; empty where nothing was logged."""
    lines: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for row in log:
        for name in ("loss", "val_loss"):
            if row[name] is not None:
                lines.setdefault((row["seed"], name), []).append((row["step"], max(row[name], SMALLEST)))
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    last = max(step for step, _ in points) or 1
    low, high = (math.log(f(loss for _, loss in points)) for f in (min, max))
    span = (high - low) or 1.0

    def place(step: float, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * step / last
        y = 12 + (HEIGHT - BOTTOM - 12) * (high - math.log(loss)) / span
        return f"{x:.1f},{y:.1f}"

    body = [f'<text x="4" y="{16:.0f}">{math.exp(high):.3g}</text>']
    body += [f'<text x="4" y="{HEIGHT - BOTTOM:.0f}">{math.exp(low):.3g}</text>']
    body += [f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">step {last:.0f}</text>']
    for x, colour, name in ((LEFT, TRAIN, "training"), (LEFT + 90, VALIDATION, "validation")):
        body.append(f'<text x="{x}" y="{HEIGHT - 6}" fill="{colour}">{name} loss</text>')
    for (_, name), line in sorted(lines.items()):
        colour = TRAIN if name == "loss" else VALIDATION
        path = " ".join(place(*point) for point in line)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if name == "val_loss":
            body += [
                f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in path.split()
            ]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">{"".join(body)}</svg>'
    )
    return f"![loss over steps](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
