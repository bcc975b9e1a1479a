"""Time and disk of the proofs that a run needs: of tasks whose hidden tests were not run with their reference yet."""

from __future__ import annotations

from collections.abc import Iterator

from etpi_assets.asset import AssetRun
from etpi_assets.graph import GRAPH
from etpi_assets.resources import Resources
from etpi_assets.specs.load import Specs
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from etpi_assets.tasks.proofs import Prover
from etpi_resources.process.pool import worker_count
from etpi_resources.process.progress import clock
from etpi_resources.sandboxes import SandboxUnavailable
from etpi_resources.sandboxes.docker_images import budget


def proof_lines(set: str, name: str, specs: Specs, resources: Resources) -> list[tuple[str, str, str]]:
    """Return (suite, what is to be proved and how long it takes, where its images stay) for each suite of a chain."""
    lines = []
    for suite in specs.upstream_keys(set, name, "suite"):
        spec = specs.suites[suite]
        family = load_family(spec.family)
        if not family.keeps_proofs or (kind := family.sandbox(spec.params)) is None:
            continue
        kept = f"one image a task, kept under {budget() >> 30} GiB (ETPI_IMAGES_GIB)"
        images = kept if kind == "docker" else "no images"
        try:
            prover = Prover.of(AssetRun(GRAPH["tasks"], suite, resources), suite)
            tasks = [item for item in family.load(suite, spec.seed, spec.params) if isinstance(item, Task)]
        except (OSError, ValueError, SandboxUnavailable) as error:
            lines.append((suite, f"unknown: {error}", images))
            continue
        assert prover is not None
        if spec.proof != "all":
            uses = _uses(set, name, suite, specs)
            used = [[task for task in tasks if split in ("all", task.split)][:most] for split, most in uses]
            tasks = list({task.task_id: task for of_use in used for task in of_use}.values())
        left, cores = sum(prover.finished(task) is None for task in tasks), worker_count()
        took = f"about {clock(left * prover.seconds() / cores)} on {cores} cores"
        lines.append((suite, f"{left:,} of {len(tasks):,} tasks to prove (proof = {spec.proof}), {took}", images))
    return lines


def _uses(set: str, name: str, suite: str, specs: Specs) -> Iterator[tuple[str, int | None]]:
    """Yield (split, most tasks) for each use of a suite by rollout sets, evaluation and reinforcement."""
    for rollout_set in (specs.rollout_sets[key] for key in specs.upstream_keys(set, name, "rollout_set")):
        if rollout_set.suite == suite and rollout_set.kind != "imported":
            yield rollout_set.split, rollout_set.tasks
    if set == "experiment":
        spec = specs.experiments[name]
        if spec.evaluate and spec.evaluate.suite == suite:
            yield spec.evaluate.split, spec.evaluate.tasks
        if spec.rl.method != "none" and spec.rl.suite == suite:
            yield "train", None
