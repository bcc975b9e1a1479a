"""The environment variables that a run takes along to the nodes of a cluster.

Ray's list of jobs shows them, so none of them is a secret: files are named, keys and passwords are not passed. Those
come from the environment in which a node's Ray was started.
"""

from __future__ import annotations

import json
import os
import socket

from etpi_resources.backend import CLUSTER_VARIABLE, BackendError

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


CODE_VARIABLE = "ETPI_RUN_CODE"
"""Environment variable of a step: the hash of the code of the run's own process."""


def require_code_of_run() -> None:
    """Raise BackendError if this process is a step on a node with other code than the run's process has."""
    expected = os.environ.get(CODE_VARIABLE)
    if not expected:
        return
    from etpi_cluster.code import code_hash

    if (here := code_hash()) != expected:
        raise BackendError(
            f"node {socket.gethostname()} has other code of etpi ({here}) than the process that walks this run "
            f"({expected}): results of two codes would be mixed. Install the same version on every node, or have the "
            "run take its code along (working_dir in cluster.toml)"
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
