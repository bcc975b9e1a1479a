"""The data card: where the training data come from, under which licence, how many, and how they are split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.specs.rollout_set import RolloutSetSpec

CONTAMINATION = (
    "heldout_split", "heldout_names_unseen", "no_steering_leak", "prompt_is_default_render", "no_think_in_output",
    "skip_rate", "turns_lost",
)  # fmt: skip
"""The checks that say whether training data contain what they must not, and what was lost on the way."""


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
    """Return the rollout sets of an experiment, with what each contributes to its training rows."""
    set_of = dict(zip(selected["rollout_id"].to_pylist(), selected["rollout_set"].to_pylist(), strict=True))
    teachers: dict[str | None, set[str]] = {}
    for name, teacher in zip(selected["rollout_set"].to_pylist(), selected["teacher"].to_pylist(), strict=True):
        teachers.setdefault(name, set()).add(teacher or "unknown")
    turns: Counter[str | None] = Counter()
    tokens: Counter[str | None] = Counter()
    rollouts: dict[str | None, set[str]] = {}
    columns = (dataset_rows[name].to_pylist() for name in ("rollout_id", "split", "output_tokens"))
    for rollout_id, split, output in zip(*columns, strict=True):
        if split == "train":
            name = set_of.get(rollout_id)
            turns[name] += 1
            tokens[name] += output or 0
            rollouts.setdefault(name, set()).add(rollout_id)
    licences = task_licences(tasks)
    return [
        Source(
            name, spec.title if spec else "", spec.kind if spec else "unknown", (spec.suite if spec else None) or "–",
            ", ".join(sorted(teachers.get(name, ()))) or "–",
            (spec.license if spec else None) or licences or "not stated",
            len(rollouts.get(name, ())), turns[name], tokens[name],
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
    """Return (split, repos, rollouts, rows, label tokens, weighted tokens) of the training rows."""
    weighted = pc.multiply(pc.multiply(dataset_rows["weight"], dataset_rows["copies"]), dataset_rows["output_tokens"])
    rows = dataset_rows.append_column("weighted", weighted).group_by("split", use_threads=False).aggregate(
        [("repo", "count_distinct"), ("rollout_id", "count_distinct"), ("pair_id", "count"), ("output_tokens", "sum"),
         ("weighted", "sum")]
    )  # fmt: skip
    return sorted(rows.to_pylist(), key=lambda row: row["split"])
