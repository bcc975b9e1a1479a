"""Examine every node of a cluster and each pair of nodes.

`python -m etpi_cluster.doctor.survey` is a Ray job on the cluster, so that the machine that asks need not be one of its
nodes. The last line of its output is the survey.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

from pydantic import BaseModel, Field

from etpi_cluster.code import code_hash
from etpi_cluster.doctor.node import NodeExaminer, NodeReport
from etpi_cluster.session import connect, nodes
from etpi_cluster.settings import Cluster, cluster

MARK = "ETPI-DOCTOR "
SECONDS = 120.0
"""Time for a node to answer."""
KINDS = ("lake", "flock")
"""The lock that the lake uses, and flock on the lake's folder, which one lake must not rely on."""


class PairLock(BaseModel):
    """Result of a test with a pair of nodes: the lock of one must keep the other from taking it.

    Attributes:
        kind: of KINDS.
        excluded: whether the other was kept from the lock while it was held; text: an error.
        freed: whether it could take it after its release.
    """

    kind: str
    holder: str
    other: str
    excluded: bool | str
    freed: bool | str = True


class Survey(BaseModel):
    """Reports of all nodes, and the locks of all pairs of those that work.

    Attributes:
        code: hash of the code of the process that asks.
        failed: nodes that gave no report, and why.
        token: whether Ray asks for a token.
    """

    code: str
    nodes: list[NodeReport]
    failed: dict[str, str] = Field(default_factory=dict)
    locks: list[PairLock] = Field(default_factory=list)
    token: bool = True


def survey(settings: Cluster) -> Survey:
    """Examine all living nodes. Raises BackendError if Ray cannot be reached from here."""
    ray = connect()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = uuid.uuid4().hex[:12]
    examiners: dict[str, Any] = {}
    for node in nodes():
        pinned = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        actor = ray.remote(NodeExaminer).options(num_cpus=0, scheduling_strategy=pinned)
        examiners[node.name] = actor.remote(settings, node.name, _offered(node.resources), token)
    reports: dict[str, NodeReport] = {}
    failed: dict[str, str] = {}
    pending = {name: actor.report.remote() for name, actor in examiners.items()}
    for name, answer in pending.items():
        try:
            reports[name] = NodeReport.model_validate(ray.get(answer, timeout=SECONDS))
        except Exception as error:  # other code, a node that died: the report says which
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"[:600]
    living = {name: examiners[name] for name in reports}
    for name, actor in living.items():
        reports[name].sees = ray.get(actor.seen.remote(), timeout=SECONDS)
        reports[name].clock_offset, reports[name].clock_within = _clock(ray, actor)
    good = {name: actor for name, actor in living.items() if reports[name].lake_error is None}
    # A node that does not reach Postgres has a fault already, and would wait a minute for each lock.
    locks = _pairs(ray, {name: actor for name, actor in good.items() if reports[name].postgres_error is None})
    if good:
        ray.get(next(iter(good.values())).tidy.remote(), timeout=SECONDS)
    return Survey(
        code=code_hash(), nodes=list(reports.values()), failed=failed, locks=locks,
        token=os.environ.get("RAY_AUTH_MODE") == "token",
    )  # fmt: skip


def _pairs(ray: Any, examiners: dict[str, Any]) -> list[PairLock]:
    """Let each node hold each kind of lock while all others try to take it."""
    result: list[PairLock] = []
    for kind in KINDS:
        for holder, actor in examiners.items():
            neighbours = {name: other for name, other in examiners.items() if name != holder}
            error = ray.get(actor.hold.remote(kind), timeout=SECONDS)
            if error is not None:
                names = neighbours or [""]
                result += [PairLock(kind=kind, holder=holder, other=name, excluded=error) for name in names]
                continue
            during = {name: ray.get(other.can_take.remote(kind), timeout=SECONDS) for name, other in neighbours.items()}
            ray.get(actor.release.remote(), timeout=SECONDS)
            after = {name: ray.get(other.can_take.remote(kind), timeout=SECONDS) for name, other in neighbours.items()}
            result += [
                PairLock(
                    kind=kind, holder=holder, other=name, freed=after[name],
                    excluded=taken if isinstance(taken, str) else not taken,
                )
                for name, taken in during.items()
            ]  # fmt: skip
    return result


def _clock(ray: Any, actor: Any) -> tuple[float, float]:
    """Return how far an actor's clock is ahead, and the error of that, seconds: the best of five questions."""
    best = (0.0, float("inf"))
    for _ in range(5):
        before = time.time()
        there = ray.get(actor.clock.remote(), timeout=SECONDS)
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = (there - (before + after) / 2, (after - before) / 2)
    return best


def _offered(resources: dict[str, float]) -> dict[str, float]:
    """Return the resources that a person set, without Ray's names of nodes and its memory."""
    left_out = ("node:", "memory", "object_store_memory", "accelerator_type:")
    return {name: amount for name, amount in resources.items() if not name.startswith(left_out)}


def main() -> None:
    print(MARK + survey(cluster()).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
