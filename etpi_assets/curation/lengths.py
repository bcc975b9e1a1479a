"""The longest allowed training row, and the memory that the longest one takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.specs.experiment import DatasetSection
from etpi_assets.specs.training import BaseSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.checkpoints import hub_file
from etpi_resources.lake.check_outcome import BadData

STEPS = (2048, 4096, 8192, 16384, 32768)
"""Lengths, in tokens, above which rows are counted."""
MERGED = 8192
"""With `max_length = "auto"`, maximum tokens of a merged sequence, unless the longest row is longer."""
_NO_LIMIT = 10**9
"""A tokenizer with a larger `model_max_length` states none."""
_BYTES, _LOGIT_BYTES = 34, 12
FORMULA = f"{_BYTES} x tokens x hidden x layers + {_LOGIT_BYTES} x label tokens x vocabulary"
"""Bytes of activations kept for the backward pass in bf16, without the attention matrix (Korthikanti et al. 2022,
equation 1, with the term that flash attention avoids left out) and without gradient checkpointing; and of the logits
at the labels in float32: values, softmax and gradient."""


@dataclass(frozen=True)
class BaseShape:
    """Sizes of the base; None where they are unknown.

    Attributes:
        context: the longest sequence it takes, in tokens.
        source: where the context comes from, or why it is unknown.
    """

    context: int | None
    source: str
    hidden: int | None = None
    layers: int | None = None

    def activation_bytes(self, tokens: int, labels: int, vocabulary: int) -> int | None:
        """Return the peak of `FORMULA`; None if the base's sizes are unknown."""
        if self.hidden is None or self.layers is None:
            return None
        return _BYTES * tokens * self.hidden * self.layers + _LOGIT_BYTES * labels * vocabulary


def base_shape(base: BaseSection, chat: ChatFormat) -> BaseShape:
    """Return the sizes of a base, from its configuration, or the limit of its tokenizer where it has none."""
    if base.kind == "tiny":
        return BaseShape(base.tiny.positions, "base.tiny.positions", base.tiny.hidden, base.tiny.layers)
    if base.kind == "path":
        return _configured(Path(base.path or "") / "config.json")
    if base.kind == "hub":
        try:
            return _configured(hub_file(base.repo or "", base.revision or "", "config.json"))
        except OSError as error:
            return BaseShape(None, f"config.json of {base.repo} cannot be read: {error}")
    limit = chat.tokenizer.model_max_length
    if limit < _NO_LIMIT:
        return BaseShape(limit, f"the tokenizer {base.tokenizer}; there is no base")
    return BaseShape(None, f"the tokenizer {base.tokenizer} states no limit, and there is no base")


def _configured(file: Path) -> BaseShape:
    """Return the sizes in a config.json; multimodal models have them in `text_config`."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return BaseShape(None, f"{file} cannot be read: {error}")
    text = {**config, **config.get("text_config", {})}
    context, hidden, layers = (text.get(key) for key in ("max_position_embeddings", "hidden_size", "num_hidden_layers"))
    source = "max_position_embeddings" if context else f"{file} has no max_position_embeddings"
    return BaseShape(context, source, hidden, layers)


def row_limit(section: DatasetSection, base: BaseSection, shape: BaseShape) -> int | None:
    """Return the most tokens of a row; None without a limit, which only an experiment without a base may have.

    Raises:
        BadData: the base's context is wanted, but unknown.
    """
    if section.max_length != "auto":
        return section.max_length
    if shape.context is None and base.kind != "none":
        raise BadData(f'dataset.max_length = "auto": the context of the base is unknown ({shape.source}); set a number')
    return shape.context


def merge_limit(section: DatasetSection, limit: int | None, longest: int) -> int:
    """Return the most tokens of a merged sequence, given the row limit and the longest row."""
    if section.max_length != "auto":
        return section.max_length
    return min(limit or max(longest, MERGED), max(longest, MERGED))


def length_figures(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> dict[str, Any]:
    """Return the lengths of a block's rows and of its longest sequence; `rollout_checks.merged` adds them up.

    Keys: rows, outputs: tokens of all rows, and of their outputs; over: {length: {rows, tokens, output_tokens}} of the
    rows longer than it; longest_row, longest_sequence: lists of one number, and of one [tokens, labels], a block.
    """
    outputs = rows["output_tokens"].to_numpy()
    at = pc.index_in(rows["pair_id"], value_set=pairs["pair_id"])  # pyright: ignore[reportAttributeAccessIssue]
    lengths = pairs["input_tokens"].take(at).to_numpy().astype(np.int64) + outputs
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
        "longest_sequence": [_longest(sequences)],
    }


def _longest(sequences: pa.Table) -> list[int]:
    """Return the tokens and labels of the first of the longest sequences."""
    tokens = pc.list_value_length(sequences["input_ids"]).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    if not len(tokens):
        return [0, 0]
    at = int(tokens.argmax())
    return [int(tokens[at]), sum(sequences["span_ends"][at].as_py()) - sum(sequences["span_starts"][at].as_py())]


def costs(figures: Mapping[str, Any], shape: BaseShape, chat: ChatFormat, limit: int | None) -> Mapping[str, Any]:
    """Return figures of the rows' lengths and of the longest sequence's memory.

    Keys: limit, context, source; longest_row, and `over`: {length: {rows, tokens, output_tokens}} of the rows longer
    than it; longest_sequence (as the trainer reads it), its activation_bytes (null if unknown), and the formula.

    Args:
        figures: `length_figures` of all rows.
    """
    longest, labels = max(figures["longest_sequence"], key=lambda sequence: sequence[0], default=(0, 0))
    return {
        "limit": limit,
        "context": shape.context,
        "source": shape.source,
        "longest_row": max(figures["longest_row"], default=0),
        "over": figures["over"],
        "longest_sequence": longest,
        "activation_bytes": shape.activation_bytes(longest, labels, chat.vocab_size),
        "formula": FORMULA,
    }


def summary(figures: Mapping[str, Any]) -> str:
    """Return the costs in one sentence, for the log and the asset's page."""
    limit = f"{figures['limit']:,}" if figures["limit"] else "none"
    over = ", ".join(f"{n['rows']} over {int(step):,}" for step, n in figures["over"].items() if n["rows"])
    needed = figures["activation_bytes"]
    memory = f"about {needed / 2**30:.2f} GiB of activations" if needed is not None else "memory unknown: no base"
    return (
        f"rows of at most {figures['longest_row']:,} tokens (limit {limit}, {figures['source']}; "
        f"{over or 'none over 2,048'}); the longest sequence has {figures['longest_sequence']:,} tokens, {memory}"
    )
