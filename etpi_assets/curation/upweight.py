"""Convert pairs to training rows: weights, the split by repository or conversation, and the length limit.

A row of weight w and a row repeated w times give the same loss over the data set, sum(w * nll) / sum(w). The weighting
form stores `weight` = w and `copies` = 1; the duplicating form stores `weight` = 1 and `copies` = w.
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


def weigh(
    pairs: Rows, section: DatasetSection, heldout_tasks: Collection[str] = (), limit: int | None = None
) -> dict[str, pa.Table]:
    """Return {"dataset_rows", "dropped"}: a row for each pair to train or validate on, the other pairs with reasons.

    Rows are in the order of `pairs`; `merge` sets their sequence and span later. Pairs of `section.heldout_repos` and
    of `heldout_tasks` are dropped. A pair longer than `section.max_length`, or than `limit` where that is "auto", is
    dropped, never truncated; None: no limit.

    Raises:
        ValueError: the factor of the duplicating form is not a whole number.
    """
    if section.upweight_form == "duplicate" and section.upweight_factor != int(section.upweight_factor):
        raise ValueError(
            f'dataset.upweight_factor = {section.upweight_factor:g} cannot be repeated; use upweight_form = "weight"'
        )
    if section.max_length != "auto":
        limit = section.max_length
    rows: list[pa.Table] = []
    dropped: list[pa.Table] = []
    row_builder, dropped_builder = TableBuilder("dataset_rows", rows.append), TableBuilder("dropped", dropped.append)
    for pair, (_, prompt, output) in zip(dicts(pairs, _READ), iter_turns(pairs), strict=True):
        assert output is not None, "every pair has an output"
        facts = json.loads(pair.pop("metadata"))
        if drop := _drop_reason(facts, len(prompt) + len(output), limit, section, heldout_tasks):
            key = {name: pair[name] for name in _KEY}
            dropped_builder.add(
                {"stage": "dataset", **key, "reason": drop[0], "detail": drop[1], "output_tokens": len(output)}
            )
            continue
        factor = section.upweight_factor if pair["turn"] in section.upweight_turns else 1.0
        duplicates = section.upweight_form == "duplicate"
        weight, copies = (1.0, int(factor)) if duplicates else (float(factor), 1)
        row_builder.add(
            {
                **pair,
                "dataset_row_id": _row_id(pair["pair_id"], prompt, output, weight, copies),
                **{name: facts.get(name) for name in ("task_id", "repo", "teacher")},
                "weight": weight,
                "copies": copies,
                "output_tokens": len(output),
            }
        )
    row_builder.flush()
    dropped_builder.flush()
    return {"dataset_rows": _split(pa.concat_tables(rows), section), "dropped": pa.concat_tables(dropped)}


def _split(rows: pa.Table, section: DatasetSection) -> pa.Table:
    """Fill the column `split`."""
    units = rows["repo"]
    if section.val_by == "conversation":
        units = pc.binary_join_element_wise(rows["rollout_id"], rows["agent_id"], "/")  # pyright: ignore[reportAttributeAccessIssue]
    validate = validation_units(units.unique().to_pylist(), section.val_fraction)
    is_val = pc.is_in(units, value_set=pa.array(sorted(validate, key=str), pa.string()))  # pyright: ignore[reportAttributeAccessIssue]
    return rows.set_column(rows.schema.get_field_index("split"), "split", pc.if_else(is_val, "val", "train"))  # pyright: ignore[reportAttributeAccessIssue]


def validation_units(units: Iterable[str | None], fraction: float) -> set[str | None]:
    """Return the repositories or conversations to validate on: the first round(fraction * n) in the order of their
    hashes, never all."""
    names = sorted(set(units), key=lambda unit: hashlib.sha256(str(unit).encode()).digest())
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


def _drop_reason(
    facts: dict[str, Any], length: int, limit: int | None, section: DatasetSection, heldout_tasks: Collection[str]
) -> tuple[str, str] | None:
    if facts.get("repo") in section.heldout_repos:
        return "heldout_repo", f"dataset.heldout_repos names {facts['repo']}"
    if facts.get("task_id") in heldout_tasks:
        return "heldout_task", f"{facts['task_id']} is of the suite's held-out split"
    if limit is not None and length > limit:
        auto = ", the base's context" if section.max_length == "auto" else ""
        return "over_max_length", f"{length} ids, dataset.max_length = {limit}{auto}"
    return None


def _row_id(pair_id: str, prompt: np.ndarray, output: np.ndarray, weight: float, copies: int) -> str:
    """Return 32 hex digits over the row's pair, ids, weight and copies."""
    digest = hashlib.sha256(json.dumps([pair_id, len(prompt), weight, copies]).encode())
    digest.update(np.ascontiguousarray(prompt, dtype="<i4").data)
    digest.update(np.ascontiguousarray(output, dtype="<i4").data)
    return digest.hexdigest()[:32]
