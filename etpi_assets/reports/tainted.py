"""Rows and sentences on what rests on verdicts that flipped, for reports, cards and `etpi status`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog, taint
from etpi_resources.lake.lake import Lake


def tainted(lake: Lake, experiments: Collection[str]) -> list[dict[str, Any]]:
    """Return the rows of the view `tainted` of experiments, of the lake as it is now, without a built catalog."""
    judged = (node.name for node in GRAPH.values() if "verdicts" in node.tables)
    manifests = (lake.current(ref) for name in judged for ref in lake.refs(name))
    if not any(manifest and manifest.notes.get("later_verdicts") for manifest in manifests):
        return []
    with catalog.in_memory(lake, GRAPH.values()) as connection:
        return [row for row in taint.walk(connection) if row["experiment"] in experiments]


def line(row: Mapping[str, Any]) -> str:
    """Return a row as a sentence: what is tainted, how much of it, and the command that mends it."""
    parts = [row["kind"], row["experiment"]]
    if row["kind"] == "checkpoint":
        parts += [row["role"], f"seed {row['seed']}", f"step {row['step']}", row["name"][:12]]
    elif row["kind"] != "dataset" or not row["final"]:
        parts.append(row["name"])
    count = f"{row['rollouts']:,} rollout{'s' * (row['rollouts'] != 1)}"
    through = row["via_checkpoint_id"]
    ancestor = f", through {through[:12]}" if through and through != row["checkpoint_id"] else ""
    share = f"{100 * row['share']:.3g} % of its {row['share_of']}, {count}{ancestor}"
    return f"tainted: {' '.join(map(str, parts))}: {share}{_mend(row)}"


def checkpoint_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each final checkpoint among the rows."""
    return [line(row) for row in rows if row["kind"] == "checkpoint" and row["final"]]


def _mend(row: Mapping[str, Any]) -> str:
    """Return the command that makes it again: of an ancestor's training, that of the experiment that has it."""
    if row["kind"] == "dataset":
        return f"; mend: etpi run {row['experiment']}" if row["final"] else ""
    if row["kind"] == "checkpoint" and row["final"]:
        asset = "rl_checkpoint" if row["share_of"] == "reward" else "sft_checkpoint"
        return f"; mend: etpi run {row['experiment']} --rebuild {asset}; or etpi taint --keep REASON"
    return ""
