"""Logs of `etpi capture`: the calls of a foreign harness with the token ids of every prompt and output."""

from __future__ import annotations

from pathlib import Path

from etpi_assets.agent.actions import read_actions
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.run_info import imported
from etpi_assets.importers.token_rows import chat_format
from etpi_assets.trajectories.assemble import CaptureError, assemble
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_resources.capture.store import is_log, read_log
from etpi_resources.rows import files_below
from etpi_resources.rows.bounded import Unreadable


def units(root: Path) -> list[Path]:
    return [file for file in files_below(root, ".jsonl") if is_log(file)]


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one log. Raises Unreadable: `empty`, `bad_token_ids`, `needs_tokenizer`."""
    rows = list(read_log(unit))
    about = rows[0] if rows else {}
    if (chat := chat_format(options, unit.name)).vocabulary_hash != about.get("vocabulary"):
        recorded = f"the ids are {about.get('tokenizer')!r}'s, whose vocabulary is not that of {chat.name!r}"
        raise Unreadable("bad_token_ids", f"{unit.name}: {recorded}; set options.tokenizer to it")
    calls = [row for row in rows if "output_ids" in row]
    if not calls:
        raise Unreadable("empty", f"{unit.name} has no call that was answered")
    agent = AgentRecord("agent1", "", "main", "unknown")
    try:
        assembled = assemble(rows, None, read_actions, main=agent)
    except CaptureError as error:
        raise Unreadable("bad_token_ids", f"{unit.name}: {error}") from error
    return imported(
        assembled.agents,
        unit.stem,
        options.repo or "unknown",
        teacher=options.teacher or calls[0]["model"],
        started_at=agent.turns[0].at if agent.turns else None,
        tools=assembled.tools,
        outcome={"reward": None, "verdict": "unknown", "details": {"capture": assembled.figures}},
    )
