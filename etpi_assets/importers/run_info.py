"""A run's task, repository, model, reward and exit status, under the column names that data sets use for them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_assets.importers.conversation import Options
from etpi_assets.importers.source import Unreadable, number_field, text_field, tool_schemas_of
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord

_TASK = (
    "instance_id",
    "task_id",
    "task_name",
    "problem_id",
    "prompt_id",
    "trajectory_id",
    "traj_id",
    "id",
    "uuid",
    "uid",
    "example_id",
    "question_id",
    "sample_id",
    "conversation_id",
    "index",
    "idx",
)
_TEACHER = ("teacher", "model_name", "model", "generator", "model_name_or_path")
_REWARD = ("reward", "resolved", "score", "target", "success", "is_correct", "correct", "kto_tag", "label")
_FLAGS = ("target", "kto_tag", "label")
"""Columns that are a reward only where they hold true or false; others use them for an answer or a class."""
_TEXTS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_NO_REWARD = ("", "none", "null", "n/a", "nan")
_PATCH = ("model_patch", "generated_patch", "git_patch", "output_patch", "submission", "patch")
_TOOLS = ("tools", "functions", "tool_definitions", "available_tools", "oai_tools", "tool_defs")
_TRUNCATED = ("length", "max_tokens", "max_output_tokens")
_EXIT = ("exit_status", "exit_reason", "finish_reason", "status")
_SAMPLER = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "max_output_tokens", "seed")
TASK_COMPLETE = "mark_task_complete"
"""Name that Harbor gives to Terminus' statement that the task is done."""
_INSTANCE = re.compile(r"(?P<owner>.+?)__(?P<name>.+?)(?:-\d+|\.[0-9a-f]{8}\..+)")
_SUBMITS = re.compile(r"\becho\s+['\"]?(?:COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT|MINI_SWE_AGENT_FINAL_OUTPUT)")
_SUBMITTED_ON_EXIT = re.compile(r"submitted \((\w+)\)")
_EXITS = {
    "submitted": "Submitted", "submit": "Submitted", "agent": "Submitted", "finish": "Submitted",
    "finished": "Submitted",
    "exit_cost": "LimitsExceeded", "max_step_limit": "LimitsExceeded", "agent_max_step_limit": "LimitsExceeded",
    "abs_step_limit": "LimitsExceeded", "traj_time_limit": "LimitsExceeded", "max_iterations": "LimitsExceeded",
    "exit_context": "ContextWindowExceeded", "token_limit": "ContextWindowExceeded",
    "exit_format": "FormatError",
    "exit_error": "Error", "exit_environment_error": "Error", "exit_api": "Error", "llm_query_error": "Error",
    "env_exception": "Error",
}  # fmt: skip


