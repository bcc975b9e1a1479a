"""A data set folder in the layout of the Hugging Face Hub: parquet files by configuration, and a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.exports.conversations import JSON_COLUMNS, facts_of, json_fields, write_conversations
from etpi_assets.exports.experiment_data import ExportSource, StudentConversation
from etpi_assets.exports.format import Written, write_splits
from etpi_assets.exports.lineage import TEMPLATES, lineage_section
from etpi_assets.exports.token_ids import SEQUENCES, sequence_rows, weights_note

_TEXTS = ("rollout_id", "agent_id", "role", "task_id", "repo", "teacher", "exit_status", "model_patch")


def write(source: ExportSource, folder: Path) -> Written:
    schema = pa.schema([*JSON_COLUMNS, *((name, pa.string()) for name in _TEXTS), ("reward", pa.float64())])
    files, left_out = write_conversations(
        source, folder, schema, lambda conversation: _row(source, conversation), "messages"
    )
    files |= write_splits(folder, SEQUENCES, lambda split: sequence_rows(source, split), "tokens")
    (folder / "README.md").write_text(_card(source, files), encoding="utf-8")
    return Written({**files, "README.md": 1}, left_out, weights_note(source))


def _row(source: ExportSource, conversation: StudentConversation) -> dict[str, Any] | str:
    trained = set(conversation.trained)
    weighted = [
        {**message, "weight": int(i in trained)} if message["role"] == "assistant" else message
        for i, message in enumerate(conversation.messages)
    ]
    values = json_fields(weighted, source.chat, conversation.tools)
    if isinstance(values, str):
        return values
    agent = conversation.agent
    return {
        **values,
        **facts_of(conversation),
        "role": agent.role,
        "exit_status": agent.exit_status,
        "model_patch": agent.patch,
        "reward": source.rewards.get(conversation.record.rollout_id),
    }


def _card(source: ExportSource, files: Mapping[str, int]) -> str:
    spec = source.spec
    configs = []
    for name in ("messages", "tokens"):
        paths = [path for path in files if path.startswith(f"{name}/")]
        data = [{"split": "validation" if "val" in Path(p).stem else "train", "path": p} for p in paths]
        configs.append({"config_name": name, "data_files": data, **({"default": True} if name == "messages" else {})})
    head = {
        "license": spec.card.license,
        "language": [spec.card.language],
        "pretty_name": spec.title,
        "tags": ["code", "agents", "etpi"],
        "configs": configs,
    }
    return TEMPLATES.get_template("dataset_card.md.jinja").render(
        head=head,
        title=spec.title,
        text=spec.notes.strip() or f"The training data of the experiment `{source.experiment}`.",
        files={name: _counted(files, name) for name in ("messages", "tokens")},
        base=spec.base,
        capture=source.capture,
        lineage=lineage_section(source),
    )


def _counted(files: Mapping[str, int], under: str) -> str:
    return ", ".join(f"`{path}` ({rows})" for path, rows in files.items() if path.startswith(f"{under}/"))
