"""The connection of this process to the Ray cluster of `cluster.toml`, and the nodes that it shows."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from etpi_cluster.settings import cluster
from etpi_resources.backend import BackendError

CPU = "CPU"
SANDBOXES = "etpi_sandbox"
"""Ray resource of a node on which sandboxes work; its number is how many rollouts may run there at once."""


@dataclass(frozen=True)
class RayNode:
    """A living node of the Ray cluster.

    Attributes:
        node_id: Ray's, in hex.
        name: host name, address and the first digits of its id, for messages.
        address: where other nodes reach it.
        resources: everything that it offers, used or not, by Ray's name.
    """

    node_id: str
    name: str
    address: str
    resources: dict[str, float]

    def offers(self, resource: str) -> int:
        """Return the whole number of a resource."""
        return int(self.resources.get(resource, 0))


def connect() -> Any:
    """Connect this process to the cluster, unless it is, and return the module `ray`.

    The address is RAY_ADDRESS, which Ray sets for its jobs, or that of `cluster.toml`. The connection ends with the
    process. Workers run with the environment of their node.

    Raises:
        BackendError: no cluster is configured, a package is missing, or no node of the cluster runs on this machine.
    """
    settings = cluster()
    import ray

    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS") or settings.ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BackendError(
            f"no connection to Ray at {address}: {error}. Steps run on nodes of the cluster: launch the job through "
            "Dagster, or start Ray on this machine"
        ) from error
    return ray


def nodes() -> list[RayNode]:
    """Return the living nodes, in order of their names. `connect` first."""
    ray = connect()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(
        (
            RayNode(
                node["NodeID"],
                f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})",
                node["NodeManagerAddress"],
                dict(node["Resources"]),
            )
            for node in alive
        ),
        key=lambda node: (node.name, node.node_id),
    )


def free_of(resource: str) -> dict[str, float]:
    """Return {node id: how much of a resource nobody uses there}, a moment ago. `connect` first."""
    from ray._private.state import available_resources_per_node

    return {node_id: amounts.get(resource, 0.0) for node_id, amounts in available_resources_per_node().items()}
