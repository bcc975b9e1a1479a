"""GGUF: an experiment's trained checkpoints, for llama.cpp and programs built on it.

This module chooses the checkpoints and writes their metadata; llama.cpp's own script converts them
(`etpi_resources.gguf_converter`).
"""

from __future__ import annotations

from pathlib import Path

from etpi_assets.exports.experiment_data import CHECKPOINTS, ExportSource
from etpi_assets.exports.format import Export, Written
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.gguf_converter import NotConverted, convert


def _write(source: ExportSource, folder: Path) -> Written:
    finals = [row for row in source.checkpoints() if row["final"]]
    if not finals:
        raise NotConverted(
            f'{source.experiment} trains nothing (train.method and rl.method are "none"), so it has no checkpoint'
        )
    last = finals[-1]["role"]
    written = {}
    for row in finals:
        if row["role"] != last:
            continue
        name = f"{source.experiment}-{row['role']}-seed{row['seed']}.gguf"
        metadata = {
            "general.name": f"{source.spec.title}, seed {row['seed']}",
            "general.license.name": source.spec.card.license,
            "general.description": f"etpi experiment {source.experiment}, {row['role']}, seed {row['seed']}, step "
            f"{row['step']}, checkpoint {row['checkpoint_id']}",
        }
        convert(checkpoint_folder(source.lake.root, row["path"]), folder / name, metadata)
        written[name] = 1
    return Written(written)


EXPORT = Export(
    "gguf",
    title="The trained checkpoints for llama.cpp, converted by its own script",
    files="`<experiment>-<sft or rl>-seed<n>.gguf`, one file per seed: the last trained stage, adapters merged",
    keeps="every weight in its stored type, tokenizer and chat template; experiment, seed, step and hash of the "
    "checkpoint in `general.description`",
    loses="the adapter as separate weights, and intermediate checkpoints; a tokenizer that llama.cpp does not know "
    "(the embedded tiny one) is refused",
    read_by="llama.cpp, gguf.GGUFReader",
    importer=None,
    write=_write,
    assets=CHECKPOINTS,
)
