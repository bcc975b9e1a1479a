"""verl's rows for training by reward: a prompt, and what a reward function needs to judge the answer.

Belongs here: those rows. Does not belong here: the reward function, which is the reader's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.exports.conversations import MESSAGES
from etpi_assets.exports.format import Export, Written, write_splits
from etpi_assets.exports.source import ExportSource

_EXTRA = ("split", "task_id", "task_hash", "repo", "suite", "agent_id", "feature_id")
_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), *((name, pa.string()) for name in _EXTRA)])),
    ]
)


def _write(source: ExportSource, folder: Path) -> Written:
    def rows(split: str) -> Iterator[dict[str, Any]]:
        seen: set[tuple[str | None, str]] = set()
        for told in source.conversations():
            key = (told.record.task_id, told.agent.agent_id)
            if told.split != split or key in seen:
                continue
            seen.add(key)
            record = told.record
            about = {name: getattr(record, name, None) for name in ("task_id", "task_hash", "repo", "suite")}
            about |= {"split": split, "index": len(seen) - 1, "agent_id": key[1], "feature_id": told.agent.feature_id}
            yield {
                "data_source": record.suite or source.experiment,
                "prompt": source.first_messages(record, told.agent),
                "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": record.task_id},
                "extra_info": about,
            }

    return Written(
        write_splits(folder, _SCHEMA, rows), notes=("`ground_truth` is the task's id: judging is its suite's",)
    )


EXPORT = Export(
    "verl_rl",
    title="verl's prompts for training by reward",
    files="`data/train.parquet`, `data/val.parquet`, a row a task and agent",
    keeps="the prompt as a student reads it, task, agent, repository, suite, the split",
    loses="everything the agents did; the verifier, which is code",
    read_by="verl.utils.dataset.rl_dataset.RLHFDataset",
    importer=None,
    write=_write,
)
