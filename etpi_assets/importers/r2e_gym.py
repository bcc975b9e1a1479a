"""R2E-Gym trajectories: JSON lines of `Trajectory`, a thought, an action and an observation a step.

Belongs here: that row. Does not belong here: its supervised data sets, which are rows of messages.

The harness appends what it parsed of a response to the history, `{thought}\\n\\n{action}`, so a turn's content is what
later turns read, which for a free-form response is not always every character the model wrote. It ends what the model
reads before each step with the count of steps left; that is put back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etpi_assets.importers.conversation import Entry, Options
from etpi_assets.importers.facts import facts
from etpi_assets.importers.format import Row, of_rows
from etpi_assets.importers.messages import solo
from etpi_assets.importers.source import Unreadable, as_list, as_mapping, field, text_field
from etpi_assets.trajectories.records import RolloutRecord

_IMAGE = re.compile(r"(?:[^/]+/)?(?P<repo>[\w.-]+?)(?:_final|new)?:(?P<commit>[\w.-]+)")
_NO_STEPS = "You have reached the maximum number of steps. Please submit your answer NOW."
_ERRORS = ("env_exception", "llm_query_error", "reward_unavailable")


def claims(row: Row) -> bool:
    return "trajectory_steps" in row


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Raises Unreadable: `errored` or `empty` where no step was taken, `unknown_form`."""
    (row,) = rows
    steps = as_list(row.get("trajectory_steps"), f"{where}, trajectory_steps")
    reason = text_field(row, "exit_reason")
    if not steps:
        said = (text_field(row, "test_output") or "no output")[:300]
        raise Unreadable("errored" if reason in _ERRORS else "empty", f"{where}: no step; exit {reason}: {said}")
    system, instance = text_field(row, "agent_args", "system_prompt"), text_field(row, "agent_args", "instance_prompt")
    problem = text_field(row, "problem_statement") or ""
    entries = [Entry("system", system)] if system else []
    entries.append(Entry("user", _filled(instance, problem) if instance else problem))
    allowed = row.get("max_steps")
    for index, raw in enumerate(steps):
        if type(allowed) is int:
            left = allowed - index
            entries[-1].content += f"\n{f'Steps Remaining: {left}' if left > 0 else _NO_STEPS}"
        step = as_mapping(raw, f"{where}, trajectory_steps[{index}]")
        said = [text for key in ("thought", "action") if (text := text_field(step, key))]
        # A step that no tokens were spent on was the harness's own: nobody is to learn it.
        learn = field(step, "token_usage_completion") != 0
        entries.append(Entry("assistant", "\n\n".join(said), learn=learn))
        entries.append(Entry("user", text_field(step, "observation") or ""))
    found = facts(row, options)
    image = _IMAGE.search(text_field(row, "docker_image") or "")
    task = text_field(row, "ds", "instance_id") or (f"{image['repo']}@{image['commit']}" if image else None)
    repo = text_field(row, "ds", "repo") or text_field(row, "ds", "repo_name") or (image["repo"] if image else None)
    found = replace(
        found,
        task_id=task or found.task_id,
        repo=options.repo or repo or found.repo,
        teacher=found.teacher or _model(row.get("agent_args")),
    )
    made = solo(entries, found, where, options)
    if made.outcome is not None:
        made.outcome["test_output_chars"] = len(text_field(row, "test_output") or "")
    made.error = f"{reason}: {(text_field(row, 'test_output') or '')[:300]}" if reason in _ERRORS else None
    return made


def _filled(template: str, problem: str) -> str:
    """The prompt's template with the two fields that every one of its scaffolds has; what else it names stays."""
    return template.replace("{problem_statement}", problem).replace("{working_dir}", "/testbed")


def _model(arguments: Any) -> str | None:
    return text_field(arguments, "llm_name") if isinstance(arguments, Mapping) else None


FORMAT = of_rows(
    "r2e_gym",
    title="R2E-Gym trajectories: `trajectory_steps` of thought, action and observation",
    keeps="the prompt (system, and the instance template with its problem), thoughts with actions as turns, "
    "observations, reward, patch, exit reason, model, repository and commit; steps that the harness took itself are "
    "read, never learnt",
    loses="times, token counts, the test output but for its length, the environment's arguments, the steps-remaining "
    "lines",
    claims=claims,
    record=record,
)
