"""A data set folder as the hub has them: parquet by configuration, and a card.

Belongs here: the card and the two configurations. Does not belong here: uploading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.exports.conversations import message_columns, message_fields
from etpi_assets.exports.format import Export, Written, write_splits
from etpi_assets.exports.source import ExportSource
from etpi_assets.exports.token_ids import SEQUENCES, sequence_rows, weights_note

_TEXTS = ("rollout_id", "agent_id", "role", "task_id", "repo", "teacher", "exit_status", "model_patch")


def _write(source: ExportSource, folder: Path) -> Written:
    columns = message_columns(source, ("weight", pa.int8()))
    schema = pa.schema([*columns, *((name, pa.string()) for name in _TEXTS), ("reward", pa.float64())])
    files = write_splits(folder, schema, lambda split: _rows(source, split), "messages")
    files |= write_splits(folder, SEQUENCES, lambda split: sequence_rows(source, split), "tokens")
    (folder / "README.md").write_text(_card(source, files), encoding="utf-8")
    return Written({**files, "README.md": 1}, notes=weights_note(source))


def _rows(source: ExportSource, split: str) -> Iterator[dict[str, Any]]:
    for told in source.conversations():
        if told.split != split:
            continue
        learnt = set(told.learnt)
        given = message_fields(source, told)
        given["messages"] = [
            {**message, "weight": int(i in learnt) if message["role"] == "assistant" else None}
            for i, message in enumerate(given["messages"])
        ]
        record, agent = told.record, told.agent
        yield {
            **given,
            "rollout_id": record.rollout_id,
            "agent_id": agent.agent_id,
            "role": agent.role,
            "task_id": record.task_id,
            "repo": record.repo,
            "teacher": record.teacher,
            "exit_status": agent.exit_status,
            "model_patch": agent.patch,
            "reward": source.rewards.get(record.rollout_id),
        }


def _card(source: ExportSource, files: Mapping[str, int]) -> str:
    spec = source.spec
    configs = []
    for name in ("messages", "tokens"):
        found = [path for path in files if path.startswith(f"{name}/")]
        data = [{"split": "validation" if "val" in Path(p).stem else "train", "path": p} for p in found]
        configs.append({"config_name": name, "data_files": data, **({"default": True} if name == "messages" else {})})
    head = {
        "license": spec.card.license,
        "language": [spec.card.language],
        "pretty_name": spec.title,
        "tags": ["code", "agents", "etpi"],
        "configs": configs,
    }
    counted = {name: _counted(files, name) for name in ("messages", "tokens")}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()),  # YAML reads JSON
        "---",
        "",
        f"# {spec.title}",
        "",
        spec.notes.strip() or f"The training data of the experiment `{source.experiment}`.",
        "",
        "| configuration | a row is | files |",
        "|---|---|---|",
        f"| `messages` | one agent's conversation; `weight` 1 marks what is learnt | {counted['messages']} |",
        f"| `tokens` | one training sequence: `input_ids`, `labels`, weighted spans | {counted['tokens']} |",
        "",
        f"Token ids are of the tokenizer `{spec.base.tokenizer}` under the template `{spec.base.chat_template}`, "
        f"capture `{spec.pairs.capture}`.",
        "",
        "## Where it comes from",
        "",
        "| data | version |",
        "|---|---|",
        *(f"| `{name}` | `{version}` |" for name, version in source.versions().items()),
        "",
    ]
    return "\n".join(lines)


def _counted(files: Mapping[str, int], under: str) -> str:
    return ", ".join(f"`{path}` ({rows})" for path, rows in files.items() if path.startswith(f"{under}/"))


EXPORT = Export(
    "hub",
    title="A data set folder for the hub, with its card",
    files="`README.md`, `messages/*.parquet` (a row an agent), `tokens/*.parquet` (a row a branch of a merged "
    "sequence)",
    keeps="what `trl_messages` and `trl` keep, and which turns are learnt (`weight`), role, exit status, patch; "
    "versions in the card",
    loses="reasoning kept apart, log-probabilities, the verdict but for its reward",
    read_by="datasets.load_dataset",
    importer="messages",
    write=_write,
)