_KNOWN = frozenset((*_TASK, *_TEACHER, *_REWARD, *_PATCH, *_TOOLS, *_EXIT, "repo", "repo_name"))


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run besides its messages; None for a fact that the row does not have.

    `truncated`: the last turn was cut at the output limit.
    """

    task_id: str | None
    repo: str
    teacher: str | None
    reward: float | None
    patch: str | None
    exit_status: str | None
    tools: list[dict[str, Any]] | None = None
    truncated: bool = False


def run_info(row: Mapping[str, Any], options: Options) -> RunInfo:
    """Read the facts of a run from the options, then the row, then its `metadata` and `info`.

    Raises:
        Unreadable: `unknown_form` if a column of tool schemas holds something else, `bad_reward` if a reward does.
    """
    inner = [_object(row.get(key)) for key in ("metadata", "info") if key in row]
    places = [{name: place[name] for name in place if name in _KNOWN} for place in (row, *inner) if place]

    def first(names: Sequence[str]) -> str | None:
        held = [(place, name) for place in places for name in names if name in place]
        return next((text for place, name in held if (text := text_field(place, name))), None)

    def rewards() -> Iterator[float | None]:
        yield from (reward_of(place, name) for place in places for name in _REWARD if name in place)

    def schemas() -> Iterator[list[dict[str, Any]] | None]:
        yield from (tool_schemas_of(place[name], name) for place in places for name in _TOOLS if name in place)

    task = first(_TASK)
    return RunInfo(
        task_id=task,
        repo=options.repo or first(("repo", "repo_name")) or repo_of(task or ""),
        teacher=options.teacher or first(_TEACHER),
        reward=next((reward for reward in rewards() if reward is not None), None),
        patch=first(_PATCH),
        exit_status=None if (ended := first(_EXIT)) in _TRUNCATED else exit_name(ended),
        truncated=ended in _TRUNCATED or row.get("is_truncated") is True,
        tools=next(filter(None, schemas()), None),
    )


def imported(agents: list[AgentRecord], task_id: str, repo: str, **columns: Any) -> RolloutRecord:
    """Build a rollout without a rollout id. `columns`: further fields of the record."""
    return RolloutRecord("", "set", None, task_id, repo, agents, **columns)


def build_rollout(agents: list[AgentRecord], info: RunInfo, where: str) -> RolloutRecord:
    """Build a rollout without a rollout id. `where` is the task id if the row has none."""
    return imported(
        agents,
        info.task_id or where,
        info.repo,
        teacher=info.teacher,
        outcome=outcome_of(info.reward),
        started_at=next((turn.at for agent in agents for turn in agent.turns if turn.at), None),
        tools=info.tools,
    )


def outcome_of(reward: float | None) -> dict[str, Any] | None:
    """Derive a verdict from a bare reward, which says of no tests whether they ran; None if there is no reward."""
    return None if reward is None else {"reward": reward, "verdict": "passed" if reward >= 1 else "low_reward"}


def exit_name(status: str | None) -> str | None:
    """Map an exit status to etpi's name; an unknown status stays as written."""
    if status is None:
        return None
    match = _SUBMITTED_ON_EXIT.fullmatch(status)
    return _EXITS.get(match[1] if match else status, status)


def exit_by_action(last_actions: Sequence[Action]) -> str:
    """Derive an exit status from the last turn's commands, for runs that do not record one."""
    submits = any(
        _SUBMITS.search(action.command) or action.command.split()[:1] in (["submit"], ["finish"], [TASK_COMPLETE])
        for action in last_actions
    )
    return "Submitted" if submits else "unknown"


def sampler_of(settings: Mapping[str, Any], usage: Any) -> dict[str, Any] | None:
    """Return the sampling settings that a run recorded, and the usage of its responses; None if there are none."""
    known = {key: settings[key] for key in _SAMPLER if settings.get(key) is not None}
    return {**known, **({"usage": usage} if usage else {})} or None


def add_usage(total: Counter[str], usage: Any) -> None:
    """Add the counts of tokens in the usage of one response, as far as there are any."""
    for key, count in usage.items() if isinstance(usage, dict) else ():
        if type(count) is int and 0 <= count < 2**53:
            total[str(key)] += count


def repo_of(instance_id: str) -> str:
    """Return "owner/name" of an instance id of SWE-bench ("owner__name-123") or SWE-smith
    ("owner__name.0a1b2c3d.lm_modify__9x8y"), and "unknown" for other ids.

    A split by repository then keeps all of the unknown ones on one side.
    """
    match = _INSTANCE.fullmatch(instance_id)
    return f"{match['owner']}/{match['name']}" if match else "unknown"


def _object(value: Any) -> Mapping[str, Any] | None:
    """Return a column that holds an object, or JSON text of one; None for anything else."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None


def reward_of(place: Mapping[str, Any], name: str) -> float | None:
    """Return a number or a flag, which may be text. Raises Unreadable: `bad_reward` for a `reward` of another form."""
    value = place.get(name)
    if isinstance(value, bool):
        return float(value)
    text = value.strip().lower() if isinstance(value, str) else None
    if value is None or name in _FLAGS or text in _NO_REWARD:
        return None
    number = number_field(place, name) if text is None else _TEXTS[text] if text in _TEXTS else _number(text)
    if number is None and name == "reward":
        raise Unreadable("bad_reward", f"reward is {str(value)[:40]!r}; write a number, true or false, or no reward")
    return number


def _number(text: str) -> float | None:
    try:
        return number_field({"": float(text)}, "")
    except ValueError:
        return None
