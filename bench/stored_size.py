"""Measure the stored size of pairs against naive formats: `python bench/stored_size.py`.

`ETPI_TRAJECTORIES` names the folder of recorded runs; their turns are pairs in the real Qwen3 vocabulary. The script
stores them as the lake does (for each prompt only the ids that it adds to the pair it extends), as JSON lines of
{input_ids, output_ids, metadata}, and as parquet of whole prompts with the lake's compression. The prompts read back
from the lake must be equal, id for id.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from machine import machine
from recorded import captured, curate, qwen3

from etpi_assets.exports.token_ids import IDS
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.lake import parquet


def main() -> None:
    chat = qwen3()
    made = dict(curate(captured(chat), chat))
    pairs = made["pairs"]["pairs"]
    prompts = [ids for _, ids in iter_prompts(pairs)]
    outputs, metadata = pairs["output_ids"], pairs["metadata"].to_pylist()
    with tempfile.TemporaryDirectory() as name:
        stored, lines, whole, merged = (Path(name) / part for part in ("pairs", "jsonl", "whole", "sequences"))
        parquet.write("pairs", pairs, stored)
        parquet.write("sequences", made["merged"]["sequences"], merged)
        with lines.open("w") as file:
            for prompt, output, facts in zip(prompts, outputs.to_pylist(), metadata, strict=True):
                row = {"input_ids": prompt.tolist(), "output_ids": output, "metadata": json.loads(facts)}
                file.write(json.dumps(row) + "\n")
        table = pa.table({"input_ids": pa.array(prompts, IDS), "output_ids": outputs, "metadata": metadata})
        pq.write_table(table, whole, compression="zstd", compression_level=3, row_group_size=parquet.ROW_GROUP_ROWS)
        back = [ids for _, ids in iter_prompts(parquet.read("pairs", [stored]))]
        assert len(back) == len(prompts) and all((a == b).all() for a, b in zip(back, prompts, strict=True))
        size = {path.name: path.stat().st_size for path in (stored, lines, whole, merged)}
    tokens = sum(map(len, prompts)) + sum(len(ids) for ids in outputs)
    print(f"{len(prompts)} pairs, {tokens:,} tokens: {size['pairs'] / 1e6:.2f} MB, read back equal")
    for form, words in (("jsonl", "JSON lines"), ("whole", "parquet of whole prompts")):
        print(f"{words}: {size[form] / 1e6:.2f} MB, {size[form] / size['pairs']:.1f} times as much")
    print(f"the merged sequences: {size['sequences'] / 1e6:.2f} MB")


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
