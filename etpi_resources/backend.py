"""The machines of an installed plugin, on which work runs besides this one; None without a plugin.

A plugin is an entry point of the group `etpi.backends`: a function that takes the file that `ETPI_CLUSTER` names and
returns a `Backend`. Without that variable everything runs on this machine, and no plugin is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from etpi_resources.errors import ExpectedError

if TYPE_CHECKING:
    import dagster as dg

    from etpi_resources.engines.vllm_server import Servers
    from etpi_resources.process.locks import Locks
    from etpi_resources.trainers.pipes import RunningWorker
    from etpi_resources.trainers.precision import Gpu

GROUP = "etpi.backends"
CLUSTER_VARIABLE = "ETPI_CLUSTER"
"""Environment variable that names the settings of several machines; unset: one machine."""
SETTINGS_FILE = "cluster.toml"
"""Name of these settings in the folder of the lake that the machines share."""

Log = Callable[[str], None]


class BackendError(ExpectedError, RuntimeError, click.ClickException):
    """The machines cannot be used; the message says what is wrong and what to do.

    It is also a click error, so that `dagster job launch` prints the message without a traceback.
    """

    def __init__(self, message: str) -> None:
        click.ClickException.__init__(self, message)


class Backend(Protocol):
    """Several machines that share a lake. Every method raises BackendError where the machines cannot be used."""

    @property
    def lake(self) -> Path:
        """The folder of the lake, at the same path on every machine."""
        ...

    def local_folder(self, root: Path) -> Path:
        """Return a folder for the lake in `root` on this machine's own disk, for locks of this machine's processes."""
        ...

    def locks(self) -> Locks:
        """Return the locks that exclude every process of the lake."""
        ...

    def map_blocks(
        self, factory: Any, blocks: Iterable[tuple[str, Any]], workers: int, *, reads: Sequence[Path],
        sandboxes: bool, log: Log | None,
    ) -> Iterator[Any]:  # fmt: skip
        """Yield results as `process.pool.ordered_map` does, computed on idle CPUs of all machines."""
        ...

    def calls(self, log: Log) -> AbstractContextManager[Executor]:
        """Open an executor whose calls run on the machines with sandboxes; it pickles functions and arguments."""
        ...

    def addresses(self) -> list[str]:
        """Return the addresses of the machines."""
        ...

    def serve(self, folder: Path, name: str, *, log: Path, options: Mapping[str, Any]) -> Servers:
        """Start servers of a checkpoint, one on each free set of accelerators; arguments as of `VllmServer`."""
        ...

    def spans_nodes(self, processes: int) -> bool:
        """Return whether `processes` ranks need more accelerators than this machine has."""
        ...

    def gpu_of_ranks(self) -> Gpu | None:
        """Return the GPU on which the ranks of such a worker compute; None if they use none."""
        ...

    def ranks(
        self, module: str, folder: Path, processes: int, *, context: Any, grace: float, log: Log
    ) -> AbstractContextManager[RunningWorker]:
        """Start such a worker, its ranks on several machines; arguments as of `trainers.pipes.run_worker`."""
        ...

    def step_executor(self) -> dg.ExecutorDefinition:
        """Return Dagster's executor, which places each step."""
        ...

    def instance_yaml(self) -> str:
        """Return the text of `dagster.yaml`."""
        ...

    def require_instance(self, file: Path) -> None:
        """Raise BackendError if a `dagster.yaml` belongs to other machines, or its database cannot be opened."""
        ...

    def require_same_code(self) -> None:
        """Raise BackendError if this process is a step with other code than the process of its run."""
        ...


def backend() -> Backend | None:
    """Return the backend of the settings that `ETPI_CLUSTER` names; None if it names none: this machine.

    Raises:
        BackendError: no plugin is installed, or the settings are wrong.
    """
    settings = os.environ.get(CLUSTER_VARIABLE)
    return _open()(Path(settings)) if settings else None


@cache
def _open() -> Callable[[Path], Backend]:
    for point in entry_points(group=GROUP):
        return point.load()
    raise BackendError(
        f"{CLUSTER_VARIABLE} is set, and no package is installed that uses it: pip install etpi-cluster, or unset "
        "it to run everything on this machine"
    )
