"""Grading a machine by Harbor's convention: tests in, script run, reward file out.

`/tests/test.sh` runs the tests from the working directory. They write the reward to /logs/verifier: `reward.json` (an
object with a number "reward"), else `reward.txt` (one number). Both folders are emptied first, so files that an agent
puts there have no effect.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import Rejected, Task
from etpi_assets.tasks.frozen import RESERVED
from etpi_assets.tasks.graded_run import GradedRun, run_graded
from etpi_assets.tasks.harbor import snapshot
from etpi_assets.tasks.proof import Tests, Trial
from etpi_resources.outside import loads
from etpi_resources.sandboxes import Sandbox, SandboxFactory

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
PLACES = (TESTS, SOLUTION, LOGS)
"""Writable folders that the format expects besides the working directory."""

_REWARDS = f"{LOGS}/verifier"
_SHOWN = 2000
"""Characters of the tests' output in a verdict that is not a pass."""

_TEST = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")
"""A file that pytest may collect."""
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)
_SHELL = re.compile(rb"#!\s*/(usr/)?bin/(env\s+)?(ba)?sh\b")
_READS = re.compile(r"""(?:(?:pathlib\.)?Path\(\s*(?P<q>["'])/tests/(?P<path>[\w./-]+)(?P=q)\s*\)\.read_text\(\))""")
"""How a test reads a text beside it."""
_INLINED = 20_000
"""Characters of a text, at most, that becomes a literal."""


class Unpacked(ValueError):
    """An agent's archive cannot be unpacked."""


@dataclass(frozen=True)
class MachineTrial(Trial):
    """The run of a task's tests. Work is an archive of the working directory (`snapshot`); "": it is untouched.

    A run in which a reversed test fails has no reward, so nothing is reversed."""

    task: Task
    key = "tests"
    pytest = None
    reversible = False

    @property
    def needs(self) -> object:
        return self.task.content_hash if solution_commands(self.task) else None

    def tests(self, sandboxes: SandboxFactory) -> Tests:
        texts = _texts(self.task.payload["tests"])
        return Tests({path: _inlined(text, texts) for path, text in texts.items() if _TEST.search(path)}, {})

    def reference(self, sandboxes: SandboxFactory) -> str:
        """Run the reference solution as an agent would, and return the machine's archive."""
        commands = solution_commands(self.task)
        if not commands:
            raise Rejected("no_reference", "there is no solution/solve.sh that could prove the task")
        environment = places.needs(self.place, None, PLACES).environment
        with sandboxes.create({}, places.test_limits(self.place), environment) as sandbox:
            outputs = [sandbox.run(command, timeout=self.task.payload["solution_seconds"]) for command in commands]
            if (archive := snapshot.take(sandbox)) is not None:
                return archive
        raise Rejected("reference_fails", f"its machine did not give its files out: {outputs[-1].output[-500:]}")

    def run(
        self, work: str, tests: Tests, sandboxes: SandboxFactory, *, recorded: bool, record: bool = False
    ) -> GradedRun:
        with places.test_sandbox(self.place, sandboxes, {}, PLACES, record=record) as sandbox:
            if work and (problem := snapshot.put(sandbox, work, _reserved(self.task))):
                raise Unpacked(problem)
            return self._run(sandbox, tests, recorded=recorded)

    def _run(self, sandbox: Sandbox, tests: Tests, *, recorded: bool) -> GradedRun:
        task = self.task
        holed = {path: text for path, text in tests.files.items() if recorded}
        files = {path: dict(file) for path, file in task.payload["tests"].items()}
        for path, text in holed.items():
            files[path]["data"] = base64.b64encode(text.encode()).decode()
        for path in _withheld(task, holed):
            del files[path]
        put = sandbox.run(f"{empty_command(TESTS, _REWARDS)} && {put_command(TESTS, files)}")
        if put.exit_code:
            problem = put.output[-500:].strip()
            raise OSError(f"task {task.task_id}: the tests could not be put into its machine: {problem}")
        log, script = f"{_REWARDS}/test-stdout.txt", f"{TESTS}/test.sh"
        if _SHELL.match(base64.b64decode(files["test.sh"]["data"])):
            # Bash reads a sourced file whole, so nothing that runs meanwhile can append to it.
            script = f"bash -c 'source {script}' {script}"
        command = _exports(task.payload["environment"])
        command += downloads.command_with_downloads(task.payload["place"], f"{script} > {log} 2>&1")
        run = run_graded(sandbox, command, recorded=recorded, timeout=task.payload["seconds"], safe_path=False)
        return replace(run, output=sandbox.run(f"tail -c {_SHOWN} {log}").output, rewards=_rewards(sandbox))

    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        """Return the reward that the tests left, 0 if they left no readable one: nobody must gain by breaking them."""
        run = test.run
        reward, problem, file = _reward(run.rewards, test.calibration.reward)
        if reward is None:
            return 0.0, {"problem": problem, "timed_out": run.timed_out}
        details = {"reward_file": file, **({} if reward == 1 else {"timed_out": run.timed_out})}
        return (reward if test.agrees else 0.0), details


