"""verl's rows for reinforcement learning: a prompt, and the data a reward function needs to judge the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.exports.conversations import write_conversations
from etpi_assets.exports.experiment_data import ExportSource, StudentConversation
from etpi_assets.exports.format import SPLITS, Export, Written

_EXTRA = ("split", "task_id", "task_hash", "repo", "suite", "agent_id", "feature_id")
_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), *((name, pa.string()) for name in _EXTRA)])),
    ]
)


def _write(source: ExportSource, folder: Path) -> Written:
    rows_of: dict[str, set[tuple[str | None, str]]] = {split: set() for split in SPLITS}
    offered = False

    def row(conversation: StudentConversation) -> dict[str, Any] | str:
        nonlocal offered
        record, seen = conversation.record, rows_of[conversation.split]
        key = (record.task_id, conversation.agent.agent_id)
        if key in seen:
            return "later rollouts of a task and agent"
        prompt = source.first_messages(record, conversation.agent)
        if any(message.keys() != {"role", "content"} for message in prompt):
            return "prompts with calls or thoughts, which `prompt` has no columns for"
        seen.add(key)
        offered |= bool(conversation.tools) and not source.chat.calls_in_content
        about = {name: getattr(record, name, None) for name in ("task_id", "task_hash", "repo", "suite")}
        about |= {"split": conversation.split, "index": len(seen) - 1, "agent_id": key[1]}
        about["feature_id"] = conversation.agent.feature_id
        return {
            "data_source": record.suite or source.experiment,
            "prompt": prompt,
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": record.task_id},
            "extra_info": about,
        }

    files, left_out = write_conversations(source, folder, _SCHEMA, row)
    notes = ("`ground_truth` is the id of the task, whose suite judges the answer",)
    tools = ("rows have no tool schemas: name the tools in verl's `data.tool_config_path`",) if offered else ()
    return Written(files, left_out, (*notes, *tools))


EXPORT = Export(
    "verl_rl",
    title="verl's prompts for reinforcement learning",
    files="`data/train.parquet`, `data/val.parquet`, one row per task and agent",
    keeps="the prompt as the student reads it, task, agent, repository, suite, the split",
    loses="everything the agents did; the verifier's code; tool schemas, which verl reads from its configuration",
    read_by="verl.utils.dataset.rl_dataset.RLHFDataset",
    importer=None,
    write=_write,
)
