"""An export: a text file with the prompt and the output of every trained turn."""

from __future__ import annotations

from pathlib import Path

from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.exports.format import Export, Written


def write(source: ExportSource, folder: Path) -> Written:
    """Write `turns.txt`."""
    count = 0
    with (folder / "turns.txt").open("w", encoding="utf-8") as out:
        for _, prompt, pair in source.pairs():
            out.write(f"{source.chat.decode(prompt.tolist())}{source.chat.decode(pair['output_ids'])}\n\n")
            count += 1
    return Written({"turns.txt": count})


EXPORT = Export(
    name="plain_text",
    title="Prompts and outputs as text",
    files="turns.txt",
    keeps="the text of every trained turn",
    loses="token ids, weights, splits",
    read_by="people",
    importer=None,
    write=write,
)
