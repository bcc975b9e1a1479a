"""Harbor's trial folders: configuration, result, the agent's trajectory, the verifier's reward.

Belongs here: which folders are trials, and what stands beside the trajectory. Does not belong here: the trajectory
itself (`atif`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.importers import atif
from etpi_assets.importers.conversation import Options, token_ids
from etpi_assets.importers.facts import outcome_of, repo_of
from etpi_assets.importers.format import Look, of_runs, source_of
from etpi_assets.importers.source import (
    Unreadable,
    as_mapping,
    content_hash,
    field,
    number_field,
    read_json,
    text_field,
    to_utc,
)
from etpi_assets.trajectories.records import RolloutRecord, Turn

_FILES = ("config.json", "result.json")
_PARTS = ("agent", "verifier", "steps")


def claims(look: Look) -> bool:
    return look.root.is_dir() and bool(units(look.root))


def units(root: Path) -> list[Path]:
    """Every trial's folder: one with a configuration or result and an agent's or verifier's folder beside it."""
    found = []
    for folder, below, names in os.walk(root):
        if any(name in names for name in _FILES) and any(part in below for part in _PARTS):
            found.append(Path(folder))
            below.clear()
    return sorted(found)


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Raises Unreadable: `errored` or `missing_trajectory`, `multi_step`, or as the trajectory says."""
    result = as_mapping(read_json(unit / "result.json"), "result.json") if (unit / "result.json").exists() else {}
    raised = text_field(result, "exception_info", "exception_type")
    error = f"{raised}: {text_field(result, 'exception_info', 'exception_message') or ''}"[:500] if raised else None
    file = next(
        (f for name in ("trajectory.json", "trajectory.json.gz") if (f := unit / "agent" / name).is_file()), None
    )
    if file is None and (unit / "steps").is_dir():
        raise Unreadable(
            "multi_step", f'{unit.name} is a trial of several steps; import its steps\' agent folders as "atif"'
        )
    if file is None:
        said = f"; {error}" if error else f" in agent/: {', '.join(sorted(_names(unit / 'agent'))) or 'nothing'}"
        raise Unreadable("errored" if error else "missing_trajectory", f"{unit.name}: no trajectory.json{said}")
    document = as_mapping(read_json(file), file.name)
    made = atif.rollout_of(document, file, options, unit.name)
    _native(made, result)
    task = (
        text_field(result, "task_name")
        or text_field(read_config(unit), "task", "path")
        or unit.name.rpartition("__")[0]
    )
    made.task_id = task or unit.name
    made.repo = options.repo or repo_of(Path(made.task_id).name)
    made.teacher = made.teacher or text_field(result, "agent_info", "model_info", "name")
    made.outcome = _outcome(unit, result)
    made.started_at = to_utc(field(result, "started_at")) or made.started_at
    ended = to_utc(field(result, "finished_at"))
    if ended and made.started_at:
        made.wall_seconds = (ended - made.started_at).total_seconds()
    made.error = error
    if error:
        for agent in made.agents[:1]:
            agent.exit_status = "LimitsExceeded" if "Timeout" in (raised or "") else "Error"
    beside = [f for f in (unit / "result.json", *_reward_files(unit)) if f.is_file()]
    made.rollout_id = content_hash(source_of(unit, root), [file, *atif.documents_beside(file), *beside])
    return made


def read_config(unit: Path) -> Mapping[str, Any]:
    file = unit / "config.json"
    value = read_json(file) if file.is_file() else {}
    return value if isinstance(value, dict) else {}


def _names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []


def _reward_files(unit: Path) -> tuple[Path, Path]:
    return unit / "verifier" / "reward.json", unit / "verifier" / "reward.txt"


def _outcome(unit: Path, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The verifier's: `reward` where several are named, the only one where one is; the verifier's files where the
    result has none."""
    rewards = field(result, "verifier_result", "rewards")
    in_json, in_text = _reward_files(unit)
    if not rewards and in_json.is_file():
        rewards = read_json(in_json)
    if not rewards and in_text.is_file():
        try:
            rewards = {"reward": float(in_text.read_text(encoding="utf-8"))}
        except ValueError as error:
            raise Unreadable("unknown_form", f"{unit.name}: verifier/reward.txt is no number") from error
    if not isinstance(rewards, dict) or not rewards:
        return None
    reward = number_field(rewards, "reward")
    if reward is None and len(rewards) == 1:
        reward = number_field(rewards, *rewards)
    outcome = outcome_of(reward)
    return outcome if outcome is None or len(rewards) == 1 else {**outcome, "rewards": rewards}


def _native(made: RolloutRecord, result: Mapping[str, Any]) -> None:
    """Ids from the trial's `rollout_details` for the main agent, where its trajectory has none and they are as many as
    its turns."""
    details = field(result, "agent_result", "rollout_details")
    turns: list[Turn] = made.agents[0].turns if made.agents else []
    first = details[0] if isinstance(details, list) and details else None
    prompts, outputs = field(first, "prompt_token_ids"), field(first, "completion_token_ids")
    if not isinstance(prompts, list) or not isinstance(outputs, list) or any(t.capture != "none" for t in turns):
        return
    if len(prompts) != len(turns) or len(outputs) != len(turns):
        return
    known = field(first, "logprobs")
    for i, (turn, prompt, output) in enumerate(zip(turns, prompts, outputs, strict=True)):
        name = f"result.json, rollout_details[0], turn {i}"
        turn.prompt_ids, turn.output_ids = token_ids(prompt, name), token_ids(output, name)
        turn.logprobs = (
            atif.logprobs(known[i], len(turn.output_ids), name)
            if isinstance(known, list) and len(known) == len(turns)
            else None
        )
        turn.capture = "native"


FORMAT = of_runs(
    "harbor",
    title="Harbor trial folders",
    files="folders with `config.json` or `result.json` and `agent/trajectory.json`, `verifier/reward.{json,txt}`",
    keeps="what `atif` keeps, ids and log-probabilities from `rollout_details` where the trajectory has none, the "
    "verifier's rewards, times, the exception, task and model",
    loses="logs, artifacts, costs, the configuration; trials of several steps are quarantined",
    claims=claims,
    units=units,
    record=record,
)
