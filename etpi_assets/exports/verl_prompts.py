"""verl's rows for reinforcement learning: a prompt, and the data a reward function needs to judge the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.exports.conversations import MESSAGES
from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.exports.format import Export, Written, write_splits

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
        for conversation in source.conversations():
            key = (conversation.record.task_id, conversation.agent.agent_id)
            if conversation.split != split or key in seen:
                continue
            seen.add(key)
            record = conversation.record
            about = {name: getattr(record, name, None) for name in ("task_id", "task_hash", "repo", "suite")}
            about |= {"split": split, "index": len(seen) - 1, "agent_id": key[1]}
            about["feature_id"] = conversation.agent.feature_id
            yield {
                "data_source": record.suite or source.experiment,
                "prompt": source.first_messages(record, conversation.agent),
                "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": record.task_id},
                "extra_info": about,
            }

    return Written(
        write_splits(folder, _SCHEMA, rows),
        notes=("`ground_truth` is the id of the task, whose suite judges the answer",),
    )


EXPORT = Export(
    "verl_rl",
    title="verl's prompts for reinforcement learning",
    files="`data/train.parquet`, `data/val.parquet`, one row per task and agent",
    keeps="the prompt as the student reads it, task, agent, repository, suite, the split",
    loses="everything the agents did; the verifier's code",
    read_by="verl.utils.dataset.rl_dataset.RLHFDataset",
    importer=None,
    write=_write,
)
