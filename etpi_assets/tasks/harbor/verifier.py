"""Grading a machine by Harbor's convention: tests in, script run, reward file out.

Belongs here: the places inside, the commands, and reading the reward. Does not belong here: task folders (`folder`).

The tests lie in /tests and are run by `/tests/test.sh` from the working directory. The reward is what they leave in
/logs/verifier: `reward.json` (an object with a number "reward"), else `reward.txt` (one number). Both folders are
emptied first: what an agent put there counts for nothing.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from etpi_assets.tasks.family import Task, Verdict
from etpi_resources.sandboxes import Sandbox

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
PLACES = (TESTS, SOLUTION, LOGS)
"""Folders that the format expects to be writable beside the working directory."""

_REWARDS = f"{LOGS}/verifier"
_SHOWN = 2000
"""Characters of the tests' output in a verdict that is not a pass."""

_MARK = "reward of the tests"


def grade(task: Task, sandbox: Sandbox) -> Verdict:
    """Run the tests in the machine. `reward` is theirs where it lies in [0, 1]; 0 and the verdict no_reward where they
    leave none, or none that can be read: an agent must not be better off for breaking them.

    Raises OSError where the tests cannot be put into the machine."""
    put = sandbox.run(f"{empty_command(TESTS, _REWARDS)} && {put_command(TESTS, task.payload['tests'])}")
    if put.exit_code:
        raise OSError(f"task {task.task_id}: the tests could not be put into its machine: {put.output[-500:].strip()}")
    variables = "".join(
        f"export {key}={shlex.quote(value)}; " for key, value in sorted(task.payload["environment"].items())
    )
    log = f"{_REWARDS}/test-stdout.txt"
    done = sandbox.run(f"{variables}{TESTS}/test.sh > {log} 2>&1", timeout=task.payload["seconds"])
    said = sandbox.run(f"tail -c {_SHOWN} {log}").output
    reward, problem = _reward(sandbox)
    shown = {} if reward == 1.0 else {"exit_code": done.exit_code, "timed_out": done.timed_out, "output": said}
    if reward is None:
        return Verdict(0.0, "no_reward", {"problem": problem, **shown})
    return Verdict(reward, "passed" if reward == 1.0 else "failed_tests", shown)


def solution_commands(task: Task) -> Sequence[str]:
    """Bash commands that run the reference solution; none where the task has no solve.sh."""
    files = task.payload["solution"]
    if "solve.sh" not in files:
        return ()
    return [f"{empty_command(SOLUTION)} && {put_command(SOLUTION, files)}", f"bash {SOLUTION}/solve.sh"]


def empty_command(*folders: str) -> str:
    """The bash command that makes folders and takes away all they hold. A folder may be a mount, which stays."""
    made = " ".join(folders)
    held = " ".join(f"{folder}/*" for folder in folders)
    return f'mkdir -p {made} && (shopt -s dotglob nullglob; for held in {held}; do rm -rf -- "$held" || exit; done)'


def put_command(folder: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The bash command that writes files (see `folder`) below a folder."""
    lines = []
    for path, file in sorted(files.items()):
        name = shlex.quote(f"{folder}/{path}")
        lines.append(f"mkdir -p {shlex.quote(f'{folder}/{path}'.rpartition('/')[0])}")
        lines.append(f"printf %s {file['data']} | base64 -d > {name}")
        # The script that grades is run by its name, whether or not it was checked out with its mode.
        if file["executable"] or path == "test.sh":
            lines.append(f"chmod +x {name}")
    return " && ".join(lines) or "true"


def _reward(sandbox: Sandbox) -> tuple[float | None, str]:
    """(the reward, why there is none)."""
    for name, read in (("reward.json", _of_json), ("reward.txt", float)):
        found = sandbox.run(f"[ -f {_REWARDS}/{name} ] && echo {shlex.quote(_MARK)} && cat {_REWARDS}/{name}").output
        mark, _, text = found.partition("\n")
        if mark != _MARK:
            continue
        try:
            reward = read(text)
        except (ValueError, TypeError, KeyError) as error:
            if name == "reward.json":  # a report without the number; the text file may have it
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
