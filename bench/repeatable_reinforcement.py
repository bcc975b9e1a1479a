"""The cost of `rl.repeatable`, and whether two runs are equal: shipped experiments with and without it.

    python bench/repeatable_reinforcement.py [EXPERIMENT ...] [--steps 10] [--runs 2] [--lake FOLDER] [--load]

For each experiment: brings its fine-tuned student up to date in a lake (kept in FOLDER if it is named), then runs its
reinforcement in copies of that lake, alternately with and without `repeatable`, `--runs` times each. Prints seconds of
wall and CPU time a step (workers and sandboxes included), the ratio to the runs without, and how many runs differ from
the first. `--load` keeps two busy loops beside every second run. Needs 2 cores for some minutes an experiment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from machine import machine

from etpi_assets.resources import Resources
from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks
from etpi_assets.training.device import dtype_here
from etpi_assets.training.grpo import GrpoRequest, recorded, reinforce_once
from etpi_assets.training.rounds import RLEnvironment, with_prompts_that_fit
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake, Ref

EXPERIMENTS = ("terminal_grpo_tiny", "grpo_tcr_tiny", "etpi_phase2_tiny")
WAYS = {"without": False, "with": True}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("experiments", nargs="*", default=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--lake", type=Path)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, folder, way, steps = options.one
        print(json.dumps(reinforce(name, Path(folder), way, int(steps))))
        return
    print(machine(), flush=True)
    with nullcontext(options.lake) if options.lake else tempfile.TemporaryDirectory() as folder:
        for name in options.experiments:
            compare(name, Path(folder), options.steps, options.runs, options.load)


def compare(name: str, folder: Path, steps: int, runs: int, load: bool) -> None:
    """Bring the student up to date, run both ways alternately, print what they cost and where they differ."""
    specs = folder / "specs" / "experiments"
    specs.mkdir(parents=True, exist_ok=True)
    (specs / f"{name}_student.toml").write_text(f'extends = "{name}"\nevaluate = "none"\n[rl]\nsteps = 3\n')
    environment = {**os.environ, "ETPI_DATA": str(folder / "lake"), "ETPI_SPECS": str(folder / "specs")}
    student = [sys.executable, "-m", "etpi", "run", f"{name}_student"]
    subprocess.run(student, env=environment, check=True, stdout=subprocess.DEVNULL)
    seen: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for run in range(runs):
        for way in WAYS:
            with busy() if load and run % 2 else nullcontext():
                line = [sys.executable, __file__, "--one", name, str(folder), way, str(steps)]
                output = subprocess.run(line, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            seen[way].append(json.loads(output.splitlines()[-1]))
    report(name, steps, seen)


def report(name: str, steps: int, seen: dict[str, list[dict[str, Any]]]) -> None:
    for way, results in seen.items():
        pairs = list(zip(results, seen["without"], strict=True))
        ratios = {key: [f"{mine[key] / theirs[key]:.2f}" for mine, theirs in pairs] for key in ("wall", "cpu")}
        wall, cpu = (min(result[key] for result in results) / steps for key in ("wall", "cpu"))
        first = results[0]["digests"]
        differing = sum(result["digests"] != first for result in results[1:])
        where = sorted({key for result in results for key, value in result["digests"].items() if value != first[key]})
        print(
            f"{name} {way}: {wall:.2f} s a step, {cpu:.2f} s of CPU, ratios {ratios}; {differing} of "
            f"{len(results) - 1} runs differ from the first, in {where}; solved {results[0]['solved']}",
            flush=True,
        )


def reinforce(name: str, folder: Path, way: str, steps: int) -> dict[str, Any]:
    """Reinforce the student in a copy of the lake; return its times and hashes of what it stored."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "lake", copy)
    lake, specs = Lake(copy), load_specs(folder / "specs")
    spec = specs.experiments[f"{name}_student"]
    section = spec.rl.model_copy(update={"steps": steps, "repeatable": WAYS[way]})
    assert section.suite  # RLSection requires it
    resources = Resources(lake=lake, specs_folder=folder / "specs")
    start = next(
        row
        for row in lake.read(Ref("sft_checkpoint", "experiment", f"{name}_student"), "checkpoints").to_pylist()
        if row["final"]
    )
    environment = RLEnvironment(
        tasks=read_tasks(lake.read(Ref("tasks", "suite", section.suite), "tasks"), "train"),
        family=load_family(specs.suites[section.suite].family),
        sandboxes=resources.sandboxes(section.sandbox),
        chat=load_chat_format(spec.base.tokenizer, spec.base.chat_template),
        template_kwargs=spec.serving.template_kwargs,
    )
    request = GrpoRequest(
        experiment=name, base_id=start["checkpoint_id"], base_folder=copy / start["path"], section=section, seed=0,
        environment=with_prompts_that_fit(section, environment), gpu=False, dtype=dtype_here(section.dtype),
        code="bench",
    )  # fmt: skip
    began, cpu = time.monotonic(), cpu_seconds()
    result = reinforce_once(lake, request, echo=lambda line: None)
    times = {"wall": result.seconds.train, "all": time.monotonic() - began, "cpu": cpu_seconds() - cpu}
    tables = recorded(lake, {0: request}, {0: result})
    samples = tables["rl_samples"].to_pylist()
    log = [line.model_dump(exclude={"seconds"}) for line in result.log]
    digests = {
        "samples": digest(samples), "log": digest(log),
        "checkpoint": [checkpoint.checkpoint_id for checkpoint in result.checkpoints],
        "ids": digest([row["output_ids"] for row in tables["turns"].to_pylist()]),
    }  # fmt: skip
    shutil.rmtree(copy)
    return {**times, "digests": digests, "solved": [round(line.solved, 4) for line in result.log]}


def digest(rows: list[Any]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:12]


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@contextmanager
def busy() -> Any:
    """Two processes that do nothing but compute."""
    loops = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(2)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
