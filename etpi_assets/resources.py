"""What a run has at hand: the lake, the specs, sandboxes and engines.

Belongs here: choosing an implementation by what a spec says. Does not belong here: the implementations
(`etpi_resources`), or Dagster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from etpi_assets.specs.experiment import ExperimentSpec, ServingSection
from etpi_assets.specs.load import AnySpec, Specs, load_specs
from etpi_resources.engines import EngineUnavailable
from etpi_resources.lake.lake import Lake
from etpi_resources.sandboxes import HostFactory, SandboxUnavailable

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat
    from etpi_resources.engines.serving import Checkpoint, Serving

__all__ = ["EngineUnavailable", "HardwareMissing", "Resources", "require_hardware"]

CONCURRENCY = 2 * (os.cpu_count() or 1)
"""Rollouts wait for sandboxes half of their time, so two a core keep the machine busy."""

ACCELERATORS = ("nvidia[0-9]*", "kfd")
"""Device files that say that there is one."""


class HardwareMissing(RuntimeError):
    """An experiment wants hardware that this machine does not have; the message says which."""


@dataclass
class Resources:
    """Everything an asset may use besides its inputs. One is made a run, so that a run sees one reading of the specs.

    Attributes:
        lake: where tables are.
        concurrency: rollouts under way at once; operational, so it never changes a result.
    """

    lake: Lake = field(default_factory=Lake.open)
    concurrency: int = CONCURRENCY
    specs_folder: Path | None = None

    @cached_property
    def specs(self) -> Specs:
        return load_specs(self.specs_folder)

    def sandboxes(self, kind: str) -> HostFactory:
        """The factory of a kind.

        Raises:
            SandboxUnavailable: the kind is not built in, or cannot work here; the message says what to install.
        """
        if kind == "bubblewrap":
            from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

            return BubblewrapFactory()
        if kind == "docker":
            from etpi_resources.sandboxes.docker import DockerFactory

            return DockerFactory()
        raise SandboxUnavailable(f'sandbox = {kind!r} is no kind of sandbox; use "bubblewrap" or "docker"')

    def serving(self, section: ServingSection, chat: ChatFormat, checkpoints: Sequence[Checkpoint]) -> Serving:
        """What serves the checkpoints of an experiment one after another; the caller closes it."""
        from etpi_resources.engines import serving

        if section.engine == "transformers":
            return serving.TransformersServing(chat)
        return serving.VllmServing(
            chat,
            checkpoints,
            options=section.options,
            template_kwargs=section.served_kwargs(),
            logs=self.lake.scratch("servers"),
            lock=self.lake.lock_file("server"),
        )


def accelerators() -> bool:
    """Whether this machine has one. Looks at device files alone: no torch."""
    return any(found for pattern in ACCELERATORS for found in Path("/dev").glob(pattern))


def require_hardware(spec: AnySpec | None, experiment: str) -> None:
    """Raise HardwareMissing where the experiment's `requires` is not met."""
    if not isinstance(spec, ExperimentSpec) or spec.requires == "cpu":
        return
    if not accelerators():
        raise HardwareMissing(
            f'experiment {experiment!r} says requires = "gpu", and this machine has none (/dev/nvidia*, /dev/kfd). '
            "Run it where there is one; its dataset can be built here: "
            f"dg launch --job build_dataset --partition {experiment}"
        )
