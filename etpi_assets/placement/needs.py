"""What a step needs of the nodes: derived from its asset's lock and from the spec's `requires`, engine and sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etpi_assets.graph import GRAPH
from etpi_assets.planner import Step
from etpi_assets.runs.preflight import sandbox_kind
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import AnySpec, Specs
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_resources.cluster.nodes import CPU, SANDBOXES, Node, described, offered_together, serves

WORKING, LIGHT = 1.0, 0.1
"""CPUs of a step that computes, and of one that reads a spec, writes a page or waits for others' work. None asks for
nothing: Ray starts a job that asks for nothing on the head, always."""

OWN_SANDBOXES = 8.0
"""Most sandboxes that a step takes of its node's, where it runs them itself."""

ROLLOUTS_FAN_OUT = True
"""Whether a step that collects rollouts runs them in actors on all nodes with sandboxes and takes none itself."""


@dataclass(frozen=True)
class Need:
    """What a step needs, by Ray's names of resources.

    Attributes:
        own: what the step takes of the node it runs on.
        others: what a node must offer that the step itself does not take, because an actor of it will.
        together: what all nodes must offer together: a training over several nodes.
    """

    own: Mapping[str, float]
    others: Mapping[str, float] = field(default_factory=dict)
    together: Mapping[str, float] = field(default_factory=dict)

    def missing(self, nodes: Sequence[Node], address: str) -> str | None:
        """Return what no node that is alive offers, what the nodes offer, and the remedy; None if nothing is missing.

        Args:
            address: where a further node joins.
        """
        lacking = [
            f"a node with {_shown(asked)}"
            for asked in (self.own, self.others)
            if asked and not any(serves(node, asked) for node in nodes)
        ]
        lacking += [
            f"{name} {amount:g} together"
            for name, amount in self.together.items()
            if offered_together(nodes, name) < amount
        ]
        if not lacking:
            return None
        start = f"ray start --address={address} {_options({**self.own, **self.others, **self.together})}"
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
    node = GRAPH[asset]
    if node.set == "all":
        return Need({CPU: LIGHT})
    spec = specs.get(node.set, key)
    sandboxes = sandbox_kind(Step(asset, node.set, key, "ok"), specs) is not None
    ranks = _accelerators(asset, spec)
    if _fans_out(asset, spec):
        served = {accelerator: _served_by(spec)} if _starts_server(spec) and ranks else {}
        return Need({CPU: LIGHT}, {**({SANDBOXES: 1.0} if sandboxes else {}), **served})
    own = {CPU: LIGHT if node.group in ("specs", "reports") else WORKING}
    if sandboxes:
        own[SANDBOXES] = max(1.0, min(OWN_SANDBOXES, _most(nodes, SANDBOXES)))
    if ranks > 1 and ranks > _most(nodes, accelerator):
        return Need(own, together={accelerator: ranks})
    if ranks:
        own[accelerator] = ranks
    return Need(own)


def _accelerators(asset: str, spec: AnySpec | None) -> float:
    """Return the accelerators that the step uses, in its own process or through processes that it starts."""
    if isinstance(spec, RolloutSetSpec):
        starts = asset == "raw_rollouts" and spec.kind == "live" and _starts_server(spec)
        return _served_by(spec) if starts else 0.0
    if not isinstance(spec, ExperimentSpec) or spec.requires == "cpu" or GRAPH[asset].lock != "accelerator":
        return 0.0
    return float(spec.train.shards) if asset == "sft_checkpoint" else 1.0


def _starts_server(spec: AnySpec | None) -> bool:
    """Return whether etpi starts a vLLM server for the step."""
    if isinstance(spec, RolloutSetSpec):
        return spec.engine is not None and spec.engine.kind == "vllm" and not spec.engine.urls
    return isinstance(spec, ExperimentSpec) and spec.serving.engine == "vllm"


def _served_by(spec: AnySpec | None) -> float:
    """Return the accelerators of one server."""
    engine = (
        spec.engine if isinstance(spec, RolloutSetSpec) else spec.serving if isinstance(spec, ExperimentSpec) else None
    )
    options = engine.options if engine is not None else {}
    return float(options.get("tensor-parallel-size", 1)) * float(options.get("pipeline-parallel-size", 1))


def _fans_out(asset: str, spec: AnySpec | None) -> bool:
    """Return whether the step only directs work that actors on other nodes do: `ROLLOUTS_FAN_OUT`."""
    if not ROLLOUTS_FAN_OUT:
        return False
    if asset == "raw_rollouts" and isinstance(spec, RolloutSetSpec):
        return spec.kind == "live" and spec.engine is not None and spec.engine.kind != "transformers"
    return asset in ("serving_probe", "eval_rollouts") and _starts_server(spec)


def _most(nodes: Sequence[Node], name: str) -> float:
    """Return how much of a resource the node that offers most of it offers."""
    return max((node.total.get(name, 0.0) for node in nodes), default=0.0)


def _shown(asked: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in asked.items())


def _options(asked: Mapping[str, float]) -> str:
    """Return the options of `ray start` for a node that offers all that is asked."""
    known = {"CPU": "--num-cpus", "GPU": "--num-gpus"}
    own = ", ".join(f'"{name}": {amount:g}' for name, amount in asked.items() if name not in known)
    plain = [f"{option}={max(1, round(asked[name]))}" for name, option in known.items() if name in asked]
    return " ".join([*plain, *([f"--resources='{{{own}}}'"] if own else [])])
