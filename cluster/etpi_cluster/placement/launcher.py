"""Dagster's run launcher on a cluster: the process that walks a run's steps is a Ray job on the head.

It asks for no CPU, so it never takes what a step of a run waits for, and it outlives every other node. dagster-ray's
launcher does the work; added here are what a run takes along to the nodes, and messages.
"""

from __future__ import annotations

import os
import shlex
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import dagster as dg
from dagster_ray import RayRunLauncher

from etpi_assets.specs.folders import VARIABLE, user_folders
from etpi_cluster.environment import passed_on
from etpi_cluster.jobs import RUN_LABEL, STEP_LABEL
from etpi_cluster.nodes import job_client
from etpi_cluster.settings import cluster

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


class NodeRunLauncher(RayRunLauncher):
    """Submits each run to the Ray of `cluster.toml`; `dagster.yaml` names this class without settings."""

    def __init__(self, inst_data: Any = None) -> None:
        settings = cluster()
        self._settings = settings
        super().__init__(address=settings.jobs, inst_data=inst_data)

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Any) -> Self:
        return cls(inst_data)

    @cached_property
    def client(self) -> JobSubmissionClient:
        return job_client(self._settings)

    def check_run_worker_health(self, run: dg.DagsterRun) -> Any:
        """Raise BackendError where Ray cannot be asked: the daemon then asks again later, and resumes nothing."""
        _ = self.client
        return super().check_run_worker_health(run)

    def terminate(self, run_id: str) -> bool:
        """Stop a run and the jobs of its steps; return whether the run was told.

        An executor that is told to end leaves its steps alone where runs are resumed: it cannot tell a stop from the
        loss of its node.
        """
        stopped = super().terminate(run_id)
        for job in self.client.list_jobs():
            labels = job.metadata or {}
            if labels.get(RUN_LABEL) == run_id and STEP_LABEL in labels and not job.status.is_terminal():
                self.client.stop_job(str(job.submission_id))
        return stopped

    def _launch_ray_job(self, submission_id: str, entrypoint: str, run: dg.DagsterRun) -> None:
        # The run reads the specs of the process that launches it: Ray starts it in another working folder.
        specs = os.pathsep.join(str(folder.path) for folder in user_folders())
        self.runtime_env = {"env_vars": {**passed_on(), **({VARIABLE: specs} if specs else {})}, **self._settings.code}
        entrypoint = _quoted(entrypoint)
        # Dagster writes `dagster`, which the PATH of a node's Ray need not have.
        origin = run.job_code_origin
        if origin is not None and entrypoint.startswith("dagster "):
            entrypoint = f"{shlex.quote(origin.executable_path)} -m {entrypoint}"
        super()._launch_ray_job(submission_id, entrypoint, run)


def _quoted(entrypoint: str) -> str:
    """Return a command of dagster-ray with its last word, JSON, quoted for a shell.

    dagster-ray puts quotes around it, but leaves those in it, which the settings of an instance may have.
    """
    words, _, last = entrypoint.partition(" '{")
    return f"{words} " + shlex.quote("{" + last[:-1]) if last else entrypoint
