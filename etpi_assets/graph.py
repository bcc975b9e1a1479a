"""The asset graph as data: each asset's partitions, tables, inputs and spec sections.

The functions of the stages declare them (`@asset`). Dagster's assets, the planner, the skip rule and the partition
mappings are all derived from these declarations.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, get_args

Set = Literal["suite", "rollout_set", "experiment", "all"]


@dataclass(frozen=True)
class Node:
    """One asset.

    Attributes:
        name: the asset's name, which is its function's.
        set: the kind of its partitions; "all" for an unpartitioned asset, whose only key is "all".
        group: its group in Dagster, a column of the web page.
        tables: the lake tables in each version of it (names of `etpi_resources.lake.schemas.TABLES`).
        upstream: assets whose data versions are part of its input key, in order: the parameters of its function. Spec
            assets are upstream in Dagster only; the input key has the `sections` of a spec instead.
        sections: keys of its own spec that its result depends on, dotted below the top level; "*" is the whole spec.
        versions: the components of `planning/versions.toml` that compute it; "judge.{family}" is those of the families
            that its spec selects.
        kept: the components that compute its expensive results, rollouts or trainings, which are stored under their
            versions. If one is raised, the result is kept until a person asks for another.
        expensive: spec -> whether its results with `kept` components are expensive; otherwise they are computed again.
        lock: an OS lock that it holds while it computes; the machine runs one asset with this lock at a time.
        across_seams: whether it is computed although results that it reads are kept: it judges or reports them.
        reads_path: whether it reads the files that its spec's `path` names; they are part of its input key.
        summary: one or two sentences for the web page.
        module: the module of its function.
    """

    name: str
    set: Set
    group: str
    tables: tuple[str, ...]
    summary: str
    module: str
    upstream: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    expensive: Callable[[Any], bool] = lambda spec: True
    lock: str | None = None
    reads_path: bool = False
    kinds: tuple[str, ...] = ("parquet",)
    across_seams: bool = False


STAGES = ("resolved_specs", "tasks", "rollouts", "scoring", "curation", "training", "evaluation", "reports")
"""The packages whose module `assets` declares assets."""


class GraphError(Exception):
    """An asset is declared wrongly; the message names the asset, the fault and the nearest right name."""


class Graph(Mapping[str, Node]):
    """The assets by name, in topological order.

    `load` imports the stages, whose functions declare them.

    Raises:
        GraphError: on first use, if a declaration is wrong.
    """

    def __init__(self, stages: Iterable[str] = ()) -> None:
        self._stages, self._declared = tuple(stages), dict[str, Node]()

    def declare(self, node: Node) -> None:
        """Add an asset. Raises GraphError if there is one of that name."""
        if node.name in self._declared:
            raise GraphError(f"the asset {node.name} is declared twice")
        self._declared[node.name] = node

    def load(self) -> dict[str, Node]:
        """Import the stages and return the nodes by name, in topological order; else in the order of the stages."""
        places = {f"etpi_assets.{stage}.assets": place for place, stage in enumerate(self._stages)}
        for module in places:
            import_module(module)
        for node in self._declared.values():
            self._check_inputs(node)
        declared = sorted(self._declared.values(), key=lambda node: places.get(node.module, len(places)))
        waiting, nodes = {node.name: node for node in declared}, dict[str, Node]()
        while waiting:
            ready = next((node for node in waiting.values() if nodes.keys() >= {*node.upstream}), None)
            if ready is None:
                edges = [f"{n.name} reads {', '.join(waiting.keys() & {*n.upstream})}" for n in waiting.values()]
                raise GraphError(f"assets read each other in a cycle: {'; '.join(edges)}")
            nodes[ready.name] = waiting.pop(ready.name)
        return nodes

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return self.load()

    def _check_inputs(self, node: Node) -> None:
        order = get_args(Set)
        for name in node.upstream:
            if name not in self._declared:
                raise GraphError(
                    f"{node.name} reads the asset {name!r}, which is not declared{nearest(name, self._declared)}"
                )
            if order.index(self._declared[name].set) > order.index(node.set):
                raise GraphError(f"{node.name}, one per {node.set}, reads {name}, one per {self._declared[name].set}")

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""


GRAPH = Graph(STAGES)

_DATASET = ("selected_trajectories", "tito_pairs", "upweighted_dataset")
_TRAINING = ("base_checkpoint", "sft_checkpoint", "rl_checkpoint", "rl_rewards")
_EVALUATION = ("serving_probe", "eval_rollouts", "eval_metrics", "blame", "experiment_report", "model_card")
_ACROSS = ("leaderboard", "teacher_ceiling", "catalog")

JOBS: dict[str, tuple[Set, tuple[str, ...]]] = {
    "prepare_suite": ("suite", ("suite_spec", "tasks", "catalog")),
    "collect_rollouts": ("rollout_set", ("rollout_set_spec", "raw_rollouts", "scored_rollouts", "catalog")),
    "build_dataset": ("experiment", ("experiment_spec", *_DATASET, "catalog")),
    "train": ("experiment", ("experiment_spec", *_TRAINING, "catalog")),
    "evaluate": ("experiment", ("experiment_spec", *_EVALUATION, *_ACROSS)),
    "run_experiment": ("experiment", ("experiment_spec", *_DATASET, *_TRAINING, *_EVALUATION, *_ACROSS)),
    "publish_catalog": ("all", _ACROSS),
}
"""Every job: the set it is keyed by, and its assets."""
