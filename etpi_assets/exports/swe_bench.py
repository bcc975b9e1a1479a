"""SWE-bench predictions: one patch per instance, in the format of its harness."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.exports.format import Export, Written


def _write(source: ExportSource, folder: Path) -> Written:
    """Write a file for each sample, since the harness takes one prediction per instance."""
    left: Counter[str] = Counter()
    lines: dict[int, list[str]] = {0: []}
    samples: Counter[str] = Counter()
    for record in source.records():
        patches = [agent.patch for agent in record.agents if agent.patch]
        if len(record.agents) > 1:
            left["more than one agent, so more than one patch"] += 1
        elif not patches or record.task_id is None:
            left["no patch"] += 1
        else:
            sample = samples[record.task_id]
            samples[record.task_id] += 1
            line = {
                "instance_id": record.task_id,
                "model_name_or_path": record.teacher or "unknown",
                "model_patch": patches[0],
            }
            lines.setdefault(sample, []).append(json.dumps(line, ensure_ascii=False) + "\n")
    rows = {}
    for sample, predictions in lines.items():
        name = "predictions.jsonl" if sample == 0 else f"predictions-{sample}.jsonl"
        (folder / name).write_text("".join(predictions), encoding="utf-8")
        rows[name] = len(predictions)
    return Written(rows, dict(left))


EXPORT = Export(
    "swe_bench",
    title="SWE-bench predictions",
    files="`predictions.jsonl`, and `predictions-<n>.jsonl` for further samples of an instance",
    keeps="instance, model, patch",
    loses="everything else; rollouts without a patch, and those of several agents (counted in the manifest)",
    read_by="swebench.harness.run_evaluation",
    importer=None,
    write=_write,
)
