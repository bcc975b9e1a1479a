"""The cluster as etpi's core uses it: `etpi_resources.backend.Backend`, found by the entry point `etpi.backends`.

Only the settings are imported here; Ray and Postgres are when a method needs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_cluster import environment, instance
from etpi_cluster.settings import Cluster, local_folder, read, require_packages

if TYPE_CHECKING:
    import dagster as dg

    from etpi_cluster.postgres_locks import PostgresLocks
    from etpi_cluster.vllm_servers import ClusterServers
    from etpi_resources.trainers.pipes import RunningWorker
    from etpi_resources.trainers.precision import Gpu

Log = Callable[[str], None]


def open_cluster(settings: Path) -> ClusterBackend:
    """Return the cluster of a `cluster.toml`. Raises BackendError if the file or a package is missing or wrong."""
    require_packages()
    return ClusterBackend(read(settings))


class ClusterBackend:
    """The machines of one `cluster.toml`; methods as `etpi_resources.backend.Backend` says."""

    def __init__(self, settings: Cluster) -> None:
        self._settings = settings

    @property
    def lake(self) -> Path:
        return self._settings.lake

    def local_folder(self, root: Path) -> Path:
        return local_folder(self._settings, root)

    def locks(self) -> PostgresLocks:
        return _postgres_locks(self._settings.postgres, self.lake, os.getpid())

    def map_blocks(
        self, factory: Any, blocks: Iterable[tuple[str, Any]], workers: int, *, reads: Sequence[Path],
        sandboxes: bool, log: Log | None,
    ) -> Iterator[Any]:  # fmt: skip
        from etpi_cluster.blocks import map_over_nodes

        return map_over_nodes(factory, blocks, workers, reads=reads, sandboxes=sandboxes, log=log)

    @contextmanager
    def calls(self, log: Log) -> Iterator[Executor]:
        from etpi_cluster.code import plugin_packages
        from etpi_cluster.fan_out import ClusterExecutor

        with ClusterExecutor(plugins=plugin_packages(), log=log) as executor:
            places = executor.places
            slots = ", ".join(f"{name} {number}" for name, number in places.items())
            log(f"rollouts run on {len(places)} nodes, {sum(places.values())} at once: {slots}")
            yield executor

    def addresses(self) -> list[str]:
        from etpi_cluster.session import nodes

        return [node.address for node in nodes()]

    def serve(self, folder: Path, name: str, *, log: Path, options: Mapping[str, Any]) -> ClusterServers:
        from etpi_cluster.vllm_servers import ClusterServers

        return ClusterServers(folder, name, log=log, options=options)

    def spans_nodes(self, processes: int) -> bool:
        from etpi_cluster.over_nodes import spans_nodes

        return spans_nodes(processes, self._settings.accelerator)

    def gpu_of_ranks(self) -> Gpu | None:
        from etpi_cluster.over_nodes import find_gpu_of_ranks

        return find_gpu_of_ranks(self._settings.accelerator)

    def ranks(
        self, module: str, folder: Path, processes: int, *, context: Any, grace: float, log: Log
    ) -> AbstractContextManager[RunningWorker]:
        from etpi_cluster.over_nodes import run_ranks

        accelerator = self._settings.accelerator
        return run_ranks(module, folder, processes, accelerator, context=context, grace=grace, log=log)

    def step_executor(self) -> dg.ExecutorDefinition:
        from etpi_cluster.placement.executor import node_executor

        return node_executor

    def instance_yaml(self) -> str:
        return instance.instance_yaml(self._settings)

    def require_instance(self, file: Path) -> None:
        instance.require_current(self._settings, file)
        instance.require_postgres(self._settings)

    def require_same_code(self) -> None:
        environment.require_code_of_run()


@lru_cache(maxsize=4)
def _postgres_locks(url: str, lake: Path, process: int) -> PostgresLocks:
    """Return the locks of this process; a forked child has a session of its own."""
    from etpi_cluster.postgres_locks import PostgresLocks

    return PostgresLocks(url, lake)
