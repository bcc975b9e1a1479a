"""The licences of the data behind an experiment: of imported rollouts, and of training tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from etpi_assets.specs.rollout_set import RolloutSetSpec


def data_sources(tasks: pa.Table, rollout_sets: Sequence[tuple[str, RolloutSetSpec]]) -> list[tuple[str, str, str]]:
    """Return (source, licence, amount) of the imported rollouts and training tasks that state a licence.

    Args:
        tasks: a table `tasks`.
        rollout_sets: (name, spec) of the rollout sets that an experiment selects from.
    """
    stated = [(name, spec.license, "imported rollouts") for name, spec in rollout_sets if spec.license]
    counted: Counter[tuple[str, str]] = Counter()
    for row in tasks.to_pylist():
        payload = json.loads(row["payload"] or "{}")
        if row["split"] == "train" and payload.get("license"):
            counted[payload["source"], payload["license"]] += 1
    return [*stated, *((source, licence, f"{n:,} tasks") for (source, licence), n in sorted(counted.items()))]
