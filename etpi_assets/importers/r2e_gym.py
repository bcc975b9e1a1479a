"""R2E-Gym trajectories: JSON lines of `Trajectory`, with a thought, an action and an observation per step.

The harness appends the parsed `{thought}\\n\\n{action}` of a response to the history. So a turn's content is the text
that later turns read, which may lack characters of a free-form response. Before each step the harness adds the number
of remaining steps to the last message; the trajectory lacks that line, so the importer adds it.
"""

from __future__ import annotations

import re

from etpi_assets.importers.conversation import Message, Options
from etpi_assets.importers.format import Row
from etpi_assets.importers.generic import solo
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import as_list, as_mapping, field, text_field
from etpi_assets.importers.spec import load
from etpi_assets.trajectories.records import RolloutRecord

_IMAGE = re.compile(r"(?:[^/]+/)?(?P<repo>[\w.-]+?)(?:_final|new)?:(?P<commit>[\w.-]+)")
_NO_STEPS = "You have reached the maximum number of steps. Please submit your answer NOW."
_ERRORS = ("env_exception", "llm_query_error", "reward_unavailable")


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `errored` or `empty` without a step, `unknown_form`."""
    steps = as_list(row.get("trajectory_steps"), f"{where}, trajectory_steps")
    reason, output = text_field(row, "exit_reason"), text_field(row, "test_output") or ""
    error = f"{reason}: {output[:300] or 'no output'}" if reason in _ERRORS else None
    system, instance = text_field(row, "agent_args", "system_prompt"), text_field(row, "agent_args", "instance_prompt")
    problem = text_field(row, "problem_statement") or ""
    entries = [Message("system", system)] if system else []
    # The two fields that every scaffold's template of a prompt has.
    prompt = (instance or "{problem_statement}").replace("{working_dir}", "/testbed")
    entries.append(Message("user", prompt.replace("{problem_statement}", problem)))
    max_steps = row.get("max_steps")
    for index, raw in enumerate(steps):
        if type(max_steps) is int:
            left = max_steps - index
            entries[-1].text += f"\n{f'Steps Remaining: {left}' if left > 0 else _NO_STEPS}"
        step = as_mapping(raw, f"{where}, trajectory_steps[{index}]")
        texts = [text for key in ("thought", "action") if (text := text_field(step, key))]
        # The harness took the steps without completion tokens; they are not the model's turns.
        learn = field(step, "token_usage_completion") != 0
        entries.append(Message("assistant", "\n\n".join(texts), trained=learn))
        entries.append(Message("user", text_field(step, "observation") or ""))
    if image := _IMAGE.search(text_field(row, "docker_image") or ""):
        row = {**row, "docker_image": {"task": f"{image['repo']}/{image['commit'][:12]}", "repo": image["repo"]}}
    info = run_info(row, options, load("r2e_gym")[0], shown=entries)
    info.rollout.error = error
    rollout = solo(entries, info, where, options)
    if rollout.outcome is not None:
        rollout.outcome["test_output_chars"] = len(output)
    return rollout
