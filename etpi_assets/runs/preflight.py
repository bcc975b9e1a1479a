"""Check, before a run spends anything, that the sandboxes it needs can start on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from etpi_assets.planner import Step, open_steps
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_assets.tasks.families import load_family
from etpi_resources.sandboxes import HostFactory, SandboxUnavailable


def require_sandboxes(steps: Iterable[Step], specs: Specs, factory: Callable[[str], HostFactory]) -> None:
    """Check each kind of sandbox that the open steps need.

    Args:
        factory: from the name of a kind to its factory (`Resources.sandboxes`).

    Raises:
        SandboxUnavailable: one cannot start; the message names the first step that needs it, cause and remedies.
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


def sandbox_kind(step: Step, specs: Specs) -> str | None:
    """Return the kind of sandbox that a step runs commands in; None where it runs none."""
    spec = specs.get(step.set, step.key)
    match step.asset, spec:
        case "tasks", SuiteSpec():
            return load_family(spec.family).sandbox(spec.params)
        case "raw_rollouts", RolloutSetSpec(kind="live"):
            return spec.sandbox
        case "rl_checkpoint", ExperimentSpec() if spec.rl.method != "none":
            return spec.rl.sandbox
        case "eval_rollouts", ExperimentSpec() if spec.evaluate is not None and spec.base.kind != "none":
            return spec.serving.sandbox
    return None
