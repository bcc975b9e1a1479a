"""From pairs to weighted training rows: which pairs train, which validate, and how much each counts.

Belongs here: weights, the split by repository, the length limit. Does not belong here: the pairs, or their merging.

A row of weight w and a row repeated w times are the same full-dataset function, sum(w * nll) / sum(w). The weighted
form stores `weight` = w and `copies` = 1; the duplicating form `weight` = 1 and `copies` = w.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.specs.experiment import DatasetSection
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.lake.schemas import TableBuilder
from etpi_resources.lake.stored import Rows, dicts

_KEY = ("rollout_id", "agent_id", "turn")
_READ = ["pair_id", *_KEY, "metadata"]


def weigh(pairs: Rows, section: DatasetSection, heldout_tasks: Collection[str] = ()) -> dict[str, pa.Table]:
    """{"dataset_rows", "dropped"}: a row a pair that trains or validates, and every other pair with the reason.

    Rows stand in the order of `pairs`; their sequence and span are null until `merge` sets them. Pairs of
    `section.heldout_repos` and of `heldout_tasks` never train. A pair longer than `section.max_length` is dropped,
    never cut.

    Raises:
        ValueError: the duplicating form with a factor that is no whole number.
    """
    if section.upweight_form == "duplicate" and section.upweight_factor != int(section.upweight_factor):
        raise ValueError(
            f'dataset.upweight_factor = {section.upweight_factor:g} cannot be repeated; use upweight_form = "weight"'
        )
    rows: list[pa.Table] = []
    dropped: list[pa.Table] = []
    taken, left = TableBuilder("dataset_rows", rows.append), TableBuilder("dropped", dropped.append)
    for pair, (_, prompt, output) in zip(dicts(pairs, _READ), iter_turns(pairs), strict=True):
        assert output is not None, "every pair has an output"
        facts = json.loads(pair.pop("metadata"))
        if reason := _fails(facts, len(prompt) + len(output), section, heldout_tasks):
            key = {name: pair[name] for name in _KEY}
            left.add(
                {"stage": "dataset", **key, "reason": reason[0], "detail": reason[1], "output_tokens": len(output)}
            )
            continue
        factor = section.upweight_factor if pair["turn"] in section.upweight_turns else 1.0
        repeated = section.upweight_form == "duplicate"
        weight, copies = (1.0, int(factor)) if repeated else (float(factor), 1)
        taken.add(
            {
                **pair,
                "dataset_row_id": _row_id(pair["pair_id"], prompt, output, weight, copies),
                **{name: facts.get(name) for name in ("task_id", "repo", "teacher")},
                "weight": weight,
                "copies": copies,
                "output_tokens": len(output),
            }
        )
    taken.flush()
    left.flush()
    return {"dataset_rows": _split(pa.concat_tables(rows), section.val_fraction), "dropped": pa.concat_tables(dropped)}


def _split(rows: pa.Table, val_fraction: float) -> pa.Table:
    """The rows with their split."""
    validate = validation_repos(rows["repo"].unique().to_pylist(), val_fraction)
    kept = pc.is_in(rows["repo"], value_set=pa.array(sorted(validate, key=str), pa.string()))  # pyright: ignore[reportAttributeAccessIssue]
    return rows.set_column(rows.schema.get_field_index("split"), "split", pc.if_else(kept, "val", "train"))  # pyright: ignore[reportAttributeAccessIssue]


def validation_repos(repos: Iterable[str | None], fraction: float) -> set[str | None]:
    """The repositories kept for validation: round(fraction * n) of them, never all, in an order that depends on their
    names alone."""
    names = sorted(set(repos), key=lambda repo: hashlib.sha256(str(repo).encode()).digest())
    return set(names[: min(len(names) - 1, round(fraction * len(names)))]) if names else set()


def loss_share_by_turn(rows: pa.Table) -> dict[int, float]:
    """Return turn -> share of sum(weight x copies x output tokens) over the training rows, in order of the turns.

    `sql/reports/loss_share_by_turn.sql` computes the same for every experiment.
    """
    weights: Counter[int] = Counter()
    for row in dicts(rows, ["split", "turn", "weight", "copies", "output_tokens"]):
        if row["split"] == "train":
            weights[row["turn"]] += row["weight"] * row["copies"] * row["output_tokens"]
    total = sum(weights.values())
    return {turn: weight / total for turn, weight in sorted(weights.items())} if total else {}


def _fails(
    facts: dict[str, Any], length: int, section: DatasetSection, heldout_tasks: Collection[str]
) -> tuple[str, str] | None:
    if facts.get("repo") in section.heldout_repos:
        return "heldout_repo", f"dataset.heldout_repos names {facts['repo']}"
    if facts.get("task_id") in heldout_tasks:
        return "heldout_task", f"{facts['task_id']} is of the suite's held-out split"
    if length > section.max_length:
        return "over_max_length", f"{length} ids, dataset.max_length = {section.max_length}"
    return None


def _row_id(pair_id: str, prompt: np.ndarray, output: np.ndarray, weight: float, copies: int) -> str:
    """32 hex digits over where the row is from, its ids, and how it counts."""
    digest = hashlib.sha256(json.dumps([pair_id, len(prompt), weight, copies]).encode())
    digest.update(prompt.astype("<i4").tobytes())
    digest.update(output.astype("<i4").tobytes())
    return digest.hexdigest()[:32]
