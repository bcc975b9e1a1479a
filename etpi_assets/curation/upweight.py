"""Convert pairs to training rows: weights, the split by repository or conversation, and the length limit.

A row of weight w and a row repeated w times give the same loss over the data set, sum(w * nll) / sum(w). The weighting
form stores `weight` = w and `copies` = 1; the duplicating form stores `weight` = 1 and `copies` = w.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.specs.experiment import DatasetSection
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.lake.schemas import from_columns

_KEY = ("rollout_id", "agent_id", "turn")
COLUMNS = ["pair_id", *_KEY, "metadata", "prefix_turn", "suffix_ids", "output_ids"]
"""The columns of pairs that `weigh_pairs` reads."""
_FACTS = ("task_id", "repo", "teacher")


@dataclass(frozen=True)
class RowRule:
    """The rule that decides which pairs become rows.

    Attributes:
        heldout_tasks: tasks whose pairs are dropped, as those of `section.heldout_repos` are.
        limit: a longer pair, in tokens, is dropped where `section.max_length` is "auto"; None: no limit.
    """

    section: DatasetSection
    heldout_tasks: Collection[str] = ()
    limit: int | None = None

    def drop(self, facts: Mapping[str, Any], length: int) -> tuple[str, str] | None:
        """Return (reason, detail) if a pair with that metadata and number of tokens must be dropped, else None."""
        if facts.get("repo") in self.section.heldout_repos:
            return "heldout_repo", f"dataset.heldout_repos names {facts['repo']}"
        if facts.get("task_id") in self.heldout_tasks:
            return "heldout_task", f"{facts['task_id']} is of the suite's held-out split"
        automatic = self.section.max_length == "auto"
        limit = self.limit if automatic else self.section.max_length
        if isinstance(limit, int) and length > limit:
            context = ", the base's context" if automatic else ""
            return "over_max_length", f"{length} ids, dataset.max_length = {limit}{context}"
        return None


def weigh_pairs(pairs: pa.Table, rule: RowRule) -> dict[str, pa.Table]:
    """Return {"dataset_rows", "dropped"}: a row for each pair to train or validate on, the other pairs with reasons.

    Rows are in the order of `pairs`. `with_split` sets their split, which depends on all pairs of the data set, and
    `merge` their sequence and span. Longer pairs than the limit are dropped, never truncated.

    Raises:
        ValueError: the factor of the duplicating form is not a whole number.
    """
    section = rule.section
    if section.upweight_form == "duplicate" and section.upweight_factor != int(section.upweight_factor):
        raise ValueError(
            f'dataset.upweight_factor = {section.upweight_factor:g} cannot be repeated; use upweight_form = "weight"'
        )
    facts = [json.loads(text) for text in pairs["metadata"].to_pylist()]
    ids = [(prompt, _present(output)) for _, prompt, output in iter_turns(pairs)]
    drops = [rule.drop(about, len(prompt) + len(output)) for about, (prompt, output) in zip(facts, ids, strict=True)]
    kept = [at for at, drop in enumerate(drops) if drop is None]
    rows = _rows(pairs.take(pa.array(kept, pa.int64())), [facts[at] for at in kept], [ids[at] for at in kept], section)
    return {"dataset_rows": rows, "dropped": _dropped(pairs, drops, [len(output) for _, output in ids])}


def _present(output: np.ndarray | None) -> np.ndarray:
    assert output is not None, "every pair has an output"
    return output


def _rows(
    pairs: pa.Table,
    facts: Sequence[Mapping[str, Any]],
    ids: Sequence[tuple[np.ndarray, np.ndarray]],
    section: DatasetSection,
) -> pa.Table:
    """Return `dataset_rows` of pairs with their metadata, inputs and outputs."""
    upweighted = np.isin(pairs["turn"].to_numpy(), section.upweight_turns)
    factors = np.where(upweighted, float(section.upweight_factor), 1.0)
    if section.upweight_form == "duplicate":
        weights, copies = np.ones(len(factors)), factors.astype(np.int32)
    else:
        weights, copies = factors, np.ones(len(factors), dtype=np.int32)
    names = pairs["pair_id"].to_pylist()
    each = zip(names, ids, weights.tolist(), copies.tolist(), strict=True)
    columns: dict[str, Any] = {name: pairs[name] for name in ("pair_id", *_KEY)}
    columns["dataset_row_id"] = [_row_id(name, prompt, output, w, n) for name, (prompt, output), w, n in each]
    columns |= {name: [of_pair.get(name) for of_pair in facts] for name in _FACTS}
    columns |= {"weight": weights, "copies": copies, "output_tokens": [len(output) for _, output in ids]}
    return from_columns("dataset_rows", columns, len(names))


def _dropped(pairs: pa.Table, drops: Sequence[tuple[str, str] | None], outputs: Sequence[int]) -> pa.Table:
    """Return the table `dropped` of the pairs that have a (reason, detail)."""
    out = [(at, *drop) for at, drop in enumerate(drops) if drop is not None]
    chosen = pairs.take(pa.array([at for at, _, _ in out], pa.int64()))
    columns = {
        "stage": ["dataset"] * len(out),
        **{name: chosen[name] for name in _KEY},
        "reason": [reason for _, reason, _ in out],
        "detail": [detail for _, _, detail in out],
        "output_tokens": [outputs[at] for at, _, _ in out],
    }
    return from_columns("dropped", columns, len(out))


def pair_values(rows: pa.Table, pairs: pa.Table, column: str) -> pa.ChunkedArray:
    """Return a column of the pairs for each row; null where there is no such pair."""
    at = pc.index_in(rows["pair_id"], value_set=pairs["pair_id"])  # pyright: ignore[reportAttributeAccessIssue]
    return pairs[column].take(at)


def units_of(rows: pa.Table, section: DatasetSection) -> pa.ChunkedArray:
    """Return the unit of each row that `section.val_by` splits by: its repository or its conversation."""
    if section.val_by == "conversation":
        return pc.binary_join_element_wise(rows["rollout_id"], rows["agent_id"], "/")  # pyright: ignore[reportAttributeAccessIssue]
    return rows["repo"]


def with_split(rows: pa.Table, section: DatasetSection, validate: Collection[str | None]) -> pa.Table:
    """Fill the column `split`: "val" for the rows of those units."""
    values = pa.array(sorted(validate, key=str), pa.string())
    is_val = pc.is_in(units_of(rows, section), value_set=values)  # pyright: ignore[reportAttributeAccessIssue]
    return rows.set_column(rows.schema.get_field_index("split"), "split", pc.if_else(is_val, "val", "train"))  # pyright: ignore[reportAttributeAccessIssue]


def validation_units(units: Iterable[str | None], fraction: float) -> set[str | None]:
    """Return the repositories or conversations to validate on: the first round(fraction * n) in the order of their
    hashes, never all."""
    names = sorted(set(units), key=lambda unit: hashlib.sha256(str(unit).encode()).digest())
    return set(names[: min(len(names) - 1, round(fraction * len(names)))]) if names else set()


def loss_by_turn(rows: pa.Table) -> dict[str, float]:
    """Return turn -> sum(weight x copies x output tokens) over the training rows. The keys are text, as in JSON."""
    training = rows.filter(pc.field("split") == "train")
    turns, at = np.unique(training["turn"].to_numpy(), return_inverse=True)
    loss = training["weight"].to_numpy() * training["copies"].to_numpy() * training["output_tokens"].to_numpy()
    return dict(zip(map(str, turns.tolist()), np.bincount(at, loss, len(turns)).tolist(), strict=True))


def shares(loss: Mapping[str, float]) -> dict[int, float]:
    """Return turn -> share of the loss, from `loss_by_turn`, in order of the turns.

    `sql/reports/loss_share_by_turn.sql` computes the same for every experiment.
    """
    total = sum(loss.values())
    return {turn: loss[str(turn)] / total for turn in sorted(map(int, loss))} if total else {}


def _row_id(pair_id: str, prompt: np.ndarray, output: np.ndarray, weight: float, copies: int) -> str:
    """Return 32 hex digits over the row's pair, ids, weight and copies."""
    digest = hashlib.sha256(json.dumps([pair_id, len(prompt), weight, copies]).encode())
    digest.update(np.ascontiguousarray(prompt, dtype="<i4").data)
    digest.update(np.ascontiguousarray(output, dtype="<i4").data)
    return digest.hexdigest()[:32]
