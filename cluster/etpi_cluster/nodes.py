"""The nodes of the cluster's Ray: what each offers, and what of it is free now.

It is asked over Ray's dashboard, so a process that asks need not run on one of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etpi_cluster.session import CPU, SANDBOXES
from etpi_cluster.settings import Cluster
from etpi_resources.backend import BackendError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_SHOWN = (CPU, "GPU", SANDBOXES)
_SECONDS = 15.0


@dataclass(frozen=True)
class Node:
    """A node that is alive.

    Attributes:
        id: Ray's, in hex.
        total: what it offers, by Ray's names of resources.
        free: what nobody uses now, a few seconds ago at most; equal to `total` where Ray does not say.
    """

    id: str
    name: str
    address: str
    is_head: bool
    total: Mapping[str, float]
    free: Mapping[str, float]

    def __str__(self) -> str:
        names = [*_SHOWN, *sorted(name for name in self.total if name.startswith("etpi_") and name not in _SHOWN)]
        shown = ", ".join(f"{name} {self.total[name]:g}" for name in names if self.total.get(name))
        return f"{self.name or self.address} ({shown or 'nothing'})"


def job_client(settings: Cluster) -> JobSubmissionClient:
    """Return a client of Ray's jobs.

    Raises:
        BackendError: Ray's dashboard does not answer or refuses the request.
    """
    from etpi_cluster.jobs import JobClient

    try:
        return JobClient(settings.jobs)
    except Exception as error:  # requests' errors, Ray's AuthenticationError, RuntimeError for another status
        raise unreachable(settings, error) from error


def unreachable(settings: Cluster, error: Exception) -> BackendError:
    """Return the error that says that Ray does not answer, and what to do."""
    return BackendError(
        f"Ray does not answer at jobs = {settings.jobs!r} of cluster.toml ({type(error).__name__}: {error}). Start its "
        "head with a dashboard (ray start --head --dashboard-host=ADDRESS), or correct the address; where Ray asks for "
        "a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH here too"
    )


def alive_nodes(client: JobSubmissionClient) -> list[Node]:
    """Return the nodes that are alive, the head first.

    Raises:
        OSError, RuntimeError: the dashboard does not answer.
    """
    states = _get(client, "/api/v0/nodes?detail=false&limit=10000")["result"]["result"]
    try:
        usage = _get(client, "/api/cluster_status")["clusterStatus"]["loadMetricsReport"]["usageByNode"]
    except (KeyError, TypeError):  # not reported yet: a few seconds after the head's start
        usage = {}
    nodes = [
        Node(
            state["node_id"],
            state["node_name"],
            state["node_ip"],
            state["is_head_node"],
            state["resources_total"],
            _free(state["resources_total"], usage.get(state["node_id"], {})),
        )
        for state in states
        if state["state"] == "ALIVE"
    ]
    return sorted(nodes, key=lambda node: (not node.is_head, node.name))


def described(nodes: Iterable[Node]) -> str:
    """Return, for messages, what each node offers."""
    return ", ".join(map(str, nodes)) or "none"


def serves(node: Node, amounts: Mapping[str, float], *, now: bool = False) -> bool:
    """Return whether the node offers these amounts; `now`: whether that much of it is free."""
    has = node.free if now else node.total
    return all(has.get(name, 0.0) >= amount - 1e-6 for name, amount in amounts.items())


def offered_together(nodes: Sequence[Node], name: str) -> float:
    """Return how much of a resource the nodes offer together."""
    return sum(node.total.get(name, 0.0) for node in nodes)


def _free(total: Mapping[str, float], usage: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Subtract what is used; the dashboard spells the names of resources there in camel case."""
    used = {name: usage.get(_camel(name), (0.0,))[0] for name in total}
    return {name: amount - used[name] for name, amount in total.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _get(client: JobSubmissionClient, path: str) -> Any:
    response = client._do_request("GET", path, timeout=_SECONDS)  # has the token's header, as no public name does
    if response.status_code != 200:
        raise RuntimeError(f"{path} answers with status {response.status_code}")
    return response.json()["data"]
