"""The data card: where the training data come from, under which licence, how many, and how they are split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_resources.frames import to_frame


def sources(
    names: Sequence[str],
    specs: Mapping[str, RolloutSetSpec],
    tasks: pa.Table,
    selected: pa.Table,
    dataset_rows: pa.Table,
) -> list[dict[str, Any]]:
    """Describe the rollout sets of an experiment: name, kind, suite, teachers, licence; and what is trained of each.

    The licence is that of the set's spec or of its tasks; rollouts, turns and tokens are those of the training rows.
    """
    import polars as pl  # 0.3 s: `etpi status` imports every asset

    sets = to_frame(selected, ["rollout_id", "rollout_set", "teacher"])
    train = to_frame(dataset_rows, ["rollout_id", "split", "output_tokens"]).filter(split="train")
    by_set = sets.group_by(name="rollout_set").agg(
        teachers=pl.col("teacher").fill_null("unknown").unique().sort().str.join(", ")
    )
    trained = (
        train.join(sets, on="rollout_id")
        .group_by(name="rollout_set")
        .agg(rollouts=pl.col("rollout_id").n_unique(), turns=pl.len(), tokens=pl.col("output_tokens").sum())
    )
    rows = pl.DataFrame({"name": list(names)}, schema={"name": pl.String}).join(by_set, "name", "left")
    rows = rows.join(trained, "name", "left").fill_null("–").fill_null(0)
    licences = task_licences(tasks)
    return [
        {
            **row,
            "kind": spec.kind if spec else "unknown",
            "suite": (spec and spec.suite) or "–",
            "licence": (spec and spec.license) or licences or "not stated",
        }
        for row in rows.to_dicts()
        for spec in [specs.get(row["name"])]
    ]


def task_licences(tasks: pa.Table) -> str:
    """Return the licences that training tasks state, by number of tasks."""
    counted: Counter[str] = Counter()
    for split, payload in zip(tasks["split"].to_pylist(), tasks["payload"].to_pylist(), strict=True):
        if split == "train" and payload and '"license"' in payload and (stated := json.loads(payload).get("license")):
            counted[stated] += 1
    return ", ".join(f"{licence} ({count} tasks)" for licence, count in sorted(counted.items()))


def split(dataset_rows: pa.Table) -> list[dict[str, Any]]:
    """Count the training rows of each split: repos, rollouts, rows, label_tokens, weighted_tokens."""
    import polars as pl  # 0.3 s: `etpi status` imports every asset

    rows = to_frame(dataset_rows, ["split", "repo", "rollout_id", "output_tokens", "weight", "copies"])
    weighted = pl.col("weight") * pl.col("copies") * pl.col("output_tokens")
    return (
        rows.group_by("split")
        .agg(
            repos=pl.col("repo").n_unique(),
            rollouts=pl.col("rollout_id").n_unique(),
            rows=pl.len(),
            label_tokens=pl.col("output_tokens").sum(),
            weighted_tokens=weighted.sum(),
        )
        .sort("split")
        .to_dicts()
    )
