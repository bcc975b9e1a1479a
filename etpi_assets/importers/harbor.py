"""Harbor's trial folders: configuration, result, the verifier's reward, and the agent's trajectory (read by `atif`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.importers import atif
from etpi_assets.importers.conversation import Options, set_ids
from etpi_assets.importers.format import source_of
from etpi_assets.importers.run_info import outcome_of, repo_of
from etpi_assets.importers.source import as_mapping, content_hash, field, number_field, text_field, text_inside, to_utc
from etpi_assets.trajectories.records import RolloutRecord, Turn
from etpi_resources.rows.bounded import Unreadable, read_json

_FILES = ("config.json", "result.json")
_PARTS = ("agent", "verifier", "steps")
_REWARDS = ("verifier/reward.json", "verifier/reward.txt")


def units(root: Path) -> list[Path]:
    """Return the trial folders: those with a configuration or result, and an agent's or verifier's folder."""
    folders = []
    for folder, below, names in os.walk(root):
        if any(name in names for name in _FILES) and any(part in below for part in _PARTS):
            folders.append(Path(folder))
            below.clear()
    return sorted(folders)


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one trial folder as a rollout.

    Raises Unreadable: `errored`, `missing_trajectory`, `multi_step`, or as the trajectory's reader.
    """
    result = as_mapping(read_json(unit / "result.json"), "result.json") if (unit / "result.json").exists() else {}
    raised, message = (text_field(result, "exception_info", f"exception_{key}") for key in ("type", "message"))
    error = f"{raised}: {message or ''}"[:500] if raised else None
    file = _trajectory(unit, error)
    document = as_mapping(read_json(file), file.name)
    rollout = atif.rollout_of(document, file, options, unit.name)
    _add_token_ids(rollout, result)
    if (task := text_field(result, "task_name")) is None and (config := unit / "config.json").is_file():
        task = Path(text_field(read_json(config), "task", "path") or "").name  # without [task] the folder's name
    rollout.task_id = task or unit.name.rpartition("__")[0] or unit.name
    rollout.repo = options.repo or repo_of(Path(rollout.task_id).name)
    rollout.teacher = rollout.teacher or text_field(result, "agent_info", "model_info", "name")
    rollout.outcome = _outcome(unit, result)
    rollout.started_at = to_utc(field(result, "started_at")) or rollout.started_at
    ended = to_utc(field(result, "finished_at"))
    if ended and rollout.started_at:
        rollout.wall_seconds = (ended - rollout.started_at).total_seconds()
    rollout.error = error
    if raised:
        rollout.agents[0].exit_status = "LimitsExceeded" if "Timeout" in raised else "Error"
    other_files = [file for name in ("result.json", *_REWARDS) if (file := unit / name).is_file()]
    rollout.rollout_id = content_hash(source_of(unit, root), [file, *atif.documents_beside(file), *other_files])
    return rollout


def _trajectory(unit: Path, error: str | None) -> Path:
    """Return the trial's trajectory file. Raises Unreadable: `errored`, `missing_trajectory`, `multi_step`."""
    for name in ("trajectory.json", "trajectory.json.gz"):
        if (file := unit / "agent" / name).is_file():
            return file
    if (unit / "steps").is_dir():
        remedy = "import the agent folders of its steps as `atif`"
        raise Unreadable("multi_step", f"{unit.name} is a trial of several steps; {remedy}")
    present = ", ".join(sorted(file.name for file in (unit / "agent").glob("*"))) or "nothing"
    why = f"; {error}" if error else f" in agent/: {present}"
    raise Unreadable("errored" if error else "missing_trajectory", f"{unit.name}: no trajectory.json{why}")


def _outcome(unit: Path, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the verifier's outcome, from the result or from the verifier's files.

    The reward is the entry `reward`, or the only entry.
    """
    rewards = field(result, "verifier_result", "rewards")
    in_json, in_text = _REWARDS
    if not rewards and (unit / in_json).is_file():
        rewards = read_json(unit / in_json)
    if not rewards and (text := text_inside(unit, in_text)) is not None:
        try:
            rewards = {"reward": float(text)}
        except ValueError as error:
            raise Unreadable("unknown_form", f"{unit.name}: {in_text} is no number") from error
    if not isinstance(rewards, dict) or not rewards:
        return None
    reward = number_field(rewards, "reward")
    if reward is None and len(rewards) == 1:
        reward = number_field(rewards, *rewards)
    outcome = outcome_of(reward)
    return outcome if outcome is None or len(rewards) == 1 else {**outcome, "rewards": rewards}


def _add_token_ids(rollout: RolloutRecord, result: Mapping[str, Any]) -> None:
    """Set the main agent's token ids from `rollout_details`, if its trajectory has none and each turn has an entry."""
    details = field(result, "agent_result", "rollout_details")
    turns: list[Turn] = rollout.agents[0].turns if rollout.agents else []
    first = details[0] if isinstance(details, list) and details else None
    prompts, outputs = field(first, "prompt_token_ids"), field(first, "completion_token_ids")
    if not isinstance(prompts, list) or not isinstance(outputs, list) or any(t.capture != "none" for t in turns):
        return
    if len(prompts) != len(turns) or len(outputs) != len(turns):
        return
    logprobs = field(first, "logprobs")
    logprobs = logprobs if isinstance(logprobs, list) and len(logprobs) == len(turns) else [None] * len(turns)
    for i, (turn, prompt, output, scores) in enumerate(zip(turns, prompts, outputs, logprobs, strict=True)):
        set_ids(turn, prompt, output, scores, f"result.json, rollout_details[0], turn {i}")
        turn.capture = "native"