def _reserved(task: Task) -> set[str]:
    """Return the modules that an agent may not add: RESERVED and those that the tests import, without those that the
    request or the solution names."""
    text = "\n".join([task.instruction, *_texts(task.payload["solution"]).values()])
    imports = {module for test in _texts(task.payload["tests"]).values() for module in _IMPORT.findall(test)}
    return (set(RESERVED) | imports) - set(re.findall(r"(?<![\w.])(\w+)(?:\.py\b|/)", text))


def _texts(files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {path: base64.b64decode(file["data"]).decode(errors="replace") for path, file in files.items()}


def _inlined(text: str, texts: Mapping[str, str]) -> str:
    """Return a test file in which the text of a file of the tests stands as a literal where it is read."""

    def literal(match: re.Match[str]) -> str:
        held = texts.get(match["path"])
        return match[0] if held is None or len(held) > _INLINED else repr(held)

    return _READS.sub(literal, text)


def _withheld(task: Task, dug: Mapping[str, str]) -> list[str]:
    """Return the files that only expected values were read from: no file that the script leads to names them."""
    texts = _texts(task.payload["tests"])
    read = {path for path in texts.keys() - dug.keys() if any(f"{TESTS}/{path}" in texts[test] for test in dug)}
    texts |= dug
    reached, more = set[str](), {"test.sh", *dug}
    while more:
        reached |= more
        named = "\n".join(texts[path] for path in reached)
        words = {path: path.rpartition("/")[2].removesuffix(".py") for path in texts.keys() - reached}
        more = {path for path, word in words.items() if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", named)}
    return sorted(read - reached)


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


def _rewards(sandbox: Sandbox) -> dict[str, str]:
    """Return the reward files. One that its writer cannot change any more, or a link, is not of the tests."""
    rewards = {}
    for name in _READERS:
        file = f"{_REWARDS}/{name}"
        done = sandbox.run(f"[ -f {file} ] && [ ! -L {file} ] && [ -w {file} ] && cat {file}")
        rewards |= {} if done.exit_code else {name: done.output}
    return rewards


def _reward(rewards: Mapping[str, str], only: str) -> tuple[float | None, str, str]:
    """Return (the reward or None, the reason if None, the file). `only`: the file that the reference leaves, or ""."""
    for name in [name for name in _READERS if name in rewards and only in ("", name)]:
        try:
            reward = _READERS[name](rewards[name])
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            if name == "reward.json":  # the text file may have the number
                continue
            return None, f"{name} holds no number: {error}", name
        if math.isfinite(reward) and 0.0 <= reward <= 1.0:
            return reward, "", name
        return None, f"{name}: {reward} is not between 0 and 1", name
    return None, f"the tests left no number in {_REWARDS}/reward.json or reward.txt", ""


def _of_json(text: str) -> float:
    value = loads(text)["reward"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"reward = {value!r}")
    return float(value)


_READERS: Mapping[str, Callable[[str], float]] = {"reward.json": _of_json, "reward.txt": float}
