"""Measure the time of a sandbox, a command and a two-agent rollout: `python bench/rollouts.py [TASKS]`.

CPU time matters if several rollouts share the cores. It covers this process and everything that ran in sandboxes.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import machine

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.rollouts.collect import collect
from etpi_assets.rollouts.journal import Journal
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

COMMANDS = ("true", "cat a.py", "sed -i s/1/2/ a.py", "python3 a.py")
REPEATS = 50
BOXES = BubblewrapFactory()


def cpu() -> tuple[float, float]:
    """Return the CPU seconds of this process and of its ended children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return both[0].ru_utime + both[0].ru_stime, both[1].ru_utime + both[1].ru_stime


def measure(what: str, work: Callable[[], object], units: int) -> None:
    """Print wall and CPU milliseconds per unit."""
    before, started = cpu(), time.perf_counter()
    work()
    wall, after = time.perf_counter() - started, cpu()
    own, inside = (1000 * (b - a) / units for a, b in zip(before, after, strict=True))
    print(f"{what:28} {1000 * wall / units:8.2f} ms wall {own:8.2f} ms CPU here {inside:8.2f} ms CPU in sandboxes")


def starts() -> None:
    for _ in range(REPEATS):
        with BOXES.create({"a.py": "print(1)\n"}):
            pass


def runs(command: str) -> None:
    with BOXES.create({"a.py": "print(1)\n"}) as box:
        for _ in range(REPEATS):
            box.run(command)


def pairs(count: int, folder: Path) -> None:
    family, chat = CoopTinyShared(), load_chat_format("tiny")
    tasks = [t for t in family.load("bench", 0, {"train": count, "heldout": 0}) if isinstance(t, Task)]
    engine, agent = ScriptedEngine(CoopTinySharedPolicy(SharedSkill()), chat, "bench"), AgentSection(steering=True)
    identity = Identity(spec_key="bench", origin="set", engine="scripted")

    runtime = RolloutRuntime(family, engine, BOXES, chat)

    def run(task: Task, sample: int):
        return run_rollout(RolloutJob(task, agent, identity, sample), runtime)

    with Journal(folder, "bench") as journal, ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as executor:
        collect(tasks, 1, [(run, journal)], executor=executor)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    measure("sandbox, start and end", starts, REPEATS)
    for command in COMMANDS:
        measure(command, lambda command=command: runs(command), REPEATS)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        measure("pair rollout with verdict", lambda: pairs(count, Path(folder)), count)
        print(f"{count / (time.perf_counter() - started):.1f} pair rollouts a second")


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
