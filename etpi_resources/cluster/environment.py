"""The environment variables that a run takes along to the nodes of a cluster.

Ray's list of jobs shows them, so none of them is a secret: files are named, keys and passwords are not passed. Those
come from the environment in which a node's Ray was started.
"""

from __future__ import annotations

import json
import os

from etpi_resources.cluster.settings import CLUSTER_VARIABLE

STOP_SECONDS = 60
"""Seconds between SIGTERM and SIGKILL for a job that is stopped: a run first stops its steps, a step its workers."""

_PASSED = (
    CLUSTER_VARIABLE,
    "ETPI_SPECS",
    "ETPI_TRAINER_PYTHON",
    "ETPI_VIEW_URL",
    "HF_HUB_OFFLINE",
    "PGPASSFILE",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN_PATH",
)


def passed_on() -> dict[str, str]:
    """Return the variables of this process that the jobs of a run get, and Ray's own for those jobs."""
    named = {name: value for name in _PASSED if (value := os.environ.get(name))}
    return {**named, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), "RAY_USAGE_STATS_ENABLED": "0"}


def inherited_working_dir() -> dict[str, str]:
    """Return Ray's option `working_dir` for the steps of the run that this job walks: the code that it took along."""
    try:
        env = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    except ValueError:
        return {}
    uri = env.get("working_dir")
    return {"working_dir": uri} if uri and "://" in uri else {}
