"""This process's connection to the cluster's Ray."""

from __future__ import annotations

import logging
import os

from etpi_resources.cluster.settings import CLUSTER_VARIABLE, ClusterError, cluster


def connect() -> None:
    """Connect to Ray, once: to RAY_ADDRESS, which Ray sets in its jobs, or to the address in `cluster.toml`.

    Raises:
        ClusterError: no cluster is set, or its Ray cannot be reached from here.
    """
    settings = cluster()
    if settings is None:
        raise ClusterError(f"no cluster is set: {CLUSTER_VARIABLE} names no file")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or settings.ray
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray at {address} cannot be reached from this node: {error}. Is a Ray node running here, started with "
            f"`ray start --address={address}`?"
        ) from error
