"""Measure the CPU time of a scripted two-agent rollout by part, for the rollout set `coop_tiny_strong`.

    python bench/rollout_cost.py [TASKS]

One rollout per task, on one thread. The times of this process and of all sandboxes are measured during the rollouts.
The parts of the sandboxes' time are estimates: the number of times a rollout does each, times the cost of one when it
is repeated alone. The last line is the time that the parts do not explain.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from machine import machine

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.rollouts.journal import Journal
from etpi_assets.rollouts.teachers import make_engine
from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.family import Task
from etpi_lab.worlds.coop_tiny import CoopTiny
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake
from etpi_resources.sandboxes import CommandResult, Environment, Limits
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory, BubblewrapSandbox

SET = "coop_tiny_strong"
REPEATS = 100
PARTS = {"a hidden-test run": "hidden_tests.py", "a visible check": "python3", "another command": ""}
"""Part -> text that its commands contain; the first match counts."""

Sample = tuple[Mapping[str, str], Limits, str]
"""A sandbox's files and limits, and a command that ran in it."""


class Recording(BubblewrapFactory):
    """Bubblewrap sandboxes that count their commands and keep one example of each part."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, Sample] = {}

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits = Limits(),  # noqa: B008
        environment: Environment | None = None,
    ) -> BubblewrapSandbox:
        self.counts["a sandbox's start and end"] += 1
        sandbox = super().create(files, limits, environment)
        run = sandbox.run

        def counted(command: str, *, timeout: float | None = None) -> CommandResult:
            part = next(part for part, text in PARTS.items() if text in command)
            self.counts[part] += 1
            self.samples.setdefault(part, (files, limits, command))
            return run(command, timeout=timeout)

        sandbox.run = counted
        return sandbox


def cpu(who: int) -> float:
    """Return milliseconds of CPU time; children count once they have ended."""
    usage = resource.getrusage(who)
    return 1000 * (usage.ru_utime + usage.ru_stime)


def in_children(work: Callable[[], object]) -> float:
    """Return the milliseconds of CPU time that children used while `work` ran."""
    before = cpu(resource.RUSAGE_CHILDREN)
    work()
    return cpu(resource.RUSAGE_CHILDREN) - before


def roll_out(count: int, sandboxes: Recording) -> tuple[float, float]:
    """Return milliseconds per rollout: (this process, sandboxes)."""
    spec, family = load_specs().rollout_sets[SET], CoopTiny()
    assert spec.engine
    chat = load_chat_format(spec.agent.tokenizer)
    engine = make_engine(spec.engine, "coop_tiny", family, chat, spec.seed, Lake.open())
    tasks = [t for t in family.load("coop_tiny", 0, {"train": count + 1, "heldout": 0}) if isinstance(t, Task)]
    identity = Identity(spec_key="bench", origin="set", engine="scripted")
    runtime = RolloutRuntime(family, engine, sandboxes, chat)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder), "bench") as journal:

        def run(task: Task) -> None:
            journal.append(run_rollout(RolloutJob(task, spec.agent, identity), runtime))

        run(tasks[0])  # loads what all share
        sandboxes.counts.clear()
        here, inside = cpu(resource.RUSAGE_SELF), cpu(resource.RUSAGE_CHILDREN)
        for task in tasks[1:]:
            run(task)
        return (cpu(resource.RUSAGE_SELF) - here) / count, (cpu(resource.RUSAGE_CHILDREN) - inside) / count


def unit_costs(samples: Mapping[str, Sample]) -> dict[str, float]:
    """Return the milliseconds that sandboxes take to do each part once."""
    boxes = BubblewrapFactory()

    def starts() -> None:
        for _ in range(REPEATS):
            with boxes.create({"a.py": ""}):
                pass

    def repeated(sample: Sample) -> None:
        files, limits, command = sample
        with boxes.create(files, limits) as box:
            for _ in range(REPEATS):
                box.run(command)

    starts()
    start = in_children(starts) / REPEATS
    costs = {part: (in_children(lambda s=s: repeated(s)) - start) / REPEATS for part, s in samples.items()}
    return {"a sandbox's start and end": start, **costs}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(machine(), flush=True)
    sandboxes = Recording()
    here, inside = roll_out(count, sandboxes)
    print(f"{'':28} a rollout   ms each   ms a rollout")
    explained = 0.0
    for part, cost in unit_costs(sandboxes.samples).items():
        times = sandboxes.counts[part] / count
        explained += times * cost
        print(f"{part:28} {times:9.2f} {cost:9.2f} {times * cost:14.1f}")
    print(f"{'all sandboxes':28} {inside:34.1f}\n{'this process':28} {here:34.1f}")
    print(f"{'sandboxes, not explained':28} {inside - explained:34.1f}")


if __name__ == "__main__":
    main()
