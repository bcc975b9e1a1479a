"""Run the ranks of a worker on several nodes of a cluster, as one process that the caller reads line by line.

Ray places the ranks: a placement group with one bundle per rank, each with one accelerator. On each node an actor
(`node_launcher`) starts this node's share of the ranks with the launcher of one machine, supervised. The ranks connect
over the addresses that Ray's nodes know each other by. If a rank, a launcher or a node fails, all end.

Ray Train's TorchTrainer would place and connect the ranks too. It would run the worker inside Ray's own processes, and
so bring a second way to start, supervise, report and resume a training, and more packages than `ray[default]`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from etpi_cluster.line_messages import LineMessages
from etpi_cluster.node_launcher import GPU, NodeLauncher
from etpi_cluster.session import connect, nodes
from etpi_resources.backend import BackendError
from etpi_resources.trainers.interpreter import find_trainer_gpu
from etpi_resources.trainers.pipes import RunningWorker
from etpi_resources.trainers.precision import Gpu
from etpi_resources.trainers.workers.ranks import FAILURE_MARK, RankFailure, root_cause

POLL_SECONDS = 0.2
SETTLE_SECONDS = 3.0
"""Time to wait after the first failure for the reports of other nodes: it may be the consequence of another."""
SILENT_SECONDS = 60.0
"""A node that does not answer for so long counts as lost."""
WAIT_LOG_SECONDS = 30.0


def spans_nodes(processes: int, accelerator: str) -> bool:
    """Return whether `processes` ranks need other nodes than this, which offers fewer accelerators.

    Raises:
        BackendError: the cluster's Ray cannot be reached.
    """
    if processes < 2:
        return False
    here = connect().get_runtime_context().get_node_id()
    return processes > next(node.offers(accelerator) for node in nodes() if node.node_id == here)


def find_gpu_of_ranks(accelerator: str) -> Gpu | None:
    """Return the GPU of the first node that offers accelerators to ranks; None if the accelerator is a stand-in.

    Raises:
        RuntimeError: the interpreter there failed.
    """
    if accelerator != GPU:
        return None
    ray = connect()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = next((node for node in nodes() if node.offers(GPU)), None)
    if node is None:
        return None
    # Without a reservation: the GPUs may be busy, and this only reads what they are.
    here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    probe = ray.remote(find_trainer_gpu).options(num_cpus=0, scheduling_strategy=here)
    return ray.get(probe.remote(hidden=True))


@contextmanager
def run_ranks(
    module: str,
    folder: Path,
    processes: int,
    accelerator: str,
    *,
    context: Any,
    grace: float,
    log: Callable[[str], None],
) -> Iterator[RunningWorker]:
    """Start a worker's ranks on several nodes; arguments as of `run_worker`."""
    if context is None:
        with RanksOverNodes(module, folder, processes, accelerator, environment={}, grace=grace, log=log) as ranks:
            yield ranks
        return

    def say(line: str) -> None:
        log(line)
        context.log.info(line)

    with (
        _pipes_session(context) as (messages, environment),
        RanksOverNodes(module, folder, processes, accelerator, environment=environment, grace=grace, log=say) as ranks,
    ):
        yield _WithoutMessages(ranks, messages)


@contextmanager
def _pipes_session(context: Any) -> Iterator[tuple[LineMessages, Mapping[str, str]]]:
    """Open a Pipes session with a worker that shares no temporary files with this process: the context is in its
    environment, its messages are lines of its output."""
    import dagster as dg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        messages = LineMessages()
        with dg.open_pipes_session(context, dg.PipesEnvContextInjector(), messages) as session:
            yield messages, session.get_bootstrap_env_vars()


class _WithoutMessages:
    """A worker whose lines hold Pipes messages, which go to Dagster."""

    def __init__(self, launched: RunningWorker, messages: LineMessages) -> None:
        self._messages = messages
        self._launched = launched
        self.failure, self.result = launched.failure, launched.result

    def lines(self) -> Iterator[str]:
        return (line for line in self._launched.lines() if not self._messages.take(line))


