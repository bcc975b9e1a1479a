"""The data card: where the training data come from, under which licence, how many, and how they are split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_resources.frames import to_frame


@dataclass(frozen=True)
class Source:
    """A rollout set that training data are selected from.

    Attributes:
        licence: as its spec or its tasks state it; "not stated" otherwise.
        rollouts, turns, tokens: selected rollouts, and training rows and label tokens of them.
    """

    name: str
    title: str
    kind: str
    suite: str
    teachers: str
    licence: str
    rollouts: int
    turns: int
    tokens: int


def sources(
    names: Sequence[str],
    specs: Mapping[str, RolloutSetSpec],
    tasks: pa.Table,
    selected: pa.Table,
    dataset_rows: pa.Table,
) -> list[Source]:
    """Return the rollout sets of an experiment, with the training rows of each."""
    sets = to_frame(selected, ["rollout_id", "rollout_set", "teacher"])
    train = to_frame(dataset_rows, ["rollout_id", "split", "output_tokens"]).filter(split="train")
    teachers = dict(
        sets.group_by("rollout_set")
        .agg(pl.col("teacher").fill_null("unknown").unique().sort().str.join(", "))
        .iter_rows()
    )
    counts = {
        name: figures
        for name, *figures in train.join(sets, on="rollout_id")
        .group_by("rollout_set")
        .agg(pl.col("rollout_id").n_unique(), pl.len(), pl.col("output_tokens").sum())
        .iter_rows()
    }
    licences = task_licences(tasks)
    return [
        Source(
            name, spec.title if spec else "", spec.kind if spec else "unknown", (spec.suite if spec else None) or "–",
            teachers.get(name, "–"),
            (spec.license if spec else None) or licences or "not stated",
            *counts.get(name, (0, 0, 0)),
        )
        for name in names
        for spec in [specs.get(name)]
    ]  # fmt: skip


def task_licences(tasks: pa.Table) -> str:
    """Return the licences that training tasks state, by number of tasks."""
    counted: Counter[str] = Counter()
    for split, payload in zip(tasks["split"].to_pylist(), tasks["payload"].to_pylist(), strict=True):
        if split == "train" and payload and '"license"' in payload and (stated := json.loads(payload).get("license")):
            counted[stated] += 1
    return ", ".join(f"{licence} ({count} tasks)" for licence, count in sorted(counted.items()))


def split(dataset_rows: pa.Table) -> list[dict[str, Any]]:
    """Count the training rows of each split: repos, rollouts, rows, label_tokens, weighted_tokens."""
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
