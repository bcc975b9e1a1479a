"""Resources of a run: the lake, the specs, and the sandboxes and engines that a spec selects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from etpi_assets.specs.experiment import ExperimentSpec, ServingSection
from etpi_assets.specs.load import AnySpec, Specs, load_specs
from etpi_resources.backend import backend
from etpi_resources.engines import EngineUnavailable
from etpi_resources.errors import ExpectedError
from etpi_resources.lake.lake import Lake
from etpi_resources.sandboxes import HostFactory, SandboxUnavailable

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat
    from etpi_resources.engines.serving import Checkpoint, Serving

CONCURRENCY = 2 * (os.cpu_count() or 1)
"""Rollouts wait for sandboxes half of the time, so two for each core keep the machine busy."""

DEVICES = Path("/dev")
ACCELERATORS = ("nvidia[0-9]*", "kfd")
"""Patterns of the device files of an NVIDIA or AMD accelerator."""


MOST_SIDE_BY_SIDE = 4
"""A run needs about 1 GB for an interpreter, a base and a batch in training."""


class HardwareMissing(ExpectedError, RuntimeError):
    """An experiment requires hardware that this machine lacks; the message names it."""


@dataclass
class Resources:
    """Everything an asset may use besides its inputs; one object for each run, which loads the specs once.

    Attributes:
        lake: the lake with all tables.
        concurrency: the number of rollouts at once; it does not change results.
        specs_folder: the user's specs; None: the folder that ETPI_SPECS names, if any.
    """

    lake: Lake = field(default_factory=Lake.open)
    concurrency: int = CONCURRENCY
    specs_folder: Path | None = None

    @cached_property
    def specs(self) -> Specs:
        return load_specs(self.specs_folder)

    def sandboxes(self, kind: str) -> HostFactory:
        """Return the sandbox factory of a kind.

        Raises:
            SandboxUnavailable: the kind is unknown or cannot work on this machine; the message says what to install.
        """
        if kind == "bubblewrap":
            from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

            return BubblewrapFactory()
        if kind == "docker":
            from etpi_resources.sandboxes.docker import DockerFactory

            return DockerFactory()
        raise SandboxUnavailable(f'sandbox = {kind!r} is not a kind of sandbox; use "bubblewrap" or "docker"')

    def serving(
        self, section: ServingSection, chat: ChatFormat, checkpoints: Sequence[Checkpoint], context: int | None = None
    ) -> Serving:
        """Serve the checkpoints of an experiment, `section.servers` at once; the caller closes the result.

        Args:
            context: most tokens of a request's prompt and output together.
        """
        from etpi_resources.engines import serving

        if serving_kind(section) == "transformers":
            return serving.TransformersServing(chat)
        return serving.VllmServing(
            chat,
            checkpoints,
            options=section.options,
            template_kwargs=section.served_kwargs(),
            logs=self.lake.scratch("servers"),
            lock=self.lake.machine_lock_file("server"),
            context=context,
            at_once=section.servers,
        )


def accelerators() -> bool:
    """Return whether this machine has an accelerator, judged by device files alone, without importing torch."""
    return any(path for pattern in ACCELERATORS for path in DEVICES.glob(pattern))


def accelerator_count() -> int:
    """Return how many accelerators this process may use: those it is restricted to, or all that have a device file."""
    restricted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if restricted is not None:
        return len([name for name in restricted.split(",") if name.strip()])
    return len(list(DEVICES.glob("nvidia[0-9]*"))) or len(list(DEVICES.glob("dri/renderD*")))


def serving_kind(section: ServingSection) -> str:
    """Return the engine that serves here. "auto" is vLLM if this machine has an accelerator and a vLLM, and is no
    cluster: there accelerators are given to steps whose spec names a server."""
    from etpi_resources.engines.vllm_server import vllm_program

    if section.engine != "auto":
        return section.engine
    if not accelerators() or backend() is not None:
        return "transformers"
    try:
        vllm_program()
    except EngineUnavailable:
        return "transformers"
    return "vllm"


def side_by_side() -> int:
    """Return how many runs may compute at once on this machine, whoever started them: one if they share an accelerator,
    else one for each core, at most MOST_SIDE_BY_SIDE."""
    return 1 if accelerators() else max(1, min(os.cpu_count() or 1, MOST_SIDE_BY_SIDE))


def visible_devices() -> list[str]:
    """Return the accelerators that this process is restricted to, by Ray or a user; empty: it may use all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "") if accelerators() else ""
    return [name.strip().replace("/", "-") for name in names.split(",") if name.strip()]


def require_hardware(spec: AnySpec | None, experiment: str) -> None:
    """Raise HardwareMissing where the experiment's `requires` is not met. On a cluster, placement meets it."""
    if not isinstance(spec, ExperimentSpec) or spec.requires == "cpu" or backend() is not None:
        return
    if not accelerators():
        raise HardwareMissing(
            f"experiment {experiment!r} requires a GPU, and this machine has none (/dev/nvidia*, /dev/kfd). "
            "Run it on a machine with one. Its dataset can be built here: "
            f"etpi run {experiment} --data-only"
        )