@dataclass
class _Node:
    """One node of the training: its launcher's actor, its ranks, and what it said last."""

    name: str
    address: str
    bundles: list[int]
    first: int = 0
    actor: Any = None
    reserving: list[Any] = field(default_factory=list)
    status: int | None = None
    lost: str | None = None
    failure: RankFailure | None = None
    heard: float = field(default_factory=time.monotonic)

    @property
    def ranks(self) -> str:
        last = self.first + len(self.bundles) - 1
        return f"rank {self.first}" if last == self.first else f"ranks {self.first} to {last}"


class RanksOverNodes:
    """A worker whose ranks run on several nodes; a context manager, at whose end no process of it is left.

    Args:
        module, folder: as of `run_worker`; every node sees the folder at this path.
        processes: number of ranks.
        accelerator: Ray's resource; each rank takes one.
        environment: more variables for the ranks.
        grace: seconds that the ranks have to end after an interrupt.
        log: gets lines about placing the ranks.
    """

    def __init__(
        self,
        module: str,
        folder: Path,
        processes: int,
        accelerator: str,
        *,
        environment: Mapping[str, str],
        grace: float,
        log: Callable[[str], None],
    ) -> None:
        self._resource = accelerator
        self._module, self._folder, self._processes = module, folder, processes
        self._environment, self._grace, self._log = environment, grace, log
        self._group: Any = None
        self._nodes: list[_Node] = []

    def __enter__(self) -> Self:
        try:
            self._reserve()
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray
        from ray.util import remove_placement_group

        actors = [node.actor for node in self._nodes if node.actor is not None]
        if running := [node.actor for node in self._nodes if node.actor is not None and node.status is None]:
            ray.wait([actor.stop.remote() for actor in running], num_returns=len(running), timeout=self._grace + 5.0)
        for actor in [*actors, *(other for node in self._nodes for other in node.reserving)]:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)

    def lines(self) -> Iterator[str]:
        """Yield the lines of all ranks as they come, until all launchers have ended or one has failed."""
        pending = {node.actor.poll.remote(): node for node in self._nodes}
        first_failure: float | None = None
        while pending:
            for node in self._answers(pending):
                yield from self._take(node, pending)
            if first_failure is None and any(node.status or node.lost for node in self._nodes):
                first_failure = time.monotonic()
            if first_failure is not None and time.monotonic() - first_failure > SETTLE_SECONDS:
                self._give_up_on_silent(first_failure)
                return

    def failure(self) -> str | None:
        """Return what failed and where, after `lines`; None if all ranks ended well."""
        if lost := next((node for node in self._nodes if node.lost), None):
            return f"{lost.ranks} of {self._processes}, on node {lost.name}: {lost.lost}; the other ranks were stopped"
        failed = [node for node in self._nodes if node.status]
        if not failed:
            return None
        reported = {node.failure.rank: node for node in failed if node.failure is not None}
        if not reported:
            node = failed[0]
            return f"the launcher of {node.ranks} on node {node.name} ended with status {node.status}"
        cause = root_cause([node.failure for node in reported.values() if node.failure is not None])
        lines = "\n".join(f"  {line}" for line in cause.lines) or "  (nothing)"
        where = f"rank {cause.rank} of {cause.world}, on node {reported[cause.rank].name}, {cause.how}"
        return f"{where}; the other ranks were stopped. Last lines of rank {cause.rank}:\n{lines}"

    def result(self) -> str | None:
        """Return the text of the result that rank 0 left."""
        import ray

        return ray.get(self._nodes[0].actor.result.remote(str(self._folder)))

    # --- placing -----------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Reserve an accelerator per rank, on as few nodes as hold them.

        Raises:
            BackendError: all nodes together do not have as many.
        """
        ray = connect()
        from ray.util import placement_group, placement_group_table

        alive = {node.node_id: node for node in nodes()}
        offers = {node.name: node.offers(self._resource) for node in alive.values()}
        if sum(offers.values()) < self._processes:
            listed = ", ".join(f"{name}: {count}" for name, count in offers.items())
            raise BackendError(
                f"train.shards = {self._processes} needs as many of Ray's resource {self._resource!r}, and the nodes "
                f"of the cluster have {sum(offers.values())} ({listed}); lower train.shards, or start a node that "
                "offers more"
            )
        self._group = placement_group([{self._resource: 1.0}] * self._processes, strategy="PACK")
        waited = 0.0
        while not self._group.wait(timeout_seconds=WAIT_LOG_SECONDS if waited else 5.0):
            waited = waited or time.monotonic()
            free = ray.available_resources().get(self._resource, 0)
            self._log(f"waiting for {self._processes} of {self._resource} ({free:g} are free)")
        table = placement_group_table(self._group)
        bundles: dict[str, list[int]] = {}
        for bundle, node in sorted((int(index), node) for index, node in table["bundles_to_node_id"].items()):
            bundles.setdefault(node, []).append(bundle)
        first = 0
        for node, indices in bundles.items():
            self._nodes.append(_Node(alive[node].name, alive[node].address, indices, first))
            first += len(indices)

    def _start(self) -> None:
        """Start an actor per node, open the store on the first, then start the launchers."""
        import ray

        for node in self._nodes:
            # Only the actor that a GPU was reserved for learns which it is, so each rank needs one.
            of_bundles = node.bundles if self._resource == GPU else node.bundles[:1]
            node.actor, *node.reserving = [self._actor(bundle) for bundle in of_bundles]
        head = self._nodes[0]
        port = ray.get(head.actor.listen.remote(head.address))
        started = []
        for node in self._nodes:
            arguments = [
                str(len(node.bundles)), "--first", str(node.first), "--world", str(self._processes),
                "--store", f"{head.address}:{port}", "--here", node.address,
            ]  # fmt: skip
            environment = dict(self._environment) if node is head else {}
            if self._resource == GPU:
                devices = ray.get([actor.devices.remote() for actor in (node.actor, *node.reserving)])
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(device for ids in devices for device in ids)
            started.append(
                node.actor.start.remote(self._module, str(self._folder), arguments, environment, self._grace)
            )
        ray.get(started)
        placed = ", ".join(f"{node.ranks} on {node.name}" for node in self._nodes)
        self._log(f"{self._processes} ranks over {len(self._nodes)} nodes: {placed}")

    def _actor(self, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted: dict[str, Any] = {"num_gpus": 1} if self._resource == GPU else {"resources": {self._resource: 1}}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return ray.remote(NodeLauncher).options(num_cpus=0, scheduling_strategy=strategy, **wanted).remote()

    # --- watching ----------------------------------------------------------------------------------------------------

    def _answers(self, pending: dict[Any, _Node]) -> list[Any]:
        """Wait for the nodes' next answers; a node that is silent for too long is lost."""
        import ray

        time.sleep(POLL_SECONDS)
        ready, silent = ray.wait(list(pending), num_returns=len(pending), timeout=1.0)
        for answer in silent:
            node = pending[answer]
            if time.monotonic() - node.heard > SILENT_SECONDS:
                node.lost = f"the node has not answered for {SILENT_SECONDS:.0f} s"
                del pending[answer]
        return ready

    def _take(self, answer: Any, pending: dict[Any, _Node]) -> Iterator[str]:
        """Yield the lines of one answer, and ask the node again if its launcher still runs."""
        import ray
        from ray.exceptions import RayError

        node = pending.pop(answer)
        try:
            lines, status = ray.get(answer)
        except RayError as error:
            reason = str(error).strip().splitlines()
            node.lost = (
                f"the node or Ray's process on it is gone ({type(error).__name__}: {reason[0] if reason else ''})"
            )
            return
        node.heard = time.monotonic()
        for line in lines:
            if line.startswith(FAILURE_MARK):
                node.failure = RankFailure.model_validate_json(line.removeprefix(FAILURE_MARK))
            else:
                yield line
        node.status = status
        if status is None:
            pending[node.actor.poll.remote()] = node

    def _give_up_on_silent(self, since: float) -> None:
        """Count nodes that have not answered since the first failure as its cause."""
        for node in self._nodes:
            if node.status is None and node.lost is None and node.heard < since:
                node.lost = "the node does not answer"
