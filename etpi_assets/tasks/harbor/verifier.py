"""Grading a machine by Harbor's convention: tests in, script run, reward file out.

`/tests/test.sh` runs the tests from the working directory. They write the reward to /logs/verifier: `reward.json` (an
object with a number "reward"), else `reward.txt` (one number). Both folders are emptied first, so files that an agent
puts there have no effect.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from etpi_assets.tasks import downloads
from etpi_assets.tasks.family import Task, Verdict
from etpi_resources.sandboxes import Sandbox

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
PLACES = (TESTS, SOLUTION, LOGS)
"""Writable folders that the format expects besides the working directory."""

_REWARDS = f"{LOGS}/verifier"
_SHOWN = 2000
"""Characters of the tests' output in a verdict that is not a pass."""

_MARK = "reward of the tests"


def grade(task: Task, sandbox: Sandbox) -> Verdict:
    """Run the tests in the machine and return their reward: passed (1), failed_tests, or no_reward (0).

    no_reward means that the tests write no readable reward in [0, 1]: an agent must not gain by breaking them.
    Raises OSError if the tests cannot be written to the machine."""
    put = sandbox.run(f"{empty_command(TESTS, _REWARDS)} && {put_command(TESTS, task.payload['tests'])}")
    if put.exit_code:
        raise OSError(f"task {task.task_id}: the tests could not be put into its machine: {put.output[-500:].strip()}")
    variables = _exports(task.payload["environment"])
    log = f"{_REWARDS}/test-stdout.txt"
    command = downloads.command_with_downloads(task.payload["place"], f"{TESTS}/test.sh > {log} 2>&1")
    done = sandbox.run(variables + command, timeout=task.payload["seconds"])
    log_end = sandbox.run(f"tail -c {_SHOWN} {log}").output
    reward, problem = _reward(sandbox)
    shown = {} if reward == 1.0 else {"exit_code": done.exit_code, "timed_out": done.timed_out, "output": log_end}
    if reward is None:
        return Verdict(0.0, "no_reward", {"problem": problem, **shown})
    return Verdict(reward, "passed" if reward == 1.0 else "failed_tests", shown)


def solution_commands(task: Task) -> Sequence[str]:
    """Return bash commands that run the reference solution; empty if the task has no solve.sh."""
    files = task.payload["solution"]
    if "solve.sh" not in files:
        return ()
    variables = _exports(task.payload.get("solution_environment", {}))
    return [f"{empty_command(SOLUTION)} && {put_command(SOLUTION, files)}", f"{variables}bash {SOLUTION}/solve.sh"]


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {key}={shlex.quote(value)}; " for key, value in sorted(variables.items()))


def empty_command(*folders: str) -> str:
    """Return the bash command that creates folders and deletes their content. A folder may be a mount."""
    paths = " ".join(folders)
    held = " ".join(f"{folder}/*" for folder in folders)
    return f'mkdir -p {paths} && (shopt -s dotglob nullglob; for held in {held}; do rm -rf -- "$held" || exit; done)'


def put_command(folder: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the bash command that writes files (see `folder`) below a folder."""
    lines = []
    for path, file in sorted(files.items()):
        name = shlex.quote(f"{folder}/{path}")
        lines.append(f"mkdir -p {shlex.quote(f'{folder}/{path}'.rpartition('/')[0])}")
        lines.append(f"printf %s {file['data']} | base64 -d > {name}")
        # test.sh runs by its name, so it must be executable even if its mode was lost on checkout.
        if file["executable"] or path == "test.sh":
            lines.append(f"chmod +x {name}")
    return " && ".join(lines) or "true"


def _reward(sandbox: Sandbox) -> tuple[float | None, str]:
    """Return (the reward or None, the reason if None)."""
    for name, read in (("reward.json", _of_json), ("reward.txt", float)):
        reply = sandbox.run(f"[ -f {_REWARDS}/{name} ] && echo {shlex.quote(_MARK)} && cat {_REWARDS}/{name}").output
        mark, _, text = reply.partition("\n")
        if mark != _MARK:
            continue
        try:
            reward = read(text)
        except (ValueError, TypeError, KeyError) as error:
            if name == "reward.json":  # the text file may have the number
                continue
            return None, f"{name} holds no number: {error}"
        if math.isfinite(reward) and 0.0 <= reward <= 1.0:
            return reward, ""
        return None, f"{name}: {reward} is not between 0 and 1"
    return None, f"the tests left no number in {_REWARDS}/reward.json or reward.txt"


def _of_json(text: str) -> float:
    value = json.loads(text)["reward"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"reward = {value!r}")
    return float(value)
