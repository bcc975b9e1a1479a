"""Measure the steps per second of the agent loop against mini-swe-agent's, with a policy that takes no time.

Run: `python bench/agent_loop.py [ROLLOUTS]`, after `pip install --constraint constraints.txt '.[bench]'`.

Both sides run the same commands in bubblewrap with the same namespaces, without network, capabilities or host files
except the system's programs, in this process, with one worker and with four threads. A rollout includes everything:
creating the workspace, every step, detecting the end, and cleaning up. mini-swe-agent starts bubblewrap for every
command; etpi starts it once. mini-swe-agent has no limits on memory, processes, files and system calls, and renders
text; etpi has these limits and keeps token ids. "its defaults" is mini-swe-agent's own configuration, in which commands
share the host's network and processes.

To be robust on a busy machine, the sides are measured in short rounds that start with a different side each, and a
ratio is the median of the rounds' ratios. CPU seconds, of this process and of all its children, depend less on other
load.
"""

from __future__ import annotations

import logging
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from machine import machine

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Role, SandboxNeeds, Task, Verdict
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FILES = {"moor.py": "def rope(n):\n    return n\n" * 20, "notes.md": "moor\n" * 50}
COMMANDS = [
    *[
        "ls -la",
        "cat moor.py",
        "grep -n rope moor.py",
        "sed -n 1,10p notes.md",
        "sed -i s/rope/knot/ moor.py",
        "wc -l *",
    ]
    * 4,
    f"echo {SUBMIT}",
]
ROUNDS = 9
ISOLATED = [
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--cap-drop",
    "ALL",
    "--die-with-parent",
    "--clearenv",
]
"""Options of bubblewrap that our sandbox adds to those of mini-swe-agent's."""


class Bench:
    """A family with one task and no judge."""

    invents_names = False

    def roles(self, task: Task) -> Sequence[Role]:
        return [Role("agent1", "f", "do it")]

    def needs(self, task: Task) -> SandboxNeeds:
        return SandboxNeeds()

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(FILES)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})


def policy(request: Request) -> str:
    turn = sum(message["role"] == "assistant" for message in request.messages)
    return str(format_action(COMMANDS[turn]))


def ours() -> Callable[[], int]:
    chat, family, boxes = load_chat_format("tiny"), Bench(), BubblewrapFactory()
    engine = ScriptedEngine(policy, chat, "bench")
    agent = AgentSection(prompt="coop", max_steps=len(COMMANDS), max_model_len=100_000, max_tokens=512)
    identity = Identity(spec_key="bench", origin="set", engine="scripted")
    job = RolloutJob(Task("t", "bench", "r", "train", "do it", {}, "h"), agent, identity)
    runtime = RolloutRuntime(family, engine, boxes, chat)  # type: ignore[arg-type]

    def run() -> int:
        record = run_rollout(job, runtime)
        assert record.error is None and record.agents[0].exit_status == "Submitted", record.error
        return len(record.agents[0].turns)

    return run


def theirs(isolated: bool) -> Callable[[], int]:
    from minisweagent.agents.default import DefaultAgent  # pyright: ignore[reportMissingImports]
    from minisweagent.environments.extra.bubblewrap import (  # pyright: ignore[reportMissingImports]
        BubblewrapEnvironment,
        BubblewrapEnvironmentConfig,
    )
    from minisweagent.models.test_models import DeterministicModel, make_output  # pyright: ignore[reportMissingImports]

    logging.getLogger("minisweagent").setLevel(logging.ERROR)
    arguments = BubblewrapEnvironmentConfig().wrapper_args
    if isolated:
        arguments = [*ISOLATED, *(word for word in arguments if word not in ("--unshare-user-try",))]

    def run() -> int:
        environment = BubblewrapEnvironment(wrapper_args=arguments)
        for name, text in FILES.items():
            (environment.working_dir / name).write_text(text)
        outputs = [make_output(str(format_action(command)), [{"command": command}], cost=0.0) for command in COMMANDS]
        agent: Any = DefaultAgent(
            DeterministicModel(outputs=outputs, cost_per_call=0.0),
            environment,
            system_template="You are alone. One command a turn.",
            instance_template="do it",
        )
        ended = agent.run("do it")
        assert ended["exit_status"] == "Submitted" and agent.n_calls == len(COMMANDS), ended
        assert "knot" in (environment.working_dir / "moor.py").read_text()
        environment.cleanup()
        return agent.n_calls

    return run


def cost(run: Callable[[], int], rollouts: int, workers: int) -> tuple[float, float]:
    """Return (wall, CPU) seconds per step over `rollouts` rollouts, with the programs that the steps start."""
    started, cpu = time.perf_counter(), cpu_seconds()
    with ThreadPoolExecutor(workers) as pool:
        steps = sum(pool.map(lambda _: run(), range(rollouts)))
    return (time.perf_counter() - started) / steps, (cpu_seconds() - cpu) / steps


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    rollouts = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    try:
        sides = {"etpi": ours(), "mini-swe-agent": theirs(True), "mini-swe-agent, its defaults": theirs(False)}
    except ModuleNotFoundError as error:
        print(f"not measured: {error}; pip install --constraint constraints.txt '.[bench]'")
        return
    for run in sides.values():
        run()
    for workers in (1, 4):
        costs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        names = list(sides)
        for number in range(ROUNDS):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                costs[name].append(cost(sides[name], rollouts, workers))
        for name, rounds in costs.items():
            pairs = list(zip(rounds, costs["etpi"], strict=True))
            wall, cpu = ([theirs[i] / mine[i] for theirs, mine in pairs] for i in (0, 1))
            print(
                f"{workers} worker(s)  {name:30} {1 / statistics.median(seconds for seconds, _ in rounds):8.1f} steps/s"
                f"   etpi is {statistics.median(wall):5.2f}x (rounds {min(wall):.2f} to {max(wall):.2f})"
                f"   CPU a step {statistics.median(cpu):5.2f}x ours ({min(cpu):.2f} to {max(cpu):.2f})"
            )


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
