"""The settings of the cluster's Dagster instance, `dagster.yaml`, derived from `cluster.toml`."""

from __future__ import annotations

from pathlib import Path

from etpi_cluster.settings import Cluster
from etpi_resources.backend import BackendError

STORAGE = "etpi_cluster.placement.storage"


def dagster_home(settings: Cluster) -> Path:
    """Return the folder of `dagster.yaml` and of what steps print; the lake has it, so every node has it too."""
    return settings.lake / ".dagster_home"


def instance_yaml(settings: Cluster) -> str:
    """Return the text of `dagster.yaml`."""
    return f"""\
# Written by `etpi cluster init` from cluster.toml. After a change there: etpi cluster init --force
telemetry:
  enabled: false

# Runs and events. libpq reads the password from PGPASSFILE or PGPASSWORD; it never stands here.
storage:
  custom:
    module: {STORAGE}
    class: NodeStorage
    config:
      postgres_url: {settings.storage_url}

# A launched run starts at once, without a daemon. Where a daemon always runs (`etpi ui`, deploy/), a limit on runs at
# once is worth having, for a backfill over many experiments; without a daemon these runs would stay queued forever:
#   module: dagster.core.run_coordinator
#   class: QueuedRunCoordinator
#   config: {{max_concurrent_runs: 20}}
run_coordinator:
  module: dagster._core.run_coordinator
  class: DefaultRunCoordinator

run_launcher:
  module: etpi_cluster.placement.launcher
  class: NodeRunLauncher

# With a daemon, a run whose process was lost is resumed; its finished steps stay finished.
run_monitoring:
  enabled: true
  max_resume_run_attempts: 3
  start_timeout_seconds: 600
  poll_interval_seconds: 15

# What steps print. The folder is shared, so the web page shows the output of every node.
compute_logs:
  module: dagster._core.storage.local_compute_log_manager
  class: LocalComputeLogManager
  config:
    base_dir: {dagster_home(settings) / "compute_logs"}

local_artifact_storage:
  module: dagster._core.storage.root
  class: LocalArtifactStorage
  config:
    base_dir: {dagster_home(settings)}

python_logs:
  python_log_level: INFO

freshness:
  enabled: false

nux:
  enabled: false
"""


def require_current(settings: Cluster, file: Path) -> None:
    """Raise BackendError if a `dagster.yaml` names another database than `cluster.toml`, or an older etpi's classes."""
    text = file.read_text(encoding="utf-8")
    if settings.storage_url not in text or STORAGE not in text:
        raise BackendError(
            f"{file} does not name the storage {STORAGE} with the database {settings.postgres!r} of cluster.toml; "
            "write it again: etpi cluster init --force"
        )


def require_postgres(settings: Cluster) -> None:
    """Raise BackendError if the database cannot be opened."""
    import psycopg2

    try:
        psycopg2.connect(settings.postgres, connect_timeout=10).close()
    except psycopg2.OperationalError as error:
        raise BackendError(
            f"Postgres at {settings.postgres!r} cannot be opened: {' '.join(str(error).split())}. Is it running, does "
            "the database exist, and does PGPASSFILE name a file with the password (host:port:database:user:password, "
            "readable by its owner alone), or PGPASSWORD hold it?"
        ) from error
