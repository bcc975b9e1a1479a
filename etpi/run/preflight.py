"""Check, before a run spends anything, its inputs, sandboxes and libraries, and the bounds of its chat templates."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import Step, open_steps
from etpi_assets.resources import serving_kind
from etpi_assets.scoring.rewards.functions import check_terms
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.harness import harness_difference
from etpi_assets.specs.load import AnySpec, SpecError, Specs
from etpi_assets.specs.paths import expand, external_path
from etpi_assets.specs.rollout_set import EngineSection, RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_assets.specs.training import KEEP_GOING
from etpi_assets.tasks.families import load_family
from etpi_resources.backend import backend
from etpi_resources.chat.bounds import TemplateUnbounded
from etpi_resources.engines.vllm_options import require_consent
from etpi_resources.errors import PackageMissing, require_torch
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.sandboxes import HostFactory, SandboxUnavailable
from etpi_resources.trainers.interpreter import trainer_python
from etpi_resources.trainers.trackers import TrackerMissing, require_trackers


def require_sandboxes(steps: Iterable[Step], specs: Specs, factory: Callable[[str], HostFactory]) -> None:
    """Check each kind of sandbox that the open steps need.

    Args:
        factory: from the name of a kind to its factory (`Resources.sandboxes`).

    Raises SandboxUnavailable: one cannot start; the message names the first step that needs it, cause and remedies.
    """
    needed: dict[str, Step] = {}
    for step in open_steps(steps):
        if kind := sandbox_kind(step, specs):
            needed.setdefault(kind, step)
    for kind, step in needed.items():
        try:
            factory(kind).check()
        except SandboxUnavailable as error:
            raise SandboxUnavailable(
                f'{step.asset} of {step.key} needs a sandbox of kind "{kind}", and none can start here. '
                f"Nothing was run.\n{error}"
            ) from error


def require_libraries(steps: Iterable[Step], specs: Specs) -> None:
    """Check that PyTorch is installed for the open steps that compute with it in this interpreter, and the trackers of
    open trainings. An interpreter that `ETPI_TRAINER_PYTHON` names checks its own.

    Raises PackageMissing, TrackerMissing: one is not; the message names the step and the command that installs it.
    """
    trains_here = trainer_python() == sys.executable
    for step in open_steps(steps):
        spec = specs.get(step.set, step.key)
        try:
            if _acts_here(step, spec):
                require_torch("a model in this process")
            if trains_here and isinstance(spec, ExperimentSpec) and _trains(step, spec):
                require_torch("training")
                require_trackers(spec.train.report_to)
        except (PackageMissing, TrackerMissing) as error:
            raise type(error)(f"{step.asset} of {step.key}: {error}. Nothing was run.") from error


def require_code_allowed(steps: Iterable[Step], specs: Specs) -> None:
    """Raise EngineUnavailable if a server of an open step would load code that this user has not allowed."""
    for step in open_steps(steps):
        match specs.get(step.set, step.key):
            case ExperimentSpec() as spec:
                require_consent(spec.serving.options)
                require_consent(spec.rl.options)
            case RolloutSetSpec(engine=EngineSection() as engine):
                require_consent(engine.options)


def _trains(step: Step, spec: ExperimentSpec) -> bool:
    section = {"sft_checkpoint": spec.train, "rl_checkpoint": spec.rl}.get(step.asset)
    return section is not None and section.method != "none"


def _acts_here(step: Step, spec: AnySpec) -> bool:
    """Return whether a step runs a model in this process."""
    match step.asset, spec:
        case "raw_rollouts", RolloutSetSpec(engine=EngineSection(kind="transformers")):
            return True
        case "serving_probe" | "eval_rollouts", ExperimentSpec() if spec.evaluate and spec.base.kind != "none":
            return serving_kind(spec.serving) == "transformers"
    return False


def plan_warnings(names: Iterable[str], specs: Specs) -> list[str]:
    """Return a line for each experiment whose student is evaluated in another harness than its rollouts came from."""
    lines, experiments, rollout_sets = [], specs.experiments, specs.rollout_sets
    for name in (each for each in names if each in experiments):  # others are rollout sets, suites or invalid
        spec = experiments[name]
        sets = [rollout_sets[key] for key in spec.rollout_sets]
        if spec.evaluate and (difference := harness_difference(spec.evaluate.agent, sets, spec.rl.acting)):
            lines.append(f"warning: {name} {difference}")
    return lines


def require_templates(steps: Iterable[Step], specs: Specs) -> None:
    """Check that the chat templates of open steps, unless etpi or TRL ships them, keep within bounds for small
    conversations.

    Raises SpecError: one does not; the message names the step.
    """
    wanted: dict[tuple[str, str | None], Step] = {}
    for step in open_steps(steps):
        match specs.get(step.set, step.key):
            case ExperimentSpec() as spec:
                wanted.setdefault((spec.base.tokenizer, spec.base.chat_template), step)
            case RolloutSetSpec(kind="live" | "agent") as spec:
                wanted.setdefault((spec.agent.tokenizer, None), step)
    for (tokenizer, template), step in wanted.items():
        name = template or tokenizer
        if ":" in name or Path(name).exists():
            from etpi_resources.chat.format import load_chat_format

            try:
                _ = load_chat_format(tokenizer, template).control_ids  # which small conversations show
            except TemplateUnbounded as error:
                raise SpecError(f"{step.asset} of {step.key}: {error}. Nothing was run.") from error
            except (OSError, ValueError):
                continue  # the step says what is missing, on the machine where it runs


def require_inputs(steps: Iterable[Step], specs: Specs) -> None:
    """Check what open steps name outside the specs: the paths of runs and tasks, and the reward functions.

    Raises:
        PathError: an environment variable of a path is not set.
        SpecError: a path does not exist on this machine, or a reward function is unknown; the message names the file.
    """
    for step in open_steps(steps):
        spec = specs.get(step.set, step.key)
        file = specs.entry(step.set, step.key).file
        named = external_path(spec) if GRAPH[step.asset].reads_path else None
        path = Path(expand(named)) if named else None
        if path and backend() is None and not path.exists():
            raise SpecError(f"{file}: path: there is nothing at {path.absolute()}; correct `path`")
        if step.asset == "rl_checkpoint" and isinstance(spec, ExperimentSpec) and spec.rl.method != "none":
            try:
                check_terms(spec.rl.rewards)
            except SpecError as error:
                raise SpecError(f"{file}: {error}") from error


def require_variance(steps: Iterable[Step], specs: Specs, lake: Lake) -> None:
    """Check that a measured baseline of an open reinforcement, on its suite and training split, is neither 0 nor 1.

    Raises:
        SpecError: it is, so that no group of rollouts would have an advantage; ETPI_KEEP_GOING = 1 lets the run go on.
    """
    for step in open_steps(steps) if os.environ.get(KEEP_GOING) != "1" else ():
        spec = specs.experiments.get(step.key) if step.asset == "rl_checkpoint" else None
        if spec is None or not spec.rl.learns_from_rewards or spec.train.method != "none":
            continue  # after a fine-tuning, the policy is another than the baseline's
        if any(term.function != "outcome" for term in spec.rl.rewards):
            continue
        for name, other in specs.experiments.items():
            measured, ref = other.evaluate, Ref("eval_metrics", "experiment", name)
            if measured is None or (measured.suite, measured.split) != (spec.rl.suite, "train"):
                continue
            if other.base != spec.base or lake.current(ref) is None:
                continue
            rows = [row for row in lake.read(ref, "metrics").to_pylist() if row["metric"] == "solved"]
            rates = {row["value"] for row in rows if row["checkpoint_role"] == "base" and row["decoding"] != "greedy"}
            if len(rates) == 1 and rates <= {0.0, 1.0}:
                raise SpecError(
                    f"rl_checkpoint of {step.key}: the untrained student solves "
                    f"{'none' if rates == {0.0} else 'all'} of the tasks that {name} measured, so its groups have "
                    "equal rewards and nothing is trained. Nothing was run. Take easier or harder tasks, a "
                    "finer reward (docs/rl.md), or run it with --keep-going"
                )


def sandbox_kind(step: Step, specs: Specs) -> str | None:
    """Return the kind of sandbox that a step runs commands in; None where it runs none."""
    spec = specs.get(step.set, step.key)
    match step.asset, spec:
        case "tasks", SuiteSpec():
            return load_family(spec.family).sandbox(spec.params)
        case "raw_rollouts", RolloutSetSpec(kind="live" | "agent"):
            return spec.sandbox
        case "rl_checkpoint", ExperimentSpec() if spec.rl.method != "none":
            return spec.rl.sandbox
        case "eval_rollouts", ExperimentSpec() if spec.evaluate is not None and spec.base.kind != "none":
            return spec.serving.sandbox
    return None
