"""docs/reference/checks.md: every check, from `etpi_assets/checks.toml` and docs/faults.md."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from docs.generate.markdown import anchor, prose, table
from etpi_assets.checks import CHECKS, CheckInfo
from etpi_assets.graph import GRAPH

_HEAD = """# Checks

A check judges the result of one asset, every time the asset is made. A failed **blocking** check keeps the version from
becoming current and stops every consumer; a **warning** is only shown. The lake stores every outcome, with its message
and figures: query the view `checks`. A failure that you accept is named, with its reason, in `gates.override` of the
experiment's spec; this covers the checks of `selected_trajectories`, `tito_pairs`, `upweighted_dataset` and
`serving_probe`.

*Seen before* names the failure of published work that a check answers. Links to [faults.md](../faults.md) are failures
that a test injects into a real run of the graph, where the check stops them.

*On a real model* says what a blocking check does with a model of billions of weights, trained in bfloat16 on a GPU:
seen, or reasoned.
"""

_REAL = {"exact": "Independent of weights: it compares ids or counts exactly."}


def page() -> str:
    """Return the page."""
    faults = defaultdict[tuple[str, str], list[str]](list)
    for line in Path("docs/faults.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and cells[1].startswith("`"):
            faults[cells[1].strip("`"), cells[2].strip("`")].append(f"[{cells[0]}](../faults.md)")
    assets = [name for name in GRAPH if name in CHECKS]
    rows = [[f"[{name}]({anchor(name)})", ", ".join(f"`{check}`" for check in CHECKS[name])] for name in assets]
    lines = [_HEAD, *table(["Asset", "Checks"], rows)]
    for asset in assets:
        lines += [f"## {asset}", "", prose(GRAPH[asset].summary), ""]
        for name, info in CHECKS[asset].items():
            lines += [*_entry(name, info, faults[asset, name]), ""]
    return "\n".join(lines)


def _entry(name: str, info: CheckInfo, faults: list[str]) -> list[str]:
    seen = [*([prose(info.answers)] if info.answers else []), *faults]
    return [
        f"**`{name}`** ({'blocking' if info.blocking else 'warning'})",
        "",
        f"- Catches: {prose(info.catches)}",
        f"- Remedy: {prose(info.remedy)}",
        *([f"- On a real model: {prose(_REAL.get(info.real, info.real))}"] if info.blocking else []),
        *([f"- Seen before: {'; '.join(seen)}."] if seen else []),
    ]
