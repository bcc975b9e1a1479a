"""The longest allowed training row, and the lengths of the rows and sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.upweight import pair_values
from etpi_assets.specs.experiment import DatasetSection
from etpi_assets.specs.training import BaseSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.checkpoints import context_length, hub_file
from etpi_resources.lake.check_outcome import BadData
from etpi_resources.packages import package_folder

STEPS = (2048, 4096, 8192, 16384, 32768)
"""Lengths, in tokens, above which rows are counted."""
MERGED = 8192
"""With `max_length = "auto"`, maximum tokens of a merged sequence, unless the longest row is longer."""
_NO_LIMIT = 10**9
"""A tokenizer with a larger `model_max_length` states none."""


@dataclass(frozen=True)
class BaseContext:
    """The longest sequence of the base in tokens, None if unknown; where that comes from, or why it is unknown."""

    tokens: int | None
    source: str


def base_context(base: BaseSection, chat: ChatFormat) -> BaseContext:
    """Return the context of a base, from its configuration, or the limit of its tokenizer where it has none."""
    if base.kind == "tiny":
        return BaseContext(base.tiny.positions, "base.tiny.positions")
    if base.kind == "path":
        return _configured(Path(base.path or "") / "config.json")
    if base.kind in ("hub", "package"):
        try:
            if base.kind == "package":
                file = package_folder(base.model) / "config.json"
            else:
                file = hub_file(base.repo or "", base.revision or "", "config.json")
        except OSError as error:
            return BaseContext(None, f"config.json of {base.repo or base.package} cannot be read: {error}")
        return _configured(file)
    limit = chat.tokenizer.model_max_length
    if limit < _NO_LIMIT:
        return BaseContext(limit, f"the tokenizer {base.tokenizer}; there is no base")
    return BaseContext(None, f"the tokenizer {base.tokenizer} states no limit, and there is no base")


def _configured(file: Path) -> BaseContext:
    try:
        tokens = context_length(file)
    except (OSError, ValueError) as error:
        return BaseContext(None, f"{file} cannot be read: {error}")
    key = "max_position_embeddings"
    return BaseContext(tokens, key if tokens else f"{file} has no {key}")


def row_limit(section: DatasetSection, base: BaseSection, context: BaseContext) -> int | None:
    """Return the most tokens of a row; None without a limit, which only an experiment without a base may have.

    Raises:
        BadData: the base's context is wanted, but unknown.
    """
    if section.max_length != "auto":
        return section.max_length
    if context.tokens is None and base.kind != "none":
        raise BadData(
            f'dataset.max_length = "auto": the context of the base is unknown ({context.source}); set a number'
        )
    return context.tokens


def merge_limit(section: DatasetSection, limit: int | None, longest: int) -> int:
    """Return the most tokens of a merged sequence, given the row limit and the longest row."""
    if section.max_length != "auto":
        return section.max_length
    return min(limit or max(longest, MERGED), max(longest, MERGED))


def length_figures(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> dict[str, Any]:
    """Return the lengths of a block's rows and of its longest sequence; `rollout_checks.merged` adds them up.

    Keys: rows, outputs: tokens of all rows, and of their outputs; over: {length: {rows, tokens, output_tokens}} of the
    rows longer than it; longest_row, longest_sequence: lists of one number a block.
    """
    outputs = rows["output_tokens"].to_numpy()
    lengths = pair_values(rows, pairs, "input_tokens").to_numpy().astype(np.int64) + outputs
    over = {}
    for step in STEPS:
        beyond = lengths > step
        over[str(step)] = {
            "rows": int(beyond.sum()),
            "tokens": int(lengths[beyond].sum()),
            "output_tokens": int(outputs[beyond].sum()),
        }
    return {
        "rows": int(lengths.sum()),
        "outputs": int(outputs.sum()),
        "over": over,
        "longest_row": [int(lengths.max(initial=0))],
        "longest_sequence": [pc.max(pc.list_value_length(sequences["input_ids"])).as_py() or 0],  # pyright: ignore[reportAttributeAccessIssue]
    }


def totals(figures: Mapping[str, Any], context: BaseContext, limit: int | None) -> Mapping[str, Any]:
    """Return the lengths of all rows and sequences, from their `length_figures`.

    Keys: limit, context, source; longest_row, and `over`: {length: {rows, tokens, output_tokens}} of the rows longer
    than it; longest_sequence, as the trainer reads it.
    """
    longest = {name: max(figures[name], default=0) for name in ("longest_row", "longest_sequence")}
    return {"limit": limit, "context": context.tokens, "source": context.source, "over": figures["over"], **longest}


def summary(figures: Mapping[str, Any]) -> str:
    """Return the totals in one sentence, for the log and the asset's page."""
    limit = f"{figures['limit']:,}" if figures["limit"] else "none"
    over = ", ".join(f"{n['rows']} over {int(step):,}" for step, n in figures["over"].items() if n["rows"])
    return (
        f"rows of at most {figures['longest_row']:,} tokens (limit {limit}, {figures['source']}; "
        f"{over or 'none over 2,048'}); the longest sequence has {figures['longest_sequence']:,} tokens"
    )
