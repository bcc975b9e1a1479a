"""Rows of token ids: TRL's `input_ids` with `labels`, and the pairs `{input_ids, output_ids, metadata}`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.curation.merge import branches
from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.exports.format import Written, write_splits
from etpi_resources.lake.stored import batches

IDS = pa.list_(pa.int32())
SEQUENCES = pa.schema(
    [
        ("input_ids", IDS),
        ("labels", IDS),
        ("span_starts", IDS),
        ("span_ends", IDS),
        ("span_weights", pa.list_(pa.float32())),
        *((name, pa.string()) for name in ("sequence_id", "rollout_id", "agent_id", "capture")),
    ]
)
_TEXTS = ("rollout_id", "agent_id", "task_id", "repo", "teacher", "role", "capture", "split", "pair_id")
_NUMBERS = [("turn", pa.int32()), ("weight", pa.float64()), ("copies", pa.int32()), ("reward", pa.float64())]
_METADATA = pa.struct([*((name, pa.string()) for name in _TEXTS), *_NUMBERS])
PAIRS = pa.schema([("input_ids", IDS), ("output_ids", IDS), ("metadata", _METADATA)])


def sequence_rows(source: ExportSource, split: str) -> Iterator[dict[str, Any]]:
    """Yield the merged sequences of a split, a row per branch; labels are -100 where there is no loss."""
    for row in source.sequences(split):
        columns = {name: row[name] for name in SEQUENCES.names if name in row}
        for branch in branches(row):
            ids = {name: branch[name].astype(np.int32) for name in ("input_ids", "labels")}
            yield {**columns, **branch, **ids, "capture": source.capture}


def weights_note(source: ExportSource) -> tuple[str, ...]:
    """Return a note if some rows have another weight than 1, because most trainers ignore weights."""
    columns = [source.rows[name].to_pylist() for name in ("weight", "copies")]
    weights = {weight * copies for weight, copies in zip(*columns, strict=True)}
    if weights <= {1.0}:
        return ()
    values = ", ".join(f"{weight:g}" for weight in sorted(weights))
    return (f"rows weigh {values}; the losses of TRL and verl ignore weights",)


def truncation_note(source: ExportSource) -> tuple[str, ...]:
    """Return a note if TRL's default length cuts some sequence."""
    ids = batches(source.stored("upweighted_dataset", "sequences"), ["input_ids"])
    longest = max((int(np.diff(batch["input_ids"].offsets.to_numpy()).max()) for batch in ids if len(batch)), default=0)
    note = f"the longest sequence has {longest} ids; SFTConfig's max_length of 1024 would truncate it silently"
    return (note,) if longest > 1024 else ()


def write_trl(source: ExportSource, folder: Path) -> Written:
    rows = write_splits(folder, SEQUENCES, lambda split: sequence_rows(source, split))
    return Written(rows, notes=(*weights_note(source), *truncation_note(source)))


def write_tito(source: ExportSource, folder: Path) -> Written:
    def rows(split: str) -> Iterator[dict[str, Any]]:
        for row, prompt, pair in source.pairs():
            if row["split"] == split:
                about = {name: row.get(name, pair.get(name)) for name in (*_TEXTS, *dict(_NUMBERS))}
                about["role"] = json.loads(pair["metadata"]).get("role")
                about["reward"] = source.rewards.get(row["rollout_id"])
                yield {"input_ids": prompt, "output_ids": pair["output_ids"], "metadata": about}

    return Written(write_splits(folder, PAIRS, rows), notes=weights_note(source))
