"""Grading a machine by Harbor's convention: tests in, script run, reward file out.

`/tests/test.sh` runs the tests from the working directory. They write the reward to /logs/verifier: `reward.json` (an
object with a number "reward"), else `reward.txt` (one number). Both folders are emptied first, so files that an agent
puts there have no effect.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from etpi_assets.tasks import downloads
from etpi_assets.tasks.family import Task, Verdict
from etpi_assets.tasks.graded_run import GradedRun, run_graded
from etpi_assets.tasks.holes import Holed
from etpi_assets.tasks.proof import Calibration, TestRun, compared, dig_files, unlike_reference
from etpi_resources.sandboxes import Sandbox

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
PLACES = (TESTS, SOLUTION, LOGS)
"""Writable folders that the format expects besides the working directory."""

_REWARDS = f"{LOGS}/verifier"
_SHOWN = 2000
"""Characters of the tests' output in a verdict that is not a pass."""

_MARK = "reward of the tests"
_TEST = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")
_SHELL = re.compile(rb"#!\s*/(usr/)?bin/(env\s+)?(ba)?sh\b")
_READS = re.compile(r"""(?:(?:pathlib\.)?Path\(\s*(?P<q>["'])/tests/(?P<path>[\w./-]+)(?P=q)\s*\)\.read_text\(\))""")
"""How a test reads a text beside it."""
_INLINED = 20_000
"""Characters of a text, at most, that becomes a literal."""


def grade(task: Task, sandbox: Sandbox, calibration: Calibration | None = None) -> tuple[Verdict, TestRun]:
    """Run the tests in the machine and return their reward: passed (1), failed_tests, or no_reward (0).

    no_reward means that the tests write no readable reward in [0, 1]: an agent must not gain by breaking them. With a
    calibration, the values that pytest's tests expect are holes, and a run that disagrees with them has reward 0.

    Raises OSError if the tests cannot be written to the machine."""
    dug = dig_files(python_tests(task), calibration) if calibration else {}
    files = {**task.payload["tests"], **{path: _encoded(task, path, holed.text) for path, holed in dug.items()}}
    for path in _withheld(task, dug):
        del files[path]
    put = sandbox.run(f"{empty_command(TESTS, _REWARDS)} && {put_command(TESTS, files)}")
    if put.exit_code:
        raise OSError(f"task {task.task_id}: the tests could not be put into its machine: {put.output[-500:].strip()}")
    log = f"{_REWARDS}/test-stdout.txt"
    script = f"{TESTS}/test.sh"
    if _SHELL.match(base64.b64decode(files["test.sh"]["data"])):
        # Bash reads a sourced file whole, so nothing that runs meanwhile can append to it.
        script = f"bash -c 'source {script}' {script}"
    command = _exports(task.payload["environment"])
    command += downloads.command_with_downloads(task.payload["place"], f"{script} > {log} 2>&1")
    recorded = bool(dug) or (calibration is not None and bool(calibration.whole) and "all" not in calibration.trust)
    if recorded:
        run = run_graded(sandbox, command, timeout=task.payload["seconds"], safe_path=False)
    else:
        done = sandbox.run(command, timeout=task.payload["seconds"])
        run = GradedRun(done.output, done.exit_code, done.timed_out)
    test = compared(run, dug, calibration or Calibration())
    log_end = sandbox.run(f"tail -c {_SHOWN} {log}").output
    reward, problem, file = _reward(sandbox, calibration)
    shown: dict[str, Any] = {} if reward == 1.0 else {
        "exit_code": run.exit_code, "timed_out": run.timed_out, "output": log_end
    }  # fmt: skip
    if reward is None:
        return Verdict(0.0, "no_reward", {"problem": problem, **shown}), test
    unlike = unlike_reference(calibration, test) if calibration and recorded else None
    if recorded and (why := run.problem or test.failed or unlike):
        return Verdict(0.0, "failed_tests", {"compared": why, "output": log_end}), test
    return Verdict(reward, "passed" if reward == 1.0 else "failed_tests", {**shown, "reward_file": file}), test


def python_tests(task: Task) -> dict[str, str]:
    """Return the task's test files that pytest may collect, path -> text."""
    texts = {
        path: base64.b64decode(file["data"]).decode(errors="replace") for path, file in task.payload["tests"].items()
    }
    named = {path: text for path, text in texts.items() if _TEST.search(path)}
    return {path: _inlined(text, texts) for path, text in named.items()}


def names_pytest(task: Task) -> bool:
    """Return whether a shell script of the tests names pytest."""
    scripts = (base64.b64decode(file["data"]) for path, file in task.payload["tests"].items() if path.endswith(".sh"))
    return any(b"pytest" in script for script in scripts)


def _inlined(text: str, texts: Mapping[str, str]) -> str:
    """Return a test file in which the text of a file of the tests stands as a literal where it is read."""

    def literal(match: re.Match[str]) -> str:
        held = texts.get(match["path"])
        return match[0] if held is None or len(held) > _INLINED else repr(held)

    return _READS.sub(literal, text)


def _withheld(task: Task, dug: Mapping[str, Holed]) -> list[str]:
    """Return the files that only expected values were read from: no file that the script leads to names them."""
    texts = {p: base64.b64decode(f["data"]).decode(errors="replace") for p, f in task.payload["tests"].items()}
    read = {path for path in texts.keys() - dug.keys() if any(f"{TESTS}/{path}" in texts[test] for test in dug)}
    texts |= {path: holed.text for path, holed in dug.items()}
    reached, more = set[str](), {"test.sh", *dug}
    while more:
        reached |= more
        named = "\n".join(texts[path] for path in reached)
        words = {path: path.rpartition("/")[2].removesuffix(".py") for path in texts.keys() - reached}
        more = {path for path, word in words.items() if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", named)}
    return sorted(read - reached)


def _encoded(task: Task, path: str, text: str) -> dict[str, Any]:
    return {**task.payload["tests"][path], "data": base64.b64encode(text.encode()).decode()}


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


def _reward(sandbox: Sandbox, calibration: Calibration | None) -> tuple[float | None, str, str]:
    """Return (the reward or None, the reason if None, the file). With a calibration, only the reference's file counts.

    A file that its writer cannot change any more, or a link, was put there by something else than the tests."""
    for name, read in (("reward.json", _of_json), ("reward.txt", float)):
        if calibration and calibration.reward not in ("", name):
            continue
        file = f"{_REWARDS}/{name}"
        reply = sandbox.run(
            f"[ -f {file} ] && [ ! -L {file} ] && [ -w {file} ] && echo {shlex.quote(_MARK)} && cat {file}"
        ).output
        mark, _, text = reply.partition("\n")
        if mark != _MARK:
            continue
        try:
            reward = read(text)
        except (ValueError, TypeError, KeyError) as error:
            if name == "reward.json":  # the text file may have the number
                continue
            return None, f"{name} holds no number: {error}", name
        if math.isfinite(reward) and 0.0 <= reward <= 1.0:
            return reward, "", name
        return None, f"{name}: {reward} is not between 0 and 1", name
    return None, f"the tests left no number in {_REWARDS}/reward.json or reward.txt", ""


def _of_json(text: str) -> float:
    value = json.loads(text)["reward"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"reward = {value!r}")
    return float(value)
