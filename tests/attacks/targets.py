"""The tasks under attack: one of each family, with the files that an agent starts from.

Belongs here: building a task, rolling commands out against it, judging files. Does not belong here: attacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import ANSWER, Task
from etpi_assets.tasks.grading import grade
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.repositories import FILES, HIDDEN, OFFLINE, RUNNER, Repository, solved

SMALL = {"memory_gib": 0.5, "disk_gib": 0.0625, "test_seconds": 15, "sandbox": "bubblewrap"}


@dataclass(frozen=True)
class AttackOutcome:
    """The reward, None where metrics would drop the rollout, the verdict's code and its `verdict_trust`."""

    reward: float | None
    verdict: str
    trust: str | None = None


class Targets:
    """One task a family, built when first attacked, in a folder that sandboxes can enter."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.folder = folder
        self.factory = BubblewrapFactory()
        self.tasks: dict[str, Task] = {}

    @cached_property
    def repository(self) -> Repository:
        folder = self.folder / "repository"
        folder.mkdir()
        return Repository(folder)

    def task(self, family: str) -> Task:
        if family not in self.tasks:
            self.tasks[family] = getattr(self, f"_{family}")()
        return self.tasks[family]

    def start(self, family: str) -> dict[str, str]:
        """The files of the first agent's workspace before it works."""
        if family in ("r2e", "swe_bench", "cooperbench"):
            return dict(FILES)
        task, made = self.task(family), load_family(family)
        return dict(made.workspace(task, made.roles(task)[0]))

    def judge(self, family: str, *overlays: Mapping[str, str | None]) -> AttackOutcome:
        """The judge's outcome where each agent leaves its start files with an overlay (None: removed), as a rollout
        records it: an exception is an infrastructure error."""
        task, made = self.task(family), load_family(family)
        final = {}
        for index, role in enumerate(made.roles(task)):
            files: dict[str, str | None] = {**self.start(family), **overlays[min(index, len(overlays) - 1)]}
            final[role.agent_id] = {path: text for path, text in files.items() if text is not None}
        try:
            verdict = self._judged(family, final)
        except Exception as error:  # a rollout records whatever it is
            return AttackOutcome(None, f"infrastructure: {type(error).__name__}")
        return AttackOutcome(verdict.reward, verdict.verdict, verdict.details.get("verdict_trust"))

    def _judged(self, family: str, final: Mapping[str, Mapping[str, str]]) -> Any:
        task, made = self.task(family), load_family(family)
        start = dict.fromkeys(final, self.start(family))
        return grade(made, task, start, final, {}, self.factory)

    def roll(self, family: str, *commands: str) -> AttackOutcome:
        """The outcome of a rollout whose agents type these commands and submit."""
        task, made, chat = self.task(family), load_family(family), load_chat_format("tiny")
        prompt = "coop" if len(made.roles(task)) == 2 else "solo"
        agent = AgentSection(prompt=prompt, max_steps=len(commands) + 2, max_model_len=64_000, max_tokens=8000)
        engine = ScriptedEngine(_typed(commands), chat, "t")
        job = RolloutJob(task, agent, Identity("k", "set", "x", "t"))
        record = run_rollout(job, RolloutRuntime(made, engine, self.factory, chat))
        assert record.outcome is not None
        return AttackOutcome(record.outcome["reward"], record.outcome["verdict"])

    def _pypi_bugs(self) -> Task:
        tests = {f"tests/test_{number}.py": text for number, text in HIDDEN.items()}
        expected = {"tests/test_1.py::test_rope": "PASSED", "tests/test_2.py::TestKnot::test_knot": "PASSED"}
        row = {
            "repo": "moor",
            "version": "1",
            "bug": "moor.py:2",
            "function": "rope",
            "path": "moor.py",
            "fixed": solved("1", "2")["moor.py"],
            "files": {"moor.py": FILES["moor.py"]},
            "tests": tests,
            "command": "PYTHONPATH=. python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -rA tests",
            "expected": expected,
            "breaks": "tests/test_1.py::test_rope",
            "issue": "rope",
        }
        return self._row("pypi_bugs", row, checkouts=str(self.repository.folder))

    def _r2e(self) -> Task:
        checkouts = self.repository.checkouts(f"moor/{self.repository.commit}")
        return self._row("r2e", self.repository.r2e_row(), checkouts=str(checkouts))

    def _swe_bench(self) -> Task:
        return self._row(
            "swe_bench", self.repository.swe_row(), checkouts=str(self.repository.checkouts("moor__moor-7"))
        )

    def _cooperbench(self) -> Task:
        checkouts = self.repository.checkouts("moor_task/task7")
        root = self.repository.cooperbench()
        # As upstream's runners, which install the package first: code of the agents runs before pytest.
        runner = RUNNER.replace(
            "python3 -m pytest", "PYTHONPATH=.:$PYTHONPATH python3 -c 'import moor'\npython3 -m pytest"
        )
        (root / "moor_task" / "task7" / "runner.sh").write_text(runner)
        return self._only("cooperbench", path=str(root), checkouts=str(checkouts), **OFFLINE)

    def _harbor(self) -> Task:
        from tests.support.harbor import make_folder

        root = self.folder / "harbor"
        make_folder(
            root / "tasks",
            **{"tests/test.sh": HARBOR_TEST, "tests/check.py": HARBOR_CHECK, "tests/wanted.txt": "wanted\n"},
            **{"tests/test_import.py": "import yaml\n", "solution/solve.sh": HARBOR_SOLUTION},
        )
        repo = root / "checkouts" / "lines" / "repo"
        repo.mkdir(parents=True)
        (repo / "start.txt").write_text("start\n")
        (root / "checkouts" / "tools").symlink_to(self.repository.tools)
        return self._only("harbor", path=str(root / "tasks"), checkouts=str(root / "checkouts"), **OFFLINE)

    def _answers(self) -> Task:
        truth = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}
        return self._programs("answers", truth)

    def _programs(self, name: str, truth: Mapping[str, Any]) -> Task:
        file = self.folder / f"{name}.jsonl"
        row = {
            "data_source": "code",
            "license": "MIT",
            "prompt": "Add two numbers.",
            "reward_model": {"ground_truth": json.dumps(truth)},
        }
        file.write_text(json.dumps(row) + "\n")
        return self._only(name, path=str(file))

    def _row(self, family: str, row: Mapping[str, Any], **params: Any) -> Task:
        file = self.folder / f"{family}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        return self._only(family, path=str(file), **params)

    def _only(self, family: str, **params: Any) -> Task:
        small = SMALL if family not in ("answers",) else {}
        (task,) = load_family(family).load("attacked", 0, {**small, **params})
        assert isinstance(task, Task), task
        return task

    def _tiny(self, family: str) -> Task:
        loaded = load_family(family).load("attacked", 0, {})
        return next(item for item in loaded if isinstance(item, Task))

    def _coop_tiny_shared(self) -> Task:
        return self._tiny("coop_tiny_shared")

    def _repo_fix_tiny(self) -> Task:
        return self._tiny("repo_fix_tiny")

    def _arithmetic_tiny(self) -> Task:
        return self._tiny("arithmetic_tiny")

    def _running_sum(self) -> Task:
        return self._tiny("running_sum")

    def _terminal_tiny(self) -> Task:
        """A task whose answer is an empty workspace, where there is one: the outcome that a dead sandbox resembles."""
        found = [item for item in load_family("terminal_tiny").load("attacked", 0, {}) if isinstance(item, Task)]
        emptied = [t for t in found if None in t.payload["left"].values()]
        return min(emptied or found, key=lambda t: len(t.payload["files"]))


HARBOR_SOLUTION = "#!/bin/bash\nprintf 'wanted\\n' > /app/out.txt\n"
HARBOR_TEST = """#!/bin/bash
python3 -m pytest /tests > /dev/null 2>&1
cd /tests
python3 /tests/check.py && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
HARBOR_CHECK = """import pathlib, sys
sys.exit(0 if pathlib.Path("/app/out.txt").read_text() == pathlib.Path("/tests/wanted.txt").read_text() else 1)
"""


def answer(text: str) -> dict[str, str]:
    """The files of an agent that answers in words."""
    return {ANSWER: text}


def _typed(commands: Sequence[str]) -> Any:
    def policy(request: Any) -> str:
        turn = sum(message["role"] == "assistant" for message in request.messages)
        return f"```bash\n{[*commands, f'echo {SUBMIT}'][min(turn, len(commands))]}\n```"

    return policy
