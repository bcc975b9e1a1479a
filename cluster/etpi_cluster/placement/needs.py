"""Needs of a step on the nodes: derived from its asset's lock and from the spec's `requires`, engine and sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from etpi.run.preflight import sandbox_kind
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import Step, open_steps, plan
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import AnySpec, Specs
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_cluster.nodes import CPU, Node, described, offered_together, serves
from etpi_cluster.session import SANDBOXES
from etpi_resources.engines.vllm_options import accelerators_of
from etpi_resources.lake.lake import Lake

EXPERIMENT_INPUTS = "experiment_inputs"
"""The step of an experiment's run that computes its suites and rollout sets."""
WORKING, LIGHT = 1.0, 0.1
"""CPUs of a step that computes, and of one that reads a spec, writes a page or waits for others' work. None asks for
nothing: Ray starts a job that asks for nothing on the head, always."""

OWN_SANDBOXES = 8.0
"""Most sandboxes that a step takes of its node's, where it runs them itself."""


@dataclass(frozen=True)
class Need:
    """Needs of a step, by Ray's names of resources.

    Attributes:
        step: what the step takes of the node it runs on.
        actors: what nodes must offer that the step itself does not take, because actors of it will.
        ranks: what all nodes must offer together: a training over several nodes.
    """

    step: Mapping[str, float]
    actors: tuple[Mapping[str, float], ...] = ()
    ranks: Mapping[str, float] = field(default_factory=dict)

    def missing(self, nodes: Sequence[Node], address: str) -> str | None:
        """Return what no node that is alive offers, what the nodes offer, and the remedy; None if nothing is missing.

        Args:
            address: where a further node joins.
        """
        lacking = [
            f"a node with {_shown(amounts)}"
            for amounts in (self.step, *self.actors)
            if not any(serves(node, amounts) for node in nodes)
        ]
        lacking += [
            f"{name} {amount:g} together"
            for name, amount in self.ranks.items()
            if offered_together(nodes, name) < amount
        ]
        if not lacking:
            return None
        wanted = dict(self.step)
        for amounts in (*self.actors, self.ranks):
            wanted.update(amounts)
        start = f"ray start --address={address} {_options(wanted)}"
        return (
            f"the cluster lacks {' and '.join(lacking)}. Alive are: {described(nodes)}. Start a node that offers it "
            f"({start}), then run it again"
        )


def need_of(asset: str, key: str, specs: Specs, nodes: Sequence[Node], accelerator: str) -> Need:
    """Return what the step of an asset's partition needs.

    Args:
        nodes: those that are alive; how much of a resource one of them offers decides how a step takes it.
        accelerator: Ray's resource for an accelerator (`Cluster.accelerator`).
    """
    if asset == EXPERIMENT_INPUTS:
        return _together(need_of(step.asset, step.key, specs, nodes, accelerator) for step in _inputs(key, specs))
    node = GRAPH[asset]
    if node.set == "all":
        return Need({CPU: LIGHT})
    spec = specs.get(node.set, key)
    step = {CPU: LIGHT if node.group in ("specs", "reports") or _fans_out(asset, spec) else WORKING}
    actors: list[Mapping[str, float]] = []
    if _runs_sandboxes(asset, node.set, key, specs):
        if _fans_out(asset, spec):
            actors.append({SANDBOXES: 1.0})
        else:
            step[SANDBOXES] = max(1.0, min(OWN_SANDBOXES, _most(nodes, SANDBOXES)))
    taken, by_server = _accelerators(asset, spec)
    if by_server:
        actors.append({accelerator: taken})
    elif taken > max(1.0, _most(nodes, accelerator)) and asset == "sft_checkpoint":
        return Need(step, tuple(actors), {accelerator: taken})  # its ranks run on several nodes
    elif taken:
        step[accelerator] = taken
    return Need(step, tuple(actors))


@lru_cache(maxsize=8)
def _inputs(experiment: str, specs: Specs) -> tuple[Step, ...]:
    """Return the steps that bring the suites and rollout sets of an experiment up to date, when first asked."""
    return tuple(step for step in open_steps(plan(experiment, specs, Lake.open())) if step.set != "experiment")


def _together(needs: Iterable[Need]) -> Need:
    """Return what one process needs that computes steps one after another."""
    step, actors = {CPU: LIGHT}, dict[tuple[tuple[str, float], ...], Mapping[str, float]]()
    for need in needs:
        step |= {name: max(amount, step.get(name, 0.0)) for name, amount in need.step.items()}
        actors |= {tuple(amounts.items()): amounts for amounts in need.actors}
    return Need(step, tuple(actors.values()))


def _accelerators(asset: str, spec: AnySpec | None) -> tuple[float, bool]:
    """Return how many accelerators the step uses, and whether a vLLM server that it starts uses them."""
    by_server = asset in ("raw_rollouts", "serving_probe", "eval_rollouts") and _starts_server(spec)
    if isinstance(spec, RolloutSetSpec):
        return (float(accelerators_of(spec.engine.options)), True) if by_server and spec.engine else (0.0, False)
    if not isinstance(spec, ExperimentSpec) or spec.requires == "cpu" or GRAPH[asset].lock != "accelerator":
        return 0.0, False
    if by_server:
        return float(accelerators_of(spec.serving.options)), True
    trained = {"sft_checkpoint": spec.train.shards, "rl_checkpoint": spec.rl.gpus}
    return float(trained.get(asset, 1)), False


def _starts_server(spec: AnySpec | None) -> bool:
    """Return whether etpi starts a vLLM server for the spec's rollouts."""
    if isinstance(spec, RolloutSetSpec):
        return spec.starts_vllm
    return isinstance(spec, ExperimentSpec) and spec.serving.engine == "vllm"


def _runs_sandboxes(asset: str, set_name: str, key: str, specs: Specs) -> bool:
    spec = specs.get(set_name, key)
    if isinstance(spec, RolloutSetSpec) and spec.templated:
        return False
    return sandbox_kind(Step(asset, set_name, key, "ok"), specs) is not None


def _fans_out(asset: str, spec: AnySpec | None) -> bool:
    """Return whether the step's rollouts run in actors on all nodes with sandboxes (`rollouts.collect`).

    An engine in the step's own process, transformers, keeps them on its node.
    """
    if asset == "raw_rollouts" and isinstance(spec, RolloutSetSpec):
        collects = spec.is_collected and not spec.templated
        return collects and spec.engine is not None and spec.engine.kind != "transformers"
    return asset == "eval_rollouts" and _starts_server(spec)


def _most(nodes: Sequence[Node], name: str) -> float:
    """Return how much of a resource the node that offers most of it offers."""
    return max((node.total.get(name, 0.0) for node in nodes), default=0.0)


def _shown(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())


def _options(amounts: Mapping[str, float]) -> str:
    """Return the options of `ray start` for a node that offers all that is asked."""
    known = {"CPU": "--num-cpus", "GPU": "--num-gpus"}
    custom = ", ".join(f'"{name}": {amount:g}' for name, amount in amounts.items() if name not in known)
    plain = [f"{option}={max(1, round(amounts[name]))}" for name, option in known.items() if name in amounts]
    return " ".join([*plain, *([f"--resources='{{{custom}}}'"] if custom else [])])
