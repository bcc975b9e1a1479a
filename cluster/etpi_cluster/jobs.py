"""Ray's client for jobs, patient with a head that has just started: it answers before it can start a job."""

from __future__ import annotations

import time
from typing import Any

from ray.job_submission import JobSubmissionClient

START_SECONDS = 60.0
"""Time to wait for the head's agent, which starts jobs."""
_NOT_YET = "No available agent to submit job"

RUN_LABEL, STEP_LABEL = "dagster/run-id", "dagster/op"
"""Keys of a job's metadata; a run's own job has no `STEP_LABEL`."""


class JobClient(JobSubmissionClient):
    """Submits jobs to one cluster."""

    def submit_job(self, **job: Any) -> str:
        """Submit a job, with the keywords of Ray's client; return its id.

        Raises:
            RuntimeError: Ray refused it, or had no agent for START_SECONDS.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return super().submit_job(**job)
            except RuntimeError as error:
                if _NOT_YET not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(1)
