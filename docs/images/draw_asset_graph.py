"""Draw the asset graph as SVG: `python docs/images/draw_asset_graph.py > docs/images/asset_graph.svg`.

Columns are the groups of `etpi_assets.graph`, without the spec assets. Arrows that follow from others are omitted.
"""

from __future__ import annotations

from etpi_assets.graph import GRAPH

GROUPS = ("sources", "rollouts", "curation", "training", "serving", "evaluation", "reports")
COLOURS = {"suite": "#fde7c2", "rollout_set": "#d7ecd0", "experiment": "#d6e4f7", "all": "#e6e1ee"}
LABELS = {"suite": "per suite", "rollout_set": "per rollout set", "experiment": "per experiment", "all": "one for all"}
ROWS = {"base_checkpoint": 3}
"""Rows other than the next free one: the arrow from the base runs below the boxes of two columns."""
WIDTH, HEIGHT, GAP_X, GAP_Y, TOP, LEFT = 158, 34, 34, 26, 44, 14


def direct_upstream(name: str) -> list[str]:
    """Return the upstream assets that no other upstream asset of `name` already depends on."""
    upstream = [asset for asset in GRAPH[name].upstream if GRAPH[asset].group in GROUPS]
    return [a for a in upstream if not any(a in _ancestors(b) for b in upstream if b != a)]


def draw() -> str:
    """Return the picture as SVG text."""
    boxes = _positions()
    right = max(x for x, _ in boxes.values()) + WIDTH + LEFT
    bottom = max(y for _, y in boxes.values()) + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom + 52}" font-family="sans-serif">',
        "<title>The assets of etpi, from tasks and a base model to reports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for column, group in enumerate(GROUPS):
        x = LEFT + column * (WIDTH + GAP_X) + WIDTH / 2
        parts.append(f'<text x="{x:g}" y="26" font-size="14" fill="#555" text-anchor="middle">{group}</text>')
    for name in boxes:
        for upstream in direct_upstream(name):
            path = _arrow(boxes[upstream], boxes[name])
            parts.append(f'<path d="{path}" fill="none" stroke="#555" stroke-width="1.4" marker-end="url(#tip)"/>')
    for name, (x, y) in boxes.items():
        parts.append(_box(x, y, WIDTH, HEIGHT, COLOURS[GRAPH[name].set]))
        parts.append(f'<text x="{x + WIDTH / 2:g}" y="{y + 22}" font-size="13" text-anchor="middle">{name}</text>')
    for i, (partitions, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 150
        parts.append(_box(x, bottom + 24, 18, 14, colour))
        parts.append(f'<text x="{x + 25}" y="{bottom + 36}" font-size="12">{LABELS[partitions]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ancestors(name: str) -> set[str]:
    upstream = set(GRAPH[name].upstream)
    return upstream.union(*(_ancestors(other) for other in upstream))


def _positions() -> dict[str, tuple[int, int]]:
    """Return the left upper corner of each asset's box."""
    boxes = {}
    for column, group in enumerate(GROUPS):
        names = [name for name, node in GRAPH.items() if node.group == group]
        for row, name in enumerate(names):
            boxes[name] = (LEFT + column * (WIDTH + GAP_X), TOP + ROWS.get(name, row) * (HEIGHT + GAP_Y))
    return boxes


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Down inside a column; otherwise along the row of `start` and, in the gap before `end`, to its row."""
    (x, y), (to_x, to_y) = start, end
    if x == to_x and to_y - y == HEIGHT + GAP_Y:
        return f"M{x + WIDTH // 2} {y + HEIGHT}V{to_y}"
    y, to_y = y + HEIGHT // 2, to_y + HEIGHT // 2
    bend = to_x - GAP_X
    return f"M{x + WIDTH} {y}H{bend}C{bend + 24} {y} {bend + 6} {to_y} {to_x} {to_y}"


def _box(x: int, y: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{colour}" stroke="#888"/>'


if __name__ == "__main__":
    print(draw(), end="")
